"""Write a windowed op for a rank's part of space: padding along a split axis comes with the operands.

    Conv <pads = [1, 1, 1, 1]>  split in height    ->   Conv <pads = [0, 1, 0, 1]> of a part and its halo

Gradients are functions whose bodies spell sizes: a part has functions of its own. Parts of different sizes
share one that spells none; what it makes around a part is cut off by numbers that each rank is given.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from partc.passes.layouts.decisions import Decision
from partc.passes.lowering.lowered_graph import constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.lowering.overlap import Pads, by_place, pad
from partc.passes.lowering.weigh_windows import Ranges, SpaceParts, WindowWeights, weigh, window_weights
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.windows import window_functions as functions
from partc.passes.windows.read_windows import (
    WindowGradient,
    counted_padding,
    gradient_of,
    transposed_windows_of,
    windows_of,
)
from partc.passes.windows.windows import Windows
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import Site


@dataclass(frozen=True, slots=True)
class LocalNode:
    """How a node is said for a part.

    cuts       tensor axis -> what its result has around the part itself
    pads       tensor axis -> what is lacking before and behind on each rank; fewer than 0: what is too much
    weights    of an average's windows, by which its result is multiplied, or the gradient that is read
    adds       the operand, if any, that is added to the part, not by the op: a bias
    told_pads  whether the op is given `pads` as its last operand, and makes the part itself
    """

    op: str
    attributes: dict[str, object]
    cuts: dict[int, tuple[int, int]] = field(default_factory=dict)
    pads: Pads = field(default_factory=dict)
    weights: tuple[WindowWeights, ...] = ()
    adds: int | None = None
    told_pads: bool = False

    @property
    def weighs_result(self) -> bool:
        """Tell whether what the op makes is multiplied by its windows' weights."""
        return bool(self.weights) and self.op == "AveragePool"

    @property
    def makes_part(self) -> bool:
        """Tell whether the op makes the part, and nothing needs to be done about its result."""
        is_cut = bool(self.cuts or self.pads) and not self.told_pads
        return not is_cut and self.adds is None and not self.weighs_result


def local_node(lowering: Lowering, node: gs.Node, decision: Decision) -> LocalNode:
    """Return how a rank runs a node on its part: as it is, unless it splits the space of windows."""
    rule, facts = rule_of(node, lowering.facts), lowering.facts
    if rule is None or not (rule.windows or rule.apart):
        return LocalNode(node.op, dict(node.attrs))
    parts, uneven = _equal_parts(lowering, rule, decision), _uneven_parts(lowering, rule, decision)
    if not parts and not uneven:
        return LocalNode(node.op, dict(node.attrs))
    gradient = gradient_of(node, facts)
    if gradient is not None:
        return _local_gradient(lowering, node, gradient, parts, uneven)
    if node.op == "ConvTranspose" and (windows := transposed_windows_of(node, facts)) is not None:
        return _local_transposed(node, windows, parts, uneven)
    is_window = node.op in ("Conv", "MaxPool", "AveragePool", "LpPool")
    windows = windows_of(node, facts) if is_window else None
    if windows is None:
        return LocalNode(node.op, dict(node.attrs))
    weights: tuple[WindowWeights, ...] = ()
    if node.op == "AveragePool":
        sizes = {axis: equal.of(windows.target[axis]) for axis, equal in parts.items()} | uneven
        counted = counted_padding(node, windows)
        is_stretched = bool(node.attrs.get("ceil_mode", 0)) and counted is not None
        weights = window_weights(windows, counted, sizes, is_stretched)
    return LocalNode(node.op, _local_attributes(node, windows, {*parts, *uneven}), weights=weights)


@dataclass(frozen=True, slots=True)
class _EqualParts:
    """How many equal parts mesh axes, or one of them, cut an axis of space into."""

    mesh_axis: int
    count: int

    def of(self, entries: int, before: int = 0, behind: int = 0) -> SpaceParts:
        """Return the parts of so many entries, and what is around them."""
        parts = (part_range(entries, self.count, part) for part in range(self.count))
        return SpaceParts(self.mesh_axis, tuple((start - before, stop + behind) for start, stop in parts))


