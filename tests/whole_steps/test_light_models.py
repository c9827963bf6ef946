"""Models that nobody here made, under any strategy on any cluster: as one device, or refused with a way out.

What a refusal's fix names is compiled in its turn, and trains as one device too. A file is compiled again
without the entry that is refused, until it is right.
"""

import contextlib
import io
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from partc.compiler.commands.cli import main
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.verify import launch_in_process, verify
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.roles.find_roles import find_roles
from partc.passes.search.operators.find_groups import find_groups
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.graphs.light_models import LIGHT_MODELS, light_step
from tests.builders.plans.compiled_steps import random_batches
from tests.builders.plans.random_words import random_cluster_file, random_file, random_name
from tests.checks.float64_windows import open_in_float64

MOST_TURNS = 12  # refusals of one draw, each of another entry
SHALLOW = ("bvlc_alexnet", "zfnet512", "squeezenet")


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    open_in_float64(monkeypatch)


@dataclass
class Draw:
    """A step and a cluster, as files of a folder, and what is asked of them."""

    folder: Path
    strategy: str | dict[str, Any]
    batch: str | None

    def compile(self) -> str:
        """Return what is said where this is refused, nothing where it is compiled."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        strategy = self.strategy
        if isinstance(strategy, dict):
            (self.folder / "mine.json").write_text(json.dumps(strategy))
            strategy = str(self.folder / "mine.json")
        options = [
            "-c",
            str(self.folder / "cluster.json"),
            "-o",
            str(self.folder / "out"),
            "--strategy",
            strategy,
        ]
        said = [] if self.batch is None else ["--batch", self.batch]
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            code = main(["compile", str(self.folder / "step.onnx"), *options, *said])
        text = told.getvalue()
        assert code in (0, 2), f"{self}: {text}"
        if code == 0:
            return ""
        assert re.search(r"partc: .+\n  at:  .+\n  fix: .+", text), text
        return text[text.index("partc: ") :]

    def verify(self) -> None:
        """See that one step ends as on one device, and that it trains."""
        plan = read_plan_folder(self.folder / "out")
        report = verify(plan, steps=1, data=random_batches(plan.plan, 1), launcher=launch_in_process)
        assert {check.verdict for check in report.variables} == {"equal"}, f"{self}: {report.summary()}"
        assert not report.disagreeing
        moved = sum(check.max_change > 0 for check in report.variables)
        assert moved > len(report.variables) // 2, f"{self}: {moved} variables moved"

    def ways_out(self, refusal: str) -> list["Draw"]:
        """Return what the fix of a refusal names: strategies, and readings of the batch."""
        fix = refusal.partition("\n  fix: ")[2]
        fewer = re.search(r"microbatches=(\d+)|no micro-batches", fix)
        found = [
            Draw(self.folder, name, self.batch) for name in re.findall(r"--strategy ([a-z][\w=,-]*)", fix)
        ]
        for batch in re.findall(r"--batch (global|per-replica)", fix):
            strategy = self.strategy | {"batch": batch} if isinstance(self.strategy, dict) else self.strategy
            found.append(Draw(self.folder, _with_microbatches(strategy, fewer), batch))
        if fewer and not found:
            found.append(Draw(self.folder, _with_microbatches(self.strategy, fewer), self.batch))
        return found

    def without(self, refusal: str) -> bool:
        """Drop the entry that a refusal is about; tell if there is one."""
        entry = re.search(r"\n  at:  .*ops\[(\d+)\]", refusal)
        if entry is None or not isinstance(self.strategy, dict):
            return False
        del self.strategy["ops"][int(entry[1])]
        return True


def _with_microbatches(strategy: str | dict[str, Any], fewer: re.Match[str] | None) -> str | dict[str, Any]:
    if fewer is None:
        return strategy
    number = int(fewer[1] or 1)
    if isinstance(strategy, dict):
        return strategy | {"microbatches": number}
    words = [word for word in strategy.split(",") if not word.startswith("microbatches")]
    return ",".join([*words, f"microbatches={number}"])


def drawn(model: str, seed: int, folder: Path) -> Draw:
    rng = np.random.default_rng(seed)
    samples = int(rng.choice([1, 2, 3, 4, 6]))
    step = light_step(model, samples)
    onnx.save(step, folder / "step.onnx")
    cluster = random_cluster_file(rng)
    (folder / "cluster.json").write_text(cluster.text)
    if rng.random() < 0.5:
        batch = [None, "global", "per-replica"][int(rng.integers(3))]
        return Draw(folder, random_name(len(cluster.devices), rng), batch)
    training = import_training_graph(step)
    groups = find_groups(training, infer_facts(training, {}, 1), find_roles(training).main)
    return Draw(folder, random_file(groups, cluster.devices, rng), None)


def check(model: str, seed: int, folder: Path) -> None:
    draw = drawn(model, seed, folder)
    for _ in range(MOST_TURNS):
        refusal = draw.compile()
        if not refusal:
            return draw.verify()
        for way_out in draw.ways_out(refusal):
            again = way_out.compile()
            assert not again or re.search(r"ops\[|does not divide", again), (
                f"{draw}: {refusal}\n{way_out}: {again}"
            )
            if not again:
                way_out.verify()
        if not draw.without(refusal):
            return


SAMPLED = [
    ("zfnet512", 11),  # seven replicas for a batch of one: the refusal names another reading
    ("bvlc_alexnet", 13),  # one-weird-trick of batches per replica: the refusal names tensor=6
    ("zfnet512", 9),  # a file
]
ALL = [(model, seed) for model in LIGHT_MODELS for seed in range(60 if model in SHALLOW else 12)]


@pytest.mark.parametrize(("model", "seed"), SAMPLED)
def test_a_strangers_model_trains_as_on_one_device_or_is_refused(
    model: str, seed: int, tmp_path: Path
) -> None:
    check(model, seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [drawn for drawn in ALL if drawn not in SAMPLED])
def test_many_strangers_models_train_as_on_one_device_or_are_refused(
    model: str, seed: int, tmp_path: Path
) -> None:
    check(model, seed, tmp_path)
