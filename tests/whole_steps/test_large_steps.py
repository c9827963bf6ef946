"""Steps of many nodes: work that grows with their number, and paths of any length.

Work is counted in lines of Python that run.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.passes.graph.simplify import simplify
from partc.passes.roles.find_gradients import find_gradients
from tests.builders.graphs.foreign_steps import import_step, parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    cluster_of,
    compile_step,
    import_text,
    random_batches,
)
from tests.checks.training_steps import EVERYTHING


def many_parameters(count: int) -> str:
    """Return a step that trains so many parameters, each with a slot, from one input."""
    numbers = range(count)
    inputs = "".join(f", float[4] w{i}, float[4] m{i}" for i in numbers)
    outputs = "".join(f", float[4] w{i}_next, float[4] m{i}_next" for i in numbers)
    layers = "".join(f"y{i} = Mul (x, w{i}) " for i in numbers)
    updates = "".join(
        f"d{i} = ReduceMean <keepdims = 0> (x, axis) m{i}_next = Add (m{i}, d{i}) "
        f"w{i}_next = Sub (w{i}, m{i}_next) "
        for i in numbers
    )
    return f"""
        step (float[8,4] x{inputs}) => (float loss{outputs}) <int64[1] axis = {{0}}> {{
            {layers} y = Sum ({", ".join(f"y{i}" for i in numbers)})
            loss = ReduceMean <keepdims = 0> (y) {updates}
        }}"""


def lines_run(work: Callable[[], object]) -> int:
    count = 0

    def count_line(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return count_line

    sys.settrace(count_line)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def test_finding_gradients_grows_with_the_parameters() -> None:
    small, large = (import_step(many_parameters(count)) for count in (40, 160))

    assert lines_run(lambda: find_gradients(large)) < 5 * lines_run(lambda: find_gradients(small))


def test_simplifying_grows_with_the_parameters() -> None:
    small, large = (import_step(many_parameters(count)) for count in (40, 160))
    find_gradients(small), find_gradients(large)

    assert lines_run(lambda: simplify(large)) < 5 * lines_run(lambda: simplify(small))


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_compiling_grows_with_the_parameters(tmp_path: Path, strategy: str) -> None:
    lines = []
    for count in (25, 100):
        training = import_text(many_parameters(count), loss="loss")
        options, folder = Options(strategy=strategy), tmp_path / str(count)
        lines.append(lines_run(lambda: compile_graph(training, cluster_of("1x2"), folder, options)))  # noqa: B023  # called at once

    assert lines[1] < 5 * lines[0]


@pytest.fixture
def low_limit() -> Iterator[int]:
    """How deep Python recurses meanwhile: half of what it does."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(usual // 2)
    yield usual // 2
    sys.setrecursionlimit(usual)


@pytest.mark.parametrize(
    ("strategy", "batch"),
    [
        ("allreduce", "per-replica"),
        pytest.param("ps", "global", marks=pytest.mark.long),
        pytest.param("allreduce", "global", marks=pytest.mark.long),
        pytest.param("ps", "per-replica", marks=pytest.mark.long),
    ],
)
def test_a_path_may_be_longer_than_python_recurses(
    tmp_path: Path, strategy: str, batch: str, low_limit: int
) -> None:
    layers = "".join(f"y{i} = Tanh (y{i - 1}) " for i in range(1, low_limit))
    forward = parse(f"""
        deep (float[4,3] x) => (float loss) <float[3,3] W = {{1, 0, 0, 0, 1, 0, 0, 0, 1}}> {{
            y0 = MatMul (x, W) {layers} loss = ReduceMean <keepdims = 0> (y{low_limit - 1})
        }}""")
    training = import_training_graph(
        build_training_graph(forward, loss="loss", optimizer=SGD(0.1), parameters=EVERYTHING)
    )

    compiled = compile_step(training, tmp_path / "out", "1x2", strategy, batch)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


@pytest.mark.parametrize("cluster", ["1x2", "2x2"])
def test_what_every_rank_could_make_is_made_in_parts_however_long_it_takes(
    tmp_path: Path, cluster: str, low_limit: int
) -> None:
    """A recurrence that begins at a variable is whole by itself; its reader wants the samples of a rank."""
    steps = low_limit // 4
    layers = "".join(f"y{i} = Tanh (y{i - 1}) " for i in range(1, steps + 1))
    forward = parse(f"""
        deep (float[8,3] x) => (float loss)
        <float[3,3] W = {{1, 0, 0, 0, 1, 0, 0, 0, 1}}, float[3] first = {{1, 2, 3}}> {{
            h = MatMul (x, W) sizes = Shape (x) y0 = Expand (first, sizes) {layers}
            z = Mul (h, y{steps}) loss = ReduceMean <keepdims = 0> (z)
        }}""")
    training = import_training_graph(
        build_training_graph(forward, loss="loss", optimizer=SGD(0.1), parameters=EVERYTHING)
    )
    strategy = "data=2,tensor=2" if cluster == "2x2" else "allreduce"

    compiled = compile_step(training, tmp_path / "out", cluster, strategy, "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
