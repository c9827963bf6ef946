"""Sharding rules of ops that move elements about.

So do ops that work along some axes and take each place across those on its own (`along`).
"""

from collections.abc import Callable
from itertools import chain

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import UNKNOWN, Facts, Shape
from partc.passes.rules.rules_elementwise import Rule, is_rounded, named
from partc.passes.rules.rules_parts import aligned_cuts, bounds_of
from partc.passes.rules.sharding_rule import LINEAR_IN_FIRST, Axis, Dims, ShardingRule


def common_factors(source: Shape, target: Shape) -> tuple[Dims, Dims, dict[str, int]]:
    """Refine two shapes of equal element count into common factors.

    [T, B, H] and [T * B, H] share f0 = T, f1 = B, f2 = H. Where the products do not nest, the axes
    concerned get factors of their own, shared with nobody.
    """
    source_dims: list[list[str]] = [[] for _ in source]
    target_dims: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    i = j = 0
    left, right = list(source), list(target)
    while i < len(source) and j < len(target):
        if left[i] == 1 or right[j] == 1:
            if left[i] == 1 and right[j] == 1 and source[i] == target[j] == 1:
                _share(sizes, 1, source_dims[i], target_dims[j])
                i, j = i + 1, j + 1
            elif left[i] == 1:
                i += 1
            else:
                j += 1
            continue
        if left[i] == right[j]:
            size = left[i]
            left[i] = right[j] = 1
        elif min(left[i], right[j]) == UNKNOWN or max(left[i], right[j]) % min(left[i], right[j]):
            break
        else:
            size = min(left[i], right[j])
            left[i], right[j] = left[i] // size, right[j] // size
        _share(sizes, size, source_dims[i], target_dims[j])
        i, j = i + (left[i] == 1), j + (right[j] == 1)
    _own_factors("s", left[i:], source_dims[i:], sizes)
    _own_factors("t", right[j:], target_dims[j:], sizes)
    return tuple(map(tuple, source_dims)), tuple(map(tuple, target_dims)), sizes


def _share(sizes: dict[str, int], size: int, source: list[str], target: list[str]) -> None:
    factor = f"f{len(sizes)}"
    sizes[factor] = size
    source.append(factor)
    target.append(factor)


def _own_factors(prefix: str, left: list[int], dims: list[list[str]], sizes: dict[str, int]) -> None:
    for offset, size in enumerate(left):
        if size != 1:
            factor = f"{prefix}{offset}"
            sizes[factor] = size
            dims[offset].append(factor)


def reshape(node: gs.Node, facts: Facts) -> ShardingRule:
    """Reshape, Flatten, Squeeze, Unsqueeze: the elements keep their order."""
    source, target = facts.shape(node.inputs[0].name), facts.shape(node.outputs[0].name)
    source_dims, target_dims, sizes = common_factors(source, target)
    shape_inputs = {1: 0} if node.op == "Reshape" else {}
    inputs = (source_dims, *(None for _ in node.inputs[1:]))
    return ShardingRule(
        inputs,
        (target_dims,),
        sizes,
        ((0,),),
        LINEAR_IN_FIRST,
        whole=_unshared(source_dims, target_dims),
        shape_inputs=shape_inputs,
        moves=True,
    )


def _unshared(source: Dims, target: Dims) -> frozenset[str]:
    """Return the factors that only one of two shapes has."""
    return frozenset(chain(*source)) ^ frozenset(chain(*target))


def transpose(node: gs.Node, facts: Facts) -> ShardingRule:
    """Transpose: the axes change places."""
    dims, sizes = named("d", facts.shape(node.inputs[0].name))
    order = node.attrs.get("perm", list(range(len(dims)))[::-1])
    return ShardingRule(
        (dims,), (tuple(dims[axis] for axis in order),), sizes, ((0,),), LINEAR_IN_FIRST, moves=True
    )


