"""Hold the layouts of a step to what a strategy's file says of operators: what cannot be held is refused.

A wish gives way where a constant is made, where replicas have tensors of their own, and where other axes of
its mesh leave a dimension no parts; micro-batches, where wishes leave their samples none.
"""

import onnx_graphsurgeon as gs

from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_node import decide_alone
from partc.passes.layouts.decisions import AxisDecision, whole_axis
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import Overlapping, PerReplica, Split, Widened
from partc.runtime.errors import BadStrategy


def check_wishes(graph: LaidOutGraph) -> None:
    """Raise BadStrategy where a node does not divide along a mesh axis what a file says."""
    wishes = graph.configuration.wishes
    for node in graph.training.graph.nodes:
        axes = graph.decisions[node.name].axes
        for axis, wish in wishes.get(node.name, {}).items():
            along = axes[axis] if axis < len(axes) else whole_axis(node)
            if wish.at and not _is_held(wish, along):
                _refuse(graph, node, wish, axis, along)
        if at := next((wish.at for wish in wishes.get(node.name, {}).values() if wish.at), ""):
            _check_microbatches(graph, node, at)


def _check_microbatches(graph: LaidOutGraph, node: gs.Node, at: str) -> None:
    """Refuse a node that what it splits keeps from running one micro-batch at a time."""
    axis, axes = graph.meshes.microbatch_axis, graph.decisions[node.name].axes
    if axis is None or (axis < len(axes) and not axes[axis].is_whole):
        return
    is_constant = all(graph.facts.fixed_value(tensor.name) is not None for tensor in node.outputs)
    if not is_constant and not decide_alone(graph, node, axis).is_whole:
        raise BadStrategy(
            f"{node.op} {node.name!r} has too few entries for {graph.meshes.microbatches} micro-batches of "
            "what it is to split so",
            at=at,
            fix="write fewer parts, another dimension, or fewer micro-batches",
        )


def _is_held(wish: Wish, along: AxisDecision) -> bool:
    placement = along.outputs[0] if wish.operand is None else along.inputs[wish.operand]
    if wish.split is None or not isinstance(placement, Split | Widened | Overlapping):
        return wish.split is None
    outer = placement.outer if isinstance(placement, Split) else 1
    return (placement.axis, outer) == (wish.split.axis, wish.split.outer)


def _refuse(graph: LaidOutGraph, node: gs.Node, wish: Wish, axis: int, along: AxisDecision) -> None:
    name, parts = graph.meshes.of(graph.configuration.site_of(node.name)).axes[axis]
    what = f"{node.op} {node.name!r} cannot split this into {parts} parts beside what else it splits"
    fix = "write fewer parts, or another dimension: `partc inspect --groups` lists what each op may split"
    if all(graph.facts.fixed_value(tensor.name) is not None for tensor in node.outputs):
        what = f"{node.op} {node.name!r} makes a constant, which every rank has whole"
        fix = "name the operators that read it"
    elif any(isinstance(placement, PerReplica) for placement in (*along.inputs, *along.outputs)):
        what = (
            f"{node.op} {node.name!r} is to split this along {name!r}, where each replica has its own batch"
        )
        fix = "split it along another mesh axis, or compile with --batch global"
    raise BadStrategy(what, at=wish.at, fix=fix)
