"""How long `--strategy auto` takes on one batch for all, and what it takes, for the models of models/.

    python benchmarks/auto_names.py [--models mlp lm ...] [--cluster FILE] [--batch 96] [--json FILE]

Seconds of deciding by the clock, and of all processors, the names that were estimated and those whose plans
were priced, and simulated steps: of data parallelism, of the quickest name, and of what is taken.
"""

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rows import write_rows

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, LOWERING
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.search.decide_strategy import decide_strategy
from partc.compiler.search.whole_steps import names_for
from partc.cost.cluster.cluster import Cluster, ranks_of, read_cluster
from partc.models.catalogue import build_model

EXAMPLES = Path(__file__).parent.parent / "examples"
LOSSES: Mapping[str, str] = {
    "mlp": "softmax_cross_entropy",
    "alexnet": "softmax_cross_entropy",
    "resnet50": "softmax_cross_entropy",
    "inception_v3": "softmax_cross_entropy",
    "resnet101": "softmax_cross_entropy",
    "lenet": "softmax_cross_entropy",
    "lm": "loss",
    "moe": "loss",
    "rnnlm": "loss",
    "rnntc": "softmax_cross_entropy",
    "nmt": "loss",
    "flexflow_nmt": "loss",
}


@dataclass(frozen=True)
class Decided:
    """What `auto` took.

    seconds, processor_s     by the clock; of the processors, of this process and those that it began
    data_s, name_s, taken_s  simulated steps
    """

    model: str
    nodes: int
    seconds: float
    processor_s: float
    estimated: int
    priced: int
    data_s: float
    name: str
    name_s: float | None
    taken: str
    taken_s: float


@paused_collection()  # as in the command
def decided(model: str, cluster: Cluster, batch: int) -> Decided:
    """Return what `auto` takes."""
    step = build_training_graph(build_model(model, batch=batch), loss=LOSSES[model], optimizer=SGD(0.1))
    begun_s, begun_processor_s = time.monotonic(), _processor_s()
    found = decide_strategy(
        lambda: import_training_graph(step), cluster, Options(batch="global"), (*DECIDE, LOWERING)
    )
    seconds, processor_s = time.monotonic() - begun_s, _processor_s() - begun_processor_s
    hosts = [rank.host for rank in ranks_of(cluster) if rank.replica is not None]
    names = set(names_for(hosts))
    named = [tried for tried in found.compared if names & set(tried.names)]
    ways = [tried for tried in found.compared if not names & set(tried.names)]
    best = min(named, key=lambda tried: tried.step_s, default=None)
    return Decided(
        model,
        len(found.training.graph.nodes),
        seconds,
        processor_s,
        len(names),
        len(named),
        min(tried.step_s for tried in ways),
        best.names[0] if best else "-",
        best.step_s if best else None,
        found.compared[0].names[0],
        found.compared[0].step_s,
    )


def _processor_s() -> float:
    return sum(os.times()[:4])


def main() -> None:
    """Decide, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--cluster", type=Path, default=EXAMPLES / "cluster-8x6-titanxp.json")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    cluster = read_cluster(asked.cluster)
    rows: list[Decided] = []
    print(
        "| model, nodes | s | of processors | names | data parallelism, ms | quickest name, ms | taken, ms |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in asked.models:
        row = decided(model, cluster, asked.batch)
        rows.append(row)
        quickest = "-" if row.name_s is None else f"{row.name}: {1e3 * row.name_s:.4g}"
        print(
            f"| {model}, {row.nodes} | {row.seconds:.1f} | {row.processor_s:.1f} "
            f"| {row.estimated} estimated, {row.priced} priced "
            f"| {1e3 * row.data_s:.4g} | {quickest} | {row.taken}: {1e3 * row.taken_s:.4g} |",
            flush=True,
        )
        write_rows(rows, asked.json)


if __name__ == "__main__":
    main()
