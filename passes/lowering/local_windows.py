"""Write a windowed op for a rank's part of space: padding along a split axis comes with the operands.

    Conv <pads = [1, 1, 1, 1]>  split in height    ->   Conv <pads = [0, 1, 0, 1]> of a part and its halo

Gradients are functions whose bodies spell sizes: a part has functions of its own.
"""

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from partc.passes.layouts.decide_layouts import Decision
from partc.passes.lowering.lowered_graph import constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.windows import window_functions as functions
from partc.passes.windows.read_windows import WindowGradient, gradient_of, windows_of
from partc.passes.windows.windows import Windows


@dataclass(frozen=True, slots=True)
class LocalNode:
    """How a node is said for a part. `cuts`: tensor axis -> what its result has around the part itself."""

    op: str
    attributes: dict[str, object]
    cuts: dict[int, tuple[int, int]]


def local_node(lowering: Lowering, node: gs.Node, decision: Decision) -> LocalNode:
    """Return how a rank runs a node on its part: as it is, unless it splits the space of windows."""
    parts = _parts_of_space(lowering, node, decision)
    if not parts:
        return LocalNode(node.op, dict(node.attrs), {})
    gradient = gradient_of(node, lowering.facts)
    if gradient is not None:
        return _local_gradient(lowering, node, gradient, parts)
    windows = windows_of(node, lowering.facts) if node.op in ("Conv", "MaxPool", "AveragePool") else None
    if windows is None:
        return LocalNode(node.op, dict(node.attrs), {})
    return LocalNode(node.op, _local_attributes(node, windows, parts), {})


def _parts_of_space(lowering: Lowering, node: gs.Node, decision: Decision) -> dict[int, int]:
    """Return spatial axis -> number of parts, for the axes of windows that are split."""
    rule = rule_of(node, lowering.facts)
    parts: dict[int, int] = {}
    for mesh_axis, along in enumerate(decision.axes):
        factor = along.factor or ""
        if rule is not None and factor in rule.windows and factor.startswith("y"):
            axis = int(factor[1:])
            parts[axis] = parts.get(axis, 1) * lowering.graph.meshes.size(decision.site, mesh_axis)
    return parts


def _local_attributes(node: gs.Node, windows: Windows, parts: dict[int, int]) -> dict[str, object]:
    """Return the attributes of an op whose operand has its padding along the split axes."""
    rank = len(windows.kernel)
    pads = windows.forward()["pads"]
    if node.op == "AveragePool" and node.attrs.get("auto_pad", "NOTSET") == "NOTSET":
        pads = tuple(node.attrs.get("pads", (0,) * (2 * rank)))  # what counts is what was declared
    local = [0 if number % rank in parts else pad for number, pad in enumerate(pads)]
    kept = {name: value for name, value in node.attrs.items() if name not in ("auto_pad", "ceil_mode")}
    return {**kept, "pads": local}


def _local_gradient(
    lowering: Lowering, node: gs.Node, gradient: WindowGradient, parts: dict[int, int]
) -> LocalNode:
    windows, counted, cuts = gradient.windows, gradient.counted, {}
    for axis, number in parts.items():
        if gradient.kind == "ConvWeightGrad":
            windows = windows.of_part(axis, number)
        elif gradient.kind == "MaxPoolGrad":
            cuts[axis + 2] = windows.halo_of_readers(axis)
            windows = windows.of_readers(axis, number)
        else:
            windows = windows.back_to_part(axis, number)
            counted = _counting_all(windows, axis, counted)
    function = _function(lowering, node, gradient, windows, counted)
    lowering.out.functions[function.name] = function
    return LocalNode(function.name, dict(node.attrs), cuts)


def _counting_all(
    windows: Windows, axis: int, counted: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the padding that an average counts as entries, all of one axis included."""
    zeros = (0,) * len(windows.kernel)
    before, after = counted or (zeros, zeros)
    return (
        (*before[:axis], windows.before[axis], *before[axis + 1 :]),
        (*after[:axis], max(0, windows.after[axis]), *after[axis + 1 :]),
    )


def _function(
    lowering: Lowering,
    node: gs.Node,
    gradient: WindowGradient,
    windows: Windows,
    counted: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> onnx.FunctionProto:
    """Return the gradient function of other windows."""
    facts, opset = lowering.facts, lowering.graph.training.opset
    dtype = facts.dtypes[node.outputs[0].name]
    match gradient.kind:
        case "ConvDataGrad":
            return functions.conv_data_gradient(windows, gradient.group, opset)
        case "ConvWeightGrad":
            weight = facts.shape(node.outputs[0].name)
            return functions.conv_weight_gradient(windows, weight, gradient.group, opset)
        case "MaxPoolGrad":
            return functions.max_pool_gradient(windows, dtype, opset)
        case _:
            return functions.average_pool_gradient(windows, gradient.channels, counted, dtype, opset)


def cut_to_part(
    lowering: Lowering, wide: gs.Tensor, name: str, cuts: dict[int, tuple[int, int]]
) -> gs.Tensor:
    """Return the part itself of a result that has entries of the neighbours' around it."""
    if not any(map(any, cuts.values())):
        return wide
    axes = [axis for axis, around in cuts.items() if any(around)]
    shape = lowering.out.shapes[name]
    starts = [cuts[axis][0] for axis in axes]
    ends = [start + (shape[axis] or 0) for axis, start in zip(axes, starts, strict=True)]
    bounds = [
        constant(f"{name}.cut.{what}", numbers, np.int64)
        for what, numbers in (("starts", starts), ("ends", ends), ("axes", axes))
    ]
    site = lowering.out.meanings[name][1].site
    wide_bytes = lowering.out.nbytes[name]
    for axis in axes:
        wide_bytes = wide_bytes * ((shape[axis] or 0) + sum(cuts[axis])) // max(1, shape[axis] or 0)
    lowering.out.nbytes[wide.name] = wide_bytes
    return lowering.out.emit("Slice", [wide, *bounds], name, wide.dtype, site)
