"""Gradients of random graphs of plain ops against central differences."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.builders.graphs.onnx_cases import Problem, anyhow, gradients, slopes
from tests.builders.graphs.random_graphs import problems

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


def check(problem: Problem) -> None:
    found = gradients(problem.model, anyhow)
    for name in problem.parameters:
        for position, slope in slopes(problem, name):
            gradient = found[name][position] if name in found else 0.0
            assert gradient == pytest.approx(slope, rel=1e-4, abs=1e-5), (name, position)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=50, derandomize=True, deadline=None, database=None, suppress_health_check=SLOW)
@given(problems())
def test_gradient_of_a_random_graph_equals_central_differences(problem: Problem) -> None:
    check(problem)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=2000, derandomize=True, deadline=None, database=None, suppress_health_check=SLOW)
@given(problems())
def test_gradients_of_many_random_graphs_equal_central_differences(problem: Problem) -> None:
    check(problem)
