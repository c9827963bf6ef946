"""Write a windowed op for a rank's part of space: padding along a split axis comes with the operands.

    Conv <pads = [1, 1, 1, 1]>  split in height    ->   Conv <pads = [0, 1, 0, 1]> of a part and its halo

Gradients are functions whose bodies spell sizes: a part has functions of its own. Parts of different sizes
share one that spells none; what it makes around a part is cut off by numbers that each rank is given.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from partc.passes.layouts.decide_layouts import Decision
from partc.passes.lowering.lowered_graph import constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.overlap import Pads, by_place, pad
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.windows import window_functions as functions
from partc.passes.windows.read_windows import WindowGradient, gradient_of, windows_of
from partc.passes.windows.windows import Windows
from partc.runtime.plan.boxes import part_range


@dataclass(frozen=True, slots=True)
class LocalNode:
    """How a node is said for a part.

    cuts   tensor axis -> what its result has around the part itself
    pads   tensor axis -> what is lacking before and behind on each rank; fewer than 0: what is too much
    """

    op: str
    attributes: dict[str, object]
    cuts: dict[int, tuple[int, int]]
    pads: Pads


def local_node(lowering: Lowering, node: gs.Node, decision: Decision) -> LocalNode:
    """Return how a rank runs a node on its part: as it is, unless it splits the space of windows."""
    parts, uneven = _parts_of_space(lowering, node, decision), _uneven_parts(lowering, node, decision)
    if not parts and not uneven:
        return LocalNode(node.op, dict(node.attrs), {}, {})
    gradient = gradient_of(node, lowering.facts)
    if gradient is not None:
        return _local_gradient(lowering, node, gradient, parts, uneven)
    windows = windows_of(node, lowering.facts) if node.op in ("Conv", "MaxPool", "AveragePool") else None
    if windows is None:
        return LocalNode(node.op, dict(node.attrs), {}, {})
    return LocalNode(node.op, _local_attributes(node, windows, {*parts, *uneven}), {}, {})


def _parts_of_space(lowering: Lowering, node: gs.Node, decision: Decision) -> dict[int, int]:
    """Return spatial axis -> number of parts, for the axes of windows that are split alike."""
    rule = rule_of(node, lowering.facts)
    parts: dict[int, int] = {}
    for mesh_axis, along in enumerate(decision.axes):
        factor = along.factor or ""
        if rule is not None and factor in rule.windows and factor.startswith("y"):
            axis = int(factor[1:])
            parts[axis] = parts.get(axis, 1) * lowering.graph.meshes.size(decision.site, mesh_axis)
    return parts


@dataclass(frozen=True, slots=True)
class _UnevenParts:
    """The parts [start, stop) into which a mesh axis cuts space that windows make, or read."""

    mesh_axis: int
    ranges: tuple[tuple[int, int], ...]


def _uneven_parts(lowering: Lowering, node: gs.Node, decision: Decision) -> dict[int, _UnevenParts]:
    """Return spatial axis -> parts, for the axes of windows that are split otherwise."""
    rule = rule_of(node, lowering.facts)
    found: dict[int, _UnevenParts] = {}
    if rule is None or rule.apart is None:
        return found
    for mesh_axis, along in enumerate(decision.axes):
        for factor in rule.apart.reaches:
            if factor == along.factor:
                size = lowering.graph.meshes.size(decision.site, mesh_axis)
                entries = rule.apart.sizes[factor]
                ranges = tuple(part_range(entries, size, part) for part in range(size))
                found[int(factor.removeprefix("made").removeprefix("read"))] = _UnevenParts(mesh_axis, ranges)
    return found


def _local_attributes(node: gs.Node, windows: Windows, parts: Collection[int]) -> dict[str, object]:
    """Return the attributes of an op whose operand has its padding along the split axes."""
    rank = len(windows.kernel)
    pads = windows.forward()["pads"]
    if node.op == "AveragePool" and node.attrs.get("auto_pad", "NOTSET") == "NOTSET":
        pads = tuple(node.attrs.get("pads", (0,) * (2 * rank)))  # what counts is what was declared
    local = [0 if number % rank in parts else pad for number, pad in enumerate(pads)]
    kept = {name: value for name, value in node.attrs.items() if name not in ("auto_pad", "ceil_mode")}
    return {**kept, "pads": local}


def _local_gradient(
    lowering: Lowering,
    node: gs.Node,
    gradient: WindowGradient,
    parts: dict[int, int],
    uneven: dict[int, _UnevenParts],
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
    pads: Pads = {}
    for axis, cut in uneven.items():
        windows, around = _vary(windows, gradient, axis, cut.ranges)
        if any(map(any, around)):
            pads[axis + 2] = by_place(cut.mesh_axis, around)
    function = _function(lowering, node, gradient, windows, counted)
    lowering.out.functions[function.name] = function
    return LocalNode(function.name, dict(node.attrs), cuts, pads)


def _vary(
    windows: Windows, gradient: WindowGradient, axis: int, parts: tuple[tuple[int, int], ...]
) -> tuple[Windows, tuple[tuple[int, int], ...]]:
    """Return windows for parts of different sizes, and what each rank lacks around its part of the result."""
    if gradient.kind == "ConvWeightGrad":
        return windows.varying(axis, max(stop - start for start, stop in parts)), ()
    readers = [windows.readers(axis, *part) for part in parts]
    made = [windows.entries_read(axis, *some) for some in readers]
    around = [(of[0] - part[0], part[1] - of[1]) for part, of in zip(parts, made, strict=True)]
    least = (0, 0)
    if gradient.kind != "MaxPoolGrad":  # a ConvTranspose leaves out what no rank wants
        before, after = (max(0, min(-end for end in ends)) for ends in zip(*around, strict=True))
        least = (before, after)
    laid = windows.varying(axis, max(stop - start for start, stop in readers), least)
    return laid, tuple((before + least[0], after + least[1]) for before, after in around)


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


def cut_to_part(lowering: Lowering, wide: gs.Tensor, name: str, local: LocalNode) -> gs.Tensor:
    """Return the part itself of a result that has entries of the neighbours' around it, or lacks some."""
    cuts = local.cuts
    if local.pads:
        site = lowering.out.meanings[name][1].site
        pads = local.pads | {axis: (-before, -after) for axis, (before, after) in cuts.items()}
        lowering.out.nbytes.setdefault(wide.name, lowering.out.nbytes[name])
        return pad(lowering, wide, name, pads, np.zeros((), wide.dtype), site)
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
