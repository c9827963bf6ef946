"""Import does twice the work for a step of twice the size, counted in lines of Python that run."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from partc.passes.analysis.find_gradients import find_gradients
from partc.passes.simplify import simplify
from partc.passes.training_graph import TrainingGraph
from tests.foreign_steps import import_step


def step_of(parameters: int) -> TrainingGraph:
    """Return a step that trains so many parameters, each with a slot, from one input."""
    numbers = range(parameters)
    inputs = "".join(f", float[4] w{i}, float[4] m{i}" for i in numbers)
    outputs = "".join(f", float[4] w{i}_next, float[4] m{i}_next" for i in numbers)
    layers = "".join(f"y{i} = Mul (x, w{i}) " for i in numbers)
    updates = "".join(
        f"d{i} = ReduceMean <keepdims = 0> (x, axis) m{i}_next = Add (m{i}, d{i}) "
        f"w{i}_next = Sub (w{i}, m{i}_next) "
        for i in numbers
    )
    return import_step(f"""
        step (float[8,4] x{inputs}) => (float loss{outputs}) <int64[1] axis = {{0}}> {{
            {layers} y = Sum ({", ".join(f"y{i}" for i in numbers)})
            loss = ReduceMean <keepdims = 0> (y) {updates}
        }}""")


def lines_run(work: Callable[[TrainingGraph], object], training: TrainingGraph) -> int:
    count = 0

    def count_line(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return count_line

    sys.settrace(count_line)
    try:
        work(training)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("work", [find_gradients, simplify])
def test_work_grows_with_the_number_of_parameters(work: Callable[[TrainingGraph], object]) -> None:
    small, large = step_of(40), step_of(160)
    if work is simplify:
        find_gradients(small), find_gradients(large)

    assert lines_run(work, large) < 5 * lines_run(work, small)
