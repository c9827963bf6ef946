"""Break what the compiler wrote, at random: verify finds whatever changes a variable by more than rounding.

Whether a mutant does is decided without verify: it and the plan as it was are trained side by side, and
every copy of every variable is compared after each step. What changes no bit must pass.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.ranks import Ranks, launch_in_process
from partc.compiler.verification.verify import VerifyReport, verify
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import Batch, Compiled, compile_step, random_batches
from tests.builders.plans.mutants import Mutant, draw_mutant, launch_mutant

STEPS = 3
FAR = {"float64": 1e-8, "float32": 1e-3}  # of a variable's largest change: beyond any rounding

DROPPING = """
forward (double[8,4] x) => (double loss)
<double[4,4] W = {0.1, 0.7, -0.3, 0.2, 0.5, -0.6, 0.4, 0.9, -0.8, 0.3, 0.2, 0.1, 0.6, -0.2, 0.7, -0.4},
 double[4] b = {0.3, 0.1, 0.2, 0.4}, double r = {0.25}, bool t = {1}> {
    h0 = MatMul (x, W)
    h1 = Add (h0, b)
    h2 = Tanh (h1)
    h = Dropout (h2, r, t)
    y = MatMul (h, W)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""

# model (of tests/builders/graphs/training_models.py), cluster, strategy, reading of the batch
PLANS = {
    "all-reduce": ("mlp, momentum, clipped", "2x2", "allreduce", "per-replica"),
    "servers apart": ("lm, adagrad, clipped", "2x2s", "ps", "per-replica"),
    "hybrid, global": ("lm, momentum, time-major", "2x2", "hybrid", "global"),
    "averages": ("averages and a counter", "1x3", "allreduce", "global"),
    "float32 on servers": ("mlp, float32", "2x2", "ps", "per-replica"),
    "convolutions": ("convolutions, float32", "1x3", "auto", "global"),
    "Adam, tables": ("foreign adam", "2x2", "auto", "per-replica"),
    "dropout": ("", "1x2", "allreduce", "per-replica"),
}
SAMPLED = 10
ALL = 320

Fate = Literal["refused", "far", "near", "the same"]


@cache
def compiled(name: str, folder: Path) -> Compiled:
    model, cluster, strategy, batch = PLANS[name]
    if model:
        step = onnx.load_from_string(training_model(model))
    else:
        step = build_training_graph(parse(DROPPING), loss="loss", optimizer=Adam(0.01))
    return compile_step(import_training_graph(step), folder / name, cluster, strategy, batch)


@dataclass(frozen=True)
class Trace:
    """Every variable and the loss after every step, and whether all copies were equal."""

    variables: list[dict[str, np.ndarray]]
    losses: list[dict[str, np.ndarray]]
    agrees: bool


def trace(ranks: Ranks, names: list[str]) -> Trace:
    variables, losses, agrees = [{name: ranks.read(name) for name in names}], [], True
    for _ in range(STEPS):
        losses.append(ranks.step())
        variables.append({name: ranks.read(name) for name in names})
        agrees &= not ranks.disagreeing()
    return Trace(variables, losses, agrees)


def fate(mutant: Mutant, sound: Trace, batches: list[Batch]) -> Fate:
    """Tell what a mutation does to the training."""
    try:
        with launch_mutant(mutant, batches, seed=0) as ranks:
            broken = trace(ranks, list(sound.variables[0]))
    except Exception:  # whatever a broken plan raises, nobody takes it for trained
        return "refused"
    if not broken.agrees:
        return "far"
    pairs = [
        (step[name], after[name], sound.variables[0][name])
        for step, after in zip(sound.variables, broken.variables, strict=True)
        for name in step
    ]
    if any(is_far(*pair) for pair in pairs):
        return "far"
    same = all(one.tobytes() == other.tobytes() for one, other, _ in pairs)
    told = zip(sound.losses, broken.losses, strict=True)
    return "the same" if same and all(one == other for one, other in told) else "near"


def is_far(one: np.ndarray, other: np.ndarray, start: np.ndarray) -> bool:
    if one.dtype.kind != "f":
        return not np.array_equal(one, other)
    change = np.abs(one - start).max(initial=0.0)
    stored = 16 * np.finfo(one.dtype).eps * np.abs(one)
    return not np.all(np.abs(one - other) <= FAR[one.dtype.name] * change + stored)


@contextmanager
def launch(mutant: Mutant, batches: list[Batch], seed: int) -> Iterator[Ranks]:
    with launch_mutant(mutant, batches, seed) as ranks:
        yield ranks


def report_on(mutant: Mutant, plan: Compiled, batches: list[Batch]) -> VerifyReport:
    return verify(plan.folder, steps=STEPS, data=batches, launcher=lambda *_: launch(mutant, batches, 0))


@cache
def sound_run(name: str, folder: Path) -> tuple[Compiled, list[Batch], Trace]:
    plan = compiled(name, folder)
    batches = random_batches(plan.plan, STEPS, seed=1)
    assert verify(plan.folder, steps=STEPS, data=batches, launcher=launch_in_process).passed
    with launch_in_process(plan.folder, batches, STEPS, 0) as ranks:
        return plan, batches, trace(ranks, [v.name for v in plan.plan.variables])


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def judge(seed: int, plans: Path, folder: Path) -> tuple[Fate, str, bool]:
    """Return a mutant's fate, what it is, and whether it passes verify."""
    name = list(PLANS)[seed % len(PLANS)]
    plan, batches, sound = sound_run(name, plans)
    mutant = draw_mutant(plan.folder, folder / str(seed), seed)
    decided = fate(mutant, sound, batches)
    what = f"{seed}: {name}: {mutant.what}"
    if decided == "refused":
        return decided, what, False
    return decided, what, report_on(mutant, plan, batches).passed


def check(seeds: range, plans: Path, folder: Path) -> Counter[str]:
    fates: Counter[str] = Counter()
    missed, false_alarms = [], []
    for seed in seeds:
        decided, what, passed = judge(seed, plans, folder)
        fates[decided] += 1
        if decided == "far" and passed:
            missed.append(what)
        if decided == "the same" and not passed:
            false_alarms.append(what)
    assert not missed, missed
    assert not false_alarms, false_alarms
    return fates


def test_verify_finds_what_changes_a_value(plans: Path, tmp_path: Path) -> None:
    fates = check(range(SAMPLED), plans, tmp_path)

    assert fates["far"] >= SAMPLED // 3, fates


@pytest.mark.long
def test_verify_finds_all_of_a_hundred_mutants_that_change_a_value(plans: Path, tmp_path: Path) -> None:
    fates = check(range(ALL), plans, tmp_path)

    assert fates["far"] >= 100, fates