def _equal_parts(lowering: Lowering, rule: ShardingRule, decision: Decision) -> dict[int, _EqualParts]:
    """Return spatial axis -> its parts, for the axes of windows that are split alike."""
    parts: dict[int, _EqualParts] = {}
    for mesh_axis, along in enumerate(decision.axes):
        halos = rule.windows.get(along.factor or "", {})
        for axis in {halo.axis - 2 for halo in halos.values()}:
            size = lowering.graph.meshes.size(decision.site, mesh_axis)
            parts[axis] = _EqualParts(mesh_axis, size * (parts[axis].count if axis in parts else 1))
    return parts


def _uneven_parts(lowering: Lowering, rule: ShardingRule, decision: Decision) -> dict[int, SpaceParts]:
    """Return spatial axis -> parts [start, stop), for the axes of windows that are split otherwise.

    Parts of what windows make, or of what they read.
    """
    parts: dict[int, SpaceParts] = {}
    if rule.apart is None:
        return parts
    for mesh_axis, along in enumerate(decision.axes):
        factor = along.factor or ""
        for axis in {reach.axis - 2 for reach in rule.apart.reaches.get(factor, {}).values()}:
            size = lowering.graph.meshes.size(decision.site, mesh_axis)
            entries = rule.apart.sizes[factor]
            ranges = tuple(part_range(entries, size, part) for part in range(size))
            parts[axis] = SpaceParts(mesh_axis, ranges)
    return parts


def _local_attributes(node: gs.Node, windows: Windows, parts: Collection[int]) -> dict[str, object]:
    """Return the attributes of an op whose operand has its padding along the split axes."""
    rank = len(windows.kernel)
    is_rounded = node.op != "Conv" and windows.rounds_up
    pads = windows.pool_pads if is_rounded else windows.forward()["pads"]
    is_declared = node.attrs.get("auto_pad", "NOTSET") == "NOTSET" and not node.attrs.get("ceil_mode", 0)
    if node.op == "AveragePool" and is_declared:
        pads = tuple(node.attrs.get("pads", (0,) * (2 * rank)))  # what counts is what was declared
    local = [0 if number % rank in parts else pad for number, pad in enumerate(pads)]
    attributes = {name: value for name, value in node.attrs.items() if name not in ("auto_pad", "ceil_mode")}
    return {**attributes, "pads": local, **({"ceil_mode": 1} if is_rounded else {})}


def _local_transposed(
    node: gs.Node, windows: Windows, parts: Mapping[int, _EqualParts], uneven: Mapping[int, SpaceParts]
) -> LocalNode:
    """Say a ConvTranspose, which is the gradient of the data of a convolution, for a part of what it makes.

    Entries that no window reaches have the bias too: it is added to the part.
    """
    for axis, equal in parts.items():
        windows = windows.back_to_part(axis, equal.count)
    windows, pads = _vary_all(windows, node.op, uneven)
    group = {name: node.attrs[name] for name in ("group",) if name in node.attrs}
    has_bias = len(node.inputs) > 2 and bool(node.inputs[2].name)
    return LocalNode(
        node.op, {**group, **windows.transposed()}, pads=pads, adds=2 if has_bias and pads else None
    )


def _local_gradient(
    lowering: Lowering,
    node: gs.Node,
    gradient: WindowGradient,
    parts: Mapping[int, _EqualParts],
    uneven: Mapping[int, SpaceParts],
) -> LocalNode:
    windows, counted, cuts = gradient.windows, gradient.counted, {}
    weights = _weights_of_readers(gradient, parts, uneven) if gradient.kind == "AveragePoolGrad" else ()
    for axis, equal in parts.items():
        if gradient.kind == "ConvWeightGrad":
            windows = windows.of_part(axis, equal.count)
        elif gradient.kind == "MaxPoolGrad":
            cuts[axis + 2] = windows.halo_of_readers(axis)
            windows = windows.of_readers(axis, equal.count)
        else:
            windows = windows.back_to_part(axis, equal.count)
            counted = _counting_all(windows, axis, counted)
    windows, pads = _vary_all(windows, gradient.kind, uneven)
    for weight in weights:
        counted = _counting_all(windows, weight.axis - 2, counted)
    function = _function(lowering, node, gradient, windows, counted)
    lowering.out.functions[function.name] = function
    told_pads = gradient.kind == "LpPoolGrad" and bool(uneven)
    return LocalNode(function.name, dict(node.attrs), cuts, pads, weights, told_pads=told_pads)


