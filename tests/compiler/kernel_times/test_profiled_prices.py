"""Measured kernels price the task graph and whole plans alike, and lead a search where they say."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from zlib import crc32

import numpy as np
import pytest

from partc.compiler.api import kernels_of, search
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options, SearchOptions
from partc.compiler.search.operators.own_space import OwnSpace
from partc.compiler.search.operators.walk_tasks import StepConfigs, random_state
from partc.compiler.search.whole_steps import WholeSteps
from partc.cost.simulation.measured_kernels import KernelTimes
from partc.passes.scheduling.kernels import Operand, parse_kernel
from tests.builders.plans.compiled_steps import cluster_of
from tests.compiler.search.operators.test_walk_tasks import two_layers
from tests.compiler.task_graphs.test_step_tasks import GLOBAL, step

CPU = ("cpu", "cpu-core", 1)
KernelSeconds = Callable[[str], float]


class Invented(dict[str, float]):
    """Has seconds for every kernel."""

    def __init__(self, seconds: KernelSeconds) -> None:
        super().__init__({"": 0.0})
        self._seconds = seconds

    def get(self, key: str, default: float | None = None) -> float | None:  # type: ignore[override]
        if key not in self:
            self[key] = self._seconds(key)
        return self[key]


def with_invented(seconds: KernelSeconds) -> Options:
    return replace(GLOBAL, profile=KernelTimes({CPU: Invented(seconds)}, "invented"))


def whole_steps(name: str, shape: str, options: Options) -> tuple[WholeSteps, OwnSpace]:
    whole = WholeSteps(lambda: import_training_graph(step(name)), cluster_of(shape), options)
    whole("allreduce", "allreduce")
    own = OwnSpace.of(whole.first)
    assert own is not None
    return whole, own


def by_operator(key: str) -> float:
    """Let what operators take grow with what they read, and be more for some than for others."""
    elements = sum(prod(shape) for shape in _shapes(key))
    return elements * 2e-10 * (1 + crc32(parse_kernel(key).op.encode()) % 5)


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_the_task_graph_and_the_plan_agree_on_invented_times(name: str) -> None:
    whole, own = whole_steps(name, "2x2", with_invented(by_operator))
    start = own.starts()[0]

    for state in (start, random_state(own.tasks, own.space, start, np.random.default_rng(3), moves=2)):
        plan = whole("own", own.strategy(state))
        assert plan is not None
        assert own.tasks.begin(state) == pytest.approx(plan.step_s, rel=0.25)


def test_both_take_all_of_a_kernels_time() -> None:
    slow, own = whole_steps("mlp", "1x2", with_invented(lambda key: float("MatMul" in key)))
    state = own.starts()[0]

    plan = slow("own", own.strategy(state))

    assert plan is not None
    assert plan.step_s == pytest.approx(8.0, rel=0.01), "three products, and their eight with gradients"
    assert own.tasks.begin(state) == pytest.approx(8.0, rel=0.01)


def _shapes(key: str) -> list[tuple[int, ...]]:
    found = []
    for operand in parse_kernel(key).operands:
        if isinstance(operand, Operand):
            sizes = operand.shape
            found.append(sizes[::-1] if operand.transposed else sizes)
    return found


def where_rows_are_few(key: str) -> float:
    """Let a product be quick where it has less than 8 samples, the batch of `two layers`."""
    is_slow = parse_kernel(key).op == "MatMul" and any(8 in shape for shape in _shapes(key))
    return 1e-3 if is_slow else 1e-6


def where_weights_are_parts(key: str) -> float:
    """Let a product be quick where it has less than all 768 of the hidden layer."""
    is_slow = parse_kernel(key).op == "MatMul" and any(768 in shape for shape in _shapes(key))
    return 1e-3 if is_slow else 1e-6


def exhausted(own: OwnSpace) -> tuple[StepConfigs, float]:
    """Return the quickest of all states, and its step."""
    own.tasks.begin(own.alone)
    steps = {}
    for choice in product(*(range(len(configs)) for configs in own.kinds.configs)):
        state = own.kinds.state(choice)
        if (step_s := own.tasks.move(dict(enumerate(state)))) is not None:
            steps[state] = step_s
    assert len(steps) > 20
    best = min(steps, key=steps.__getitem__)
    return best, steps[best]


@pytest.mark.parametrize("seconds", [where_rows_are_few, where_weights_are_parts])
def test_a_search_takes_what_exhaustion_takes(seconds: KernelSeconds) -> None:
    two_layers()  # makes the step known
    options = with_invented(seconds)
    whole, own = whole_steps("two layers", "1x2", options)
    best, step_s = exhausted(own)
    blind, _ = exhausted(whole_steps("two layers", "1x2", GLOBAL)[1])

    asked = SearchOptions(60.0, method="exhaustive")
    found = search(step("two layers"), cluster_of("1x2"), replace(options, search=asked))

    priced = whole("own", own.strategy(best))
    assert priced is not None
    assert found.best.step_s == priced.step_s
    ours = own.tasks.begin(blind)
    assert ours is not None
    assert step_s < 0.8 * ours, "by the roofline another state is best"
    divided = {name for config in best for name, degree in config.split if degree > 1}
    assert (divided == {"batch"}) == (seconds is where_rows_are_few)


def test_kernels_of_a_plan_say_what_its_nodes_do() -> None:
    listed = kernels_of(step("mlp"), cluster_of("2x2"), GLOBAL, with_parts=False)

    keys = {kernel.key for work in listed.work for kernel in work.kernels}
    assert "MatMul(float32[8,256], float32[256,1024])" in keys, "a quarter of 32 samples"
    assert "MatMul(float32[32,256], float32[256,1024])" not in keys
    for work in listed.work:
        assert sum(kernel.touched_bytes for kernel in work.kernels) <= work.touched_bytes
        assert sum(kernel.flops for kernel in work.kernels) <= work.flops
