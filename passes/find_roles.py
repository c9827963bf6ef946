"""Tell what each node and each variable is for.

main computation   forward and backward: what gradients and outputs come from, once per replica
post-aggregation   between the gradients and more than one parameter (clipping by global norm)
updates            the rest: from the gradients of one parameter, or from no data at all

parameter          has a gradient
slot               shaped like one parameter and updated from its gradient
other              counters, schedules, moving averages of data
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import onnx_graphsurgeon as gs

from partc.passes.reachability import ancestors, descendants, reads_of
from partc.passes.training_graph import Gradient, TrainingGraph

Role = Literal["parameter", "slot", "other"]


@dataclass(frozen=True, slots=True)
class VariableRole:
    """What a variable is for, and the parameter that a slot belongs to."""

    role: Role
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class Roles:
    """Node names by role, and every variable's."""

    main: frozenset[str]
    post_aggregation: frozenset[str]
    updates: frozenset[str]
    variables: dict[str, VariableRole]


def find_roles(training: TrainingGraph) -> Roles:
    """Split the graph at its gradients. Needs: `training.gradients` are known."""
    graph = training.graph
    main = _main_nodes(training)
    behind = _descendants_behind(graph, main, training.gradients.values())
    shared = _shared_tensors(training)
    post = {
        node.name
        for node in graph.nodes
        if node.name not in main and all(result.name in behind & shared for result in node.outputs)
    }
    updates = {node.name for node in graph.nodes} - main - post
    variables = _variable_roles(training, main, shared)
    return Roles(frozenset(main), frozenset(post), frozenset(updates), variables)


def gradient_tensors(gradient: Gradient) -> tuple[str, ...]:
    """Return the tensors at which the main computation ends."""
    if gradient.ids is not None and gradient.rows is not None:
        return (gradient.ids, gradient.rows)
    return (gradient.dense,) if gradient.dense is not None else ()


def _main_nodes(training: TrainingGraph) -> set[str]:
    graph = training.graph
    cut = {name for gradient in training.gradients.values() for name in gradient_tensors(gradient)}
    before = _makers(graph, ancestors(graph, cut))
    behind = _descendants_behind(graph, before, training.gradients.values())
    samples = [entry.name for entry in training.data_inputs.values() if entry.sample_axis is not None]
    sampled = descendants(graph, samples)
    averages = [v.next for v in training.variables.values() if v.next in sampled - behind]
    shown = [name for name in training.outputs if name not in behind]
    return before | _makers(graph, ancestors(graph, [*averages, *shown]))


def _makers(graph: gs.Graph, tensors: set[str]) -> set[str]:
    return {node.name for node in graph.nodes if any(result.name in tensors for result in node.outputs)}


def _descendants_behind(
    graph: gs.Graph, main: set[str], gradients: Iterable[Gradient], cut: frozenset[str] = frozenset()
) -> set[str]:
    """Return what is computed from gradients outside of `main`, not looking beyond `cut`.

    Ids do not count as a start: they are often data that the loss reads too.
    """
    starts = {name for g in gradients for name in (g.dense, g.rows) if name is not None}
    reached = set(starts)
    for node in graph.nodes:
        reads = {read.name for read in reads_of(node)}
        if node.name not in main and (reads & reached) - (cut - starts):
            reached.update(result.name for result in node.outputs)
    return reached


def _shared_tensors(training: TrainingGraph) -> frozenset[str]:
    """Return the tensors that lead to the next values of more than one parameter."""
    seen: set[str] = set()
    shared: set[str] = set()
    for name in training.gradients:
        found = ancestors(training.graph, [training.variables[name].next])
        shared |= seen & found
        seen |= found
    return frozenset(shared)


def _variable_roles(
    training: TrainingGraph, main: set[str], shared: frozenset[str]
) -> dict[str, VariableRole]:
    roles = {name: VariableRole("other") for name in training.variables}
    for name, gradient in training.gradients.items():
        own = _descendants_behind(training.graph, main, [gradient], shared)
        for variable in training.variables.values():
            is_like = variable.shape == training.variables[name].shape
            if variable.next in own and is_like:
                roles[variable.name] = VariableRole("slot", name)
    return roles | {name: VariableRole("parameter") for name in training.gradients}