def _weights_of_readers(
    gradient: WindowGradient, parts: Mapping[int, _EqualParts], uneven: Mapping[int, SpaceParts]
) -> tuple[WindowWeights, ...]:
    """Return what the windows that read each rank's part of an averaged image count for."""
    windows = gradient.windows
    readers = {
        axis: equal.of(windows.target[axis], *windows.halo_back(axis)) for axis, equal in parts.items()
    }
    for axis, cut in uneven.items():
        ranges = tuple(windows.readers(axis, *part) for part in cut.ranges)
        readers[axis] = SpaceParts(cut.mesh_axis, ranges)
    return window_weights(windows, gradient.counted, readers)


def _vary_all(windows: Windows, kind: str, uneven: Mapping[int, SpaceParts]) -> tuple[Windows, Pads]:
    """Return windows for parts of different sizes, and what is lacking around what they make."""
    pads: Pads = {}
    for axis, cut in uneven.items():
        windows, around = _vary(windows, kind, axis, cut.ranges)
        if any(map(any, around)):
            pads[axis + 2] = by_place(cut.mesh_axis, around)
    return windows, pads


def _vary(windows: Windows, kind: str, axis: int, parts: Ranges) -> tuple[Windows, Ranges]:
    """Return windows for parts of different sizes, and what each rank lacks around its part of the result."""
    if kind == "ConvWeightGrad":
        return windows.varying(axis, max(stop - start for start, stop in parts)), ()
    readers = [windows.readers(axis, *part) for part in parts]
    entries = [windows.entries_read(axis, *some) for some in readers]
    around = [(of[0] - part[0], part[1] - of[1]) for part, of in zip(parts, entries, strict=True)]
    least = (0, 0)
    if kind != "MaxPoolGrad":  # a ConvTranspose leaves out what no rank wants
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
        case "LpPoolGrad":
            return functions.lp_pool_gradient(windows, gradient.channels, gradient.power, dtype, opset)
        case _:
            return functions.average_pool_gradient(windows, gradient.channels, counted, dtype, opset)


def operands_of(
    lowering: Lowering, local: LocalNode, operands: Sequence[gs.Tensor], name: str, site: Site
) -> list[gs.Tensor]:
    """Return what the op of a part reads. `name`: the value that holds the part."""
    local_operands, rank = list(operands), len(lowering.out.shapes.get(name, ()))
    if local.weights and not local.weighs_result:
        local_operands[-1] = weigh(lowering, local_operands[-1], f"{name}.weighed", local.weights, rank, site)
    if local.adds is not None:
        del local_operands[local.adds]
    if local.told_pads:
        around = [local.pads.get(axis, (0, 0))[end] for end in (0, 1) for axis in range(rank)]
        local_operands.append(lowering.numbers(f"{name}.around", around, site))
    return local_operands


def finish_part(
    lowering: Lowering, result: gs.Tensor, name: str, local: LocalNode, operands: Sequence[gs.Tensor]
) -> gs.Tensor:
    """Return the part `name` of what the op of a part has made. `operands`: the node's."""
    out, rank = lowering.out, len(lowering.out.shapes[name])
    site = out.meanings[name][1].site
    if local.weighs_result:
        out.nbytes.setdefault(result.name, out.nbytes[name])
        return weigh(lowering, result, name, local.weights, rank, site)
    if local.adds is None:
        return _cut_to_part(lowering, result, name, local)
    out.shapes[f"{name}.unbiased"], out.nbytes[f"{name}.unbiased"] = out.shapes[name], out.nbytes[name]
    out.nbytes.setdefault(result.name, out.nbytes[name])
    part = pad(lowering, result, f"{name}.unbiased", local.pads, np.zeros((), result.dtype), site)
    axes = constant(f"{name}.bias.axes", list(range(1, rank - 1)), np.int64)
    bias = out.emit("Unsqueeze", [operands[local.adds], axes], f"{name}.bias", result.dtype, site)
    return out.emit("Add", [part, bias], name, result.dtype, site)


def _cut_to_part(lowering: Lowering, wide: gs.Tensor, name: str, local: LocalNode) -> gs.Tensor:
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