def expand(node: gs.Node, facts: Facts) -> ShardingRule:
    """Expand: axes of size 1 are repeated; the shape argument follows the output's split."""
    from_shape, output = facts.shape(node.inputs[0].name), facts.shape(node.outputs[0].name)
    dims, sizes = named("d", output)
    offset = len(output) - len(from_shape)
    source: Dims = tuple(
        () if size == 1 and output[axis + offset] != 1 else (f"d{axis + offset}",)
        for axis, size in enumerate(from_shape)
    )
    return ShardingRule(
        (source, None), (dims,), sizes, ((0,),), LINEAR_IN_FIRST, shape_inputs={1: 0}, moves=True
    )


def constant_of_shape(node: gs.Node, facts: Facts) -> ShardingRule:
    """ConstantOfShape: any axis may be made in part."""
    dims, sizes = named("d", facts.shape(node.outputs[0].name))
    return ShardingRule((None,), (dims,), sizes, shape_inputs={0: 0})


def window(node: gs.Node, facts: Facts) -> ShardingRule:
    """Slice, Pad, Tile, Trilu, Resize: axes whose size changes stay whole, and of equal size too
    where the op may still move elements along them. Cut between parts, an axis is split inside them."""
    source, output = facts.shape(node.inputs[0].name), facts.shape(node.outputs[0].name)
    touched = _touched_axes(node, facts, len(source))
    cuts = {axis: cut for axis, cut in aligned_cuts(node, facts).items() if axis in touched}
    dims, sizes = named("d", source)
    into, out = list(dims), list[Axis]()
    for axis, size in enumerate(output):
        if axis in cuts:
            inner = cuts[axis].inner
            sizes |= {f"d{axis}": source[axis] // inner, f"o{axis}": size // inner, f"in{axis}": inner}
            into[axis] = (f"d{axis}", f"in{axis}")
            out.append((f"o{axis}", f"in{axis}"))
        elif axis in touched or size != source[axis]:
            sizes[f"o{axis}"] = size
            out.append((f"o{axis}",))
        else:
            out.append(dims[axis])
    inputs = (tuple(into), *(None for _ in node.inputs[1:]))
    linear = _pads_zeros(node, facts) if node.op == "Pad" else not _rounds(node, facts)
    terms: tuple[tuple[int, ...], ...] = ((0,),) if linear else ()
    spells_shape = (
        node.op == "Resize" and not _has_scales(node, facts) and _names_last_axes(node, len(source))
    )
    return ShardingRule(
        inputs,
        (tuple(out),),
        sizes,
        terms,
        LINEAR_IN_FIRST if linear else frozenset(),
        whole=_unshared(tuple(into), tuple(out)),
        shape_inputs={3: 0} if spells_shape else {},
        bounds=bounds_of(node, facts, cuts),
    )


def _rounds(node: gs.Node, facts: Facts) -> bool:
    """Tell whether a Resize makes integers of what lies between integers."""
    return node.op == "Resize" and node.attrs.get("mode", "nearest") != "nearest" and is_rounded(node, facts)


def _pads_zeros(node: gs.Node, facts: Facts) -> bool:
    if node.attrs.get("mode", "constant") != "constant" or len(node.inputs) < 3 or not node.inputs[2].name:
        return True
    value = facts.fixed_value(node.inputs[2].name)
    return value is not None and not np.any(value)


def _touched_axes(node: gs.Node, facts: Facts, rank: int) -> set[int]:
    """Axes that the op works along, by its arguments; all where they are not known."""
    if node.op == "Trilu":
        return {rank - 2, rank - 1}
    if node.op == "Slice":
        return _sliced_axes(node, facts, rank)
    if node.op == "Pad":
        pads = facts.value(node.inputs[1].name)
        if pads is None or (len(node.inputs) > 3 and node.inputs[3].name):
            return set(range(rank))
        return {axis for axis in range(rank) if pads[axis] or pads[axis + rank]}
    if node.op == "Tile":
        repeats = facts.value(node.inputs[1].name)
        return set(range(rank)) if repeats is None else {a for a in range(rank) if repeats[a] != 1}
    if node.op == "Resize":
        return _resized_axes(node, facts, rank)
    return set(range(rank))


def _resized_axes(node: gs.Node, facts: Facts, rank: int) -> set[int]:
    """Axes that a Resize does not keep as they are, besides those whose size it changes."""
    crops = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if crops or node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return set(range(rank))
    axes = node.attrs.get("axes", range(rank))
    if not _has_scales(node, facts):
        return set() if _names_last_axes(node, rank) else {axis % rank for axis in axes}
    scales = facts.value(node.inputs[2].name)
    if scales is None:
        return {axis % rank for axis in axes}
    return {axis % rank for axis, scale in zip(axes, scales, strict=True) if scale != 1}


def _names_last_axes(node: gs.Node, rank: int) -> bool:
    """Tell whether a Resize's numbers are those of the last axes, in order, as an Expand's are."""
    axes = [axis % rank for axis in node.attrs.get("axes", range(rank))]
    return axes == list(range(rank - len(axes), rank))


def _has_scales(node: gs.Node, facts: Facts) -> bool:
    name = node.inputs[2].name if len(node.inputs) > 2 else ""
    return bool(name) and facts.shape(name) != (0,)


def _sliced_axes(node: gs.Node, facts: Facts, rank: int) -> set[int]:
    """Axes that a Slice does not keep from end to end."""
    arguments = [facts.value(t.name) if t.name else None for t in node.inputs[1:]]
    starts, ends = arguments[0], arguments[1]
    if starts is None or ends is None:
        return set(range(rank))
    axes = arguments[2] if len(arguments) > 2 and arguments[2] is not None else np.arange(len(starts))
    steps = arguments[3] if len(arguments) > 3 and arguments[3] is not None else np.ones(len(starts))
    far = np.iinfo(np.int32).max
    return {
        int(axis) % rank
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
        if not (start == 0 and end >= far and step == 1)
    }


Axes = Callable[[gs.Node, Facts, int], set[int]]


def along(axes_of: Axes, linear: bool = True) -> Rule:
    """Make the rule of an op of one tensor that works along the axes that `axes_of` names."""

    def rule(node: gs.Node, facts: Facts) -> ShardingRule:
        source = facts.shape(node.inputs[0].name)
        dims, sizes = named("d", source)
        mixed = axes_of(node, facts, len(source))
        outputs: list[Dims] = []
        for tensor in node.outputs:
            out: list[Axis] = []
            for axis, size in enumerate(facts.shape(tensor.name)):
                sizes |= {f"o{axis}": size} if axis in mixed else {}
                out.append((f"o{axis}",) if axis in mixed else dims[axis])
            outputs.append(tuple(out))
        whole = frozenset(f"{prefix}{axis}" for axis in mixed for prefix in "do")
        return ShardingRule(
            (dims, *(None for _ in node.inputs[1:])),
            tuple(outputs),
            sizes,
            ((0,),) if linear else (),
            LINEAR_IN_FIRST if linear else frozenset(),
            whole=whole,
        )

    return rule


def image_axes(node: gs.Node, facts: Facts, rank: int) -> set[int]:
    """DepthToSpace, SpaceToDepth: channels and space."""
    return set(range(1, rank))


def named_axis(node: gs.Node, facts: Facts, rank: int) -> set[int]:
    """TopK: its attribute."""
    return {node.attrs.get("axis", -1) % rank}


def reverse_sequence(node: gs.Node, facts: Facts) -> ShardingRule:
    """Each sample has its own length, and time is whole."""
    shape = facts.shape(node.inputs[0].name)
    dims, sizes = named("d", shape)
    time, batch = node.attrs.get("time_axis", 0), node.attrs.get("batch_axis", 1)
    inputs = (dims, (dims[batch],))
    return ShardingRule(inputs, (dims,), sizes, ((0,),), LINEAR_IN_FIRST, whole=frozenset({f"d{time}"}))
