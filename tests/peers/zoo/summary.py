"""What came of all trials: the table for docs, and the failures by mechanism.

python -m tests.peers.zoo.summary RESULTS.jsonl              the table of docs/training-graphs.md
python -m tests.peers.zoo.summary RESULTS.jsonl --write FILE    between the marks of FILE
python -m tests.peers.zoo.summary RESULTS.jsonl --failures   every kind of failure, with a command for each
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.peers.zoo.catalogue import MODELS
from tests.peers.zoo.run import read_records
from tests.peers.zoo.trial import ANY, OPTIMIZERS, STEPS, Record

BEGIN, END = "<!-- zoo: written by make zoo -->", "<!-- end of zoo -->"


def table(records: list[Record]) -> str:
    """Return the counts by family, and every refusal with its reason, as Markdown."""
    titles = [
        "models",
        "trials",
        "trained as one device",
        "of them told to differ from it",
        "after `--train`",
    ]
    titles += ["after `--sample-axis`", "as PyTorch", "refused", "failed"]
    lines = [f"| family | {' | '.join(titles)} |", "| --- " + "| ---: " * len(titles) + "|"]
    by_family = defaultdict(list)
    for record in records:
        by_family[MODELS[record.trial.model].family].append(record)
    for family, some in by_family.items():
        lines.append(_row(family, some))
    lines.append(_row("**all**", records))
    for outcome in ("refused", "failed"):
        if groups := _grouped(records, outcome):
            lines += ["", f"| {outcome} | at | trials | models |", "| --- | --- | ---: | --- |"]
        for (stage, message), some in groups:
            lines.append(f"| {_cell(message)} | {stage} | {len(some)} | {_models(some)} |")
    return "\n".join(lines)


def _row(family: str, records: list[Record]) -> str:
    counted = Counter(record.outcome for record in records)
    equal = sum(bool(record.torch) for record in records)
    beside = sum(record.trial.beside_torch and record.outcome != "refused" for record in records)
    models = len({record.trial.model for record in records})
    trained = [record for record in records if record.outcome == "trained"]
    departing = sum(bool(record.departures) for record in trained)
    named = sum(record.parameters == "named" for record in trained)
    declared = sum(record.axes == "declared" for record in trained)
    cells = [family, models, len(records), len(trained), departing, named, declared, f"{equal} of {beside}"]
    return "| " + " | ".join(map(str, [*cells, counted["refused"], counted["failed"]])) + " |"


def failures(records: list[Record], kept: str = "failures") -> str:
    """Return every kind of failure and refusal: its error, who shows it, and how to see it."""
    parts = []
    for outcome in ("failed", "refused"):
        parts.append(f"# {outcome}: {sum(r.outcome == outcome for r in records)} of {len(records)} trials")
        for (stage, message), some in _grouped(records, outcome):
            first = min(
                some, key=lambda record: len(record.trace) + 100 * (record.trial.strategy == "random")
            )
            parts.append(f"## {stage}: {message}\n\n{len(some)} trials: {_models(some)}\n")
            parts.append(f"    {first.kind}: {first.message[:600]}\n    at {first.at}\n    fix {first.fix}")
            if first.trace:
                parts.append("\n".join("    " + line for line in first.trace.splitlines()[-8:]))
            parts.append(_reproduction(first, kept))
    return "\n\n".join(parts)


def _reproduction(record: Record, kept: str) -> str:
    trial = record.trial
    if record.outcome == "failed" and record.stage in ("compile", "verify"):
        folder = f"{kept}/{trial.label}"
        strategy = f"{folder}/asked.json" if trial.strategy in ("random", ANY) else trial.strategy
        return (
            f"    partc compile {folder}/train.onnx -c {trial.cluster}.json --batch {trial.batch} "
            f"--strategy {strategy} -o out && partc verify out --steps {STEPS}"
        )
    lr, settings = OPTIMIZERS[trial.optimizer]
    given = "".join(f" --set-optimizer {setting}" for setting in settings)
    return (
        f"    partc grad {trial.model}.{trial.variant}.onnx --loss {MODELS[trial.model].loss} "
        f"--optimizer {trial.optimizer} --lr {lr}{given} -o train.onnx    # {trial}"
    )


def _grouped(records: Iterable[Record], outcome: str) -> list[tuple[tuple[str, str], list[Record]]]:
    groups = defaultdict(list)
    for record in records:
        if record.outcome == outcome:
            groups[record.stage, _mechanism(record)].append(record)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _mechanism(record: Record) -> str:
    """Return a message without the names and numbers of one model."""
    text = record.message.splitlines()[0] if record.message else record.trace.strip().splitlines()[-2].strip()
    text = re.sub(r"'[^']*'", "...", text)
    text = re.sub(r"\[[^\]]*\]", "[...]", text)
    text = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "N", text)
    if record.kind not in ("", "Differs") and record.outcome == "failed":
        text = f"{record.kind}: {text}"
    return text[:110]


def _models(records: list[Record]) -> str:
    counted = Counter(f"{record.trial.model}" for record in records)
    names = [name if count == 1 else f"{name} ({count})" for name, count in sorted(counted.items())]
    return ", ".join(names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--failures", action="store_true")
    parser.add_argument("--write", type=Path, help="put the table between this file's marks")
    asked = parser.parse_args()
    records = read_records(asked.results)
    if asked.write is None:
        print(failures(records) if asked.failures else table(records))
        return
    before, rest = asked.write.read_text().split(BEGIN)
    asked.write.write_text(f"{before}{BEGIN}\n\n{table(records)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
