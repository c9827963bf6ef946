"""What operator groups compute on which way, and what waits for what."""

from pathlib import Path

import pytest

from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.task_graphs.computing_order import computing_order
from partc.passes.search.operators.find_groups import find_groups
from partc.passes.search.operators.grouped_step import BACKWARD, WEIGHTS, GroupedStep, group_step
from tests.builders.graphs.siamese_step import siamese_step
from tests.compiler.task_graphs import test_step_tasks as task_graphs
from tests.passes.layouts.test_place_nodes import analysed, recurrence

STEPS = (*task_graphs.STEPS, "recurrence", "siamese")


def grouped(name: str, folder: Path) -> GroupedStep:
    others = {"recurrence": recurrence, "siamese": lambda: siamese_step(SGD(0.1))}
    analysis = analysed(others[name]() if name in others else task_graphs.step(name), folder)
    return group_step(analysis, find_groups(analysis.training, analysis.facts, analysis.main))


@pytest.mark.parametrize("name", STEPS)
def test_no_part_waits_for_a_later_one_of_its_group(name: str, tmp_path: Path) -> None:
    step = grouped(name, tmp_path)

    assert len(computing_order(step)) == sum(len(group.nodes) for group in step.groups)
    for tensor, readers in step.readers.items():
        if tensor in step.maker:
            group, way = step.maker[tensor]
            assert all(way < reading for reader, reading in readers if reader == group), tensor


@pytest.mark.parametrize("name", STEPS)
def test_every_node_is_of_one_part_or_sums_terms(name: str, tmp_path: Path) -> None:
    step = grouped(name, tmp_path)

    nodes = [node.name for group in step.groups for own in group.nodes.values() for node in own]
    assert len(nodes) == len(set(nodes))
    left = {node.name: node for node in step.analysis.training.graph.nodes if node.name in step.analysis.main}
    assert all(left[name].op in ("Add", "Sum") for name in left.keys() - set(nodes))
    terms = {term for own in step.terms.values() for term in own}
    assert terms <= step.maker.keys() | step.analysis.training.variables.keys()


def test_the_gradients_of_each_parameter_are_a_part_of_their_own(tmp_path: Path) -> None:
    step = grouped("mlp", tmp_path)

    ways = [step.maker[term][1] for own in step.terms.values() for term in own]
    weights = [own for own in ways if own[0] == WEIGHTS]
    assert len(weights) == len(ways) == 2 * len(step.groups)
    assert {way for group in step.groups for way in group.nodes if way[0] == WEIGHTS} == {
        (WEIGHTS, 0),
        (WEIGHTS, 1),
    }


def test_products_for_other_groups_come_apart_from_what_own_gradients_wait_for(tmp_path: Path) -> None:
    """dX = dY W^T, which the layer before waits for, need not be there before dW = X^T dY begins."""
    step = grouped("mlp", tmp_path)

    waited_for = set()  # within the group
    for tensor, readers in step.readers.items():
        group, way = step.maker.get(tensor, (None, None))
        if group is not None and any(reader == group and on[0] == WEIGHTS for reader, on in readers):
            waited_for.add((group, way))
    last = len(step.groups) - 1
    assert (last, (BACKWARD, 0)) in waited_for  # the gradient of the loss
    assert step.groups[last].nodes[BACKWARD, 1][0].op == "MatMul"
    for group, way in waited_for:
        assert "MatMul" not in [node.op for node in step.groups[group].nodes[way]]
