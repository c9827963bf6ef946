"""Let each rank have its part of a sum, where no reader wants more of it.

before   x partial ── AllReduce ──┬── cut ── MatMul         after   x partial ── ReduceScatter ──┬── MatMul
                                  └── Transpose ── cut                                           └── Transpose

The places of sums are those of readers that want them whole (aggregate_partials.py); one that is wanted in
parts alone is scattered. What only moves a sum moves a part of it, if that is what its readers want.
"""

from collections.abc import Collection, Mapping, Sequence

import onnx_graphsurgeon as gs

from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import decide_by_wish
from partc.passes.layouts.decisions import Decision, axes_up_to, decide_axes, divides
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split
from partc.passes.layouts.same_parts import common_part
from partc.passes.rules.sharding_rules import node_facts

Readers = Mapping[str, Sequence[tuple[str, int]]]


def move_parts(graph: LaidOutGraph, axis: int) -> None:
    """Let nodes that only move a partial tensor move a part of the sum, where that is wanted of them.

    Needs layouts and decisions, and changes both.
    """
    readers = _readers_of_sums(graph, axis, graph.training.graph.nodes)
    for node in reversed(graph.training.graph.nodes):
        part = _wanted_part(graph, readers, node.outputs[0].name, axis) if len(node.outputs) == 1 else None
        divided = None if part is None else _moving_part(graph, node, axis, part)
        if divided is not None:
            graph.decisions[node.name] = divided
            graph.layouts[node.outputs[0].name] = divided.outputs[0]


def wanted_in_parts(
    graph: LaidOutGraph, axis: int, summed: Sequence[str], around: Sequence[gs.Node] = ()
) -> set[str]:
    """Return the sums of which all readers want the same part. Needs layouts and decisions.

    `around`: the nodes that read partial tensors, if they are known.
    """
    readers = _readers_of_sums(graph, axis, around or graph.training.graph.nodes)
    return {name for name in summed if _wanted_part(graph, readers, name, axis) is not None}


def _moving_part(graph: LaidOutGraph, node: gs.Node, axis: int, part: Split) -> Decision | None:
    """Return how a node that only moves one operand makes a part, if it can."""
    known, decision = node_facts(node, graph.facts, graph.zeros), graph.decisions[node.name]
    moves_partial = isinstance(decision.inputs[0].along(axis), Partial) if decision.inputs else False
    if known.rule is None or not (known.rule.moves and moves_partial) or len(known.rule.terms) != 1:
        return None
    mesh = graph.meshes.of(decision.site)
    along = decide_by_wish(known, Wish(part), mesh.size(axis))
    if along is None:
        return None
    axes = axes_up_to(axis, node, decision)
    axes[axis] = along
    divided = decide_axes(mesh, axes)
    is_wanted = divided.outputs[0].along(axis) == part
    return divided if is_wanted and divides(mesh, known, divided) else None


def _readers_of_sums(graph: LaidOutGraph, axis: int, nodes: Sequence[gs.Node]) -> Readers:
    """Return who reads each partial tensor whose sum ranks make: nodes, and the numbers of their operands.

    Left out are results of the step, and what each rank sums itself, or servers do.
    """
    results = graph.training.results
    is_local = axis == graph.meshes.microbatch_axis
    readers: dict[str, list[tuple[str, int]]] = {
        name: []
        for name, layout in graph.layouts.items()
        if isinstance(layout.along(axis), Partial)
        and not (is_local or name in results or graph.is_pushed(name, axis))
    }
    for node in nodes:
        for number, tensor in enumerate(node.inputs):
            if tensor.name in readers:
                readers[tensor.name].append((node.name, number))
    return readers


def _wanted_part(graph: LaidOutGraph, readers: Readers, tensor: str, axis: int) -> Split | None:
    """Return the part along a mesh axis that all readers of a partial tensor want, if there is one."""
    targets = {graph.decisions[node].inputs[number] for node, number in readers.get(tensor, ())}
    return part_of_targets(graph, tensor, targets, axis)


def part_of_targets(graph: LaidOutGraph, tensor: str, targets: Collection[Layout], axis: int) -> Split | None:
    """Return the part along a mesh axis that a partial tensor is wanted in, if all want the same."""
    here = [graph.same_parts(target, graph.layout(tensor).site) for target in targets]
    part = common_part(here, axis)
    if part is None or part.rows_of:
        return None
    wholes = [target.with_along(axis, Replicate()) for target in here if target is not None]
    return part if graph.has_fixed_pieces(tensor, *wholes) else None
