"""Tell what each node and each variable is for.

main computation   forward and backward: what gradients and outputs come from, once per replica
post-aggregation   between the gradients and more than one parameter (clipping by global norm)
updates            the rest: from the gradients of one parameter, or from no data at all

parameter          has a gradient
slot               shaped like one parameter and updated from its gradient
other              counters, schedules, moving averages of data
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import onnx_graphsurgeon as gs

from partc.passes.graph.reachability import ancestors, descendants, reads_of
from partc.passes.graph.training_graph import Gradient, TrainingGraph

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
    shared = _shared_tensors(training)
    aggregated = _descendants_behind(graph, main, training.gradients.values()) & shared
    post = {
        node.name
        for node in graph.nodes
        if node.name not in main and all(result.name in aggregated for result in node.outputs)
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
    sampled = descendants(graph, training.varying_inputs()) - behind
    averages = [v.next for v in training.variables.values() if v.next in sampled]
    outputs = [name for name in training.outputs if name not in behind]
    return before | _makers(graph, ancestors(graph, [*averages, *outputs]))


def _makers(graph: gs.Graph, tensors: set[str]) -> set[str]:
    return {node.name for node in graph.nodes if any(result.name in tensors for result in node.outputs)}


def _descendants_behind(graph: gs.Graph, main: set[str], gradients: Iterable[Gradient]) -> set[str]:
    """Return what is computed from gradients outside of `main`.

    Ids do not count as a start: they are often data that the loss reads too.
    """
    reached = {name for g in gradients for name in (g.dense, g.rows) if name is not None}
    for node in graph.nodes:
        if node.name not in main and any(read.name in reached for read in reads_of(node)):
            reached.update(result.name for result in node.outputs)
    return reached


def _shared_tensors(training: TrainingGraph) -> frozenset[str]:
    """Return the tensors that lead to the next values of more than one parameter."""
    parameters: dict[str, int] = defaultdict(int)  # tensor -> bit set of parameters it leads to
    for bit, name in enumerate(training.gradients):
        parameters[training.variables[name].next] |= 1 << bit
    for node in reversed(training.graph.nodes):
        leads_to = 0
        for result in node.outputs:
            leads_to |= parameters[result.name]
        for read in reads_of(node):
            parameters[read.name] |= leads_to
    return frozenset(name for name, bits in parameters.items() if bits.bit_count() > 1)


def _variable_roles(
    training: TrainingGraph, main: set[str], shared: frozenset[str]
) -> dict[str, VariableRole]:
    owners, parameters = _owners(training, main, shared), list(training.gradients)
    shaped: dict[tuple[int, ...], int] = defaultdict(int)  # shape -> bit set of the parameters of that shape
    for bit, name in enumerate(parameters):
        shaped[training.variables[name].shape] |= 1 << bit
    roles = {name: VariableRole("parameter") for name in parameters}
    for variable in training.variables.values():
        alike = owners[variable.next] & shaped[variable.shape]
        slot = VariableRole("slot", parameters[alike.bit_length() - 1]) if alike else VariableRole("other")
        roles.setdefault(variable.name, slot)
    return roles


def _owners(training: TrainingGraph, main: set[str], shared: frozenset[str]) -> dict[str, int]:
    """Return tensor -> bit set of the parameters from whose gradient it is computed.

    Ways through what is computed from several gradients for several parameters (a clip's norm) do not
    count.
    """
    sources: dict[str, int] = defaultdict(int)  # the same, but all ways count
    owners: dict[str, int] = defaultdict(int)
    for bit, gradient in enumerate(training.gradients.values()):
        for name in filter(None, (gradient.dense, gradient.rows)):
            sources[name] |= 1 << bit
            owners[name] |= 1 << bit
    for node in training.graph.nodes:
        if node.name in main:
            continue
        found_sources = found_owners = 0
        for read in reads_of(node):
            found_sources |= sources[read.name]
            is_mixed = read.name in shared and sources[read.name].bit_count() > 1
            found_owners |= 0 if is_mixed else owners[read.name]
        for result in node.outputs:
            sources[result.name] |= found_sources
            owners[result.name] |= found_owners
    return owners
