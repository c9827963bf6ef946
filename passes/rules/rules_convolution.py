"""Sharding rules of convolution, pooling and normalisation, and of their gradients.

An axis of an image is named y where it is the output's, and y s where each entry of the output stands for s
entries of the input: then a part of the output reads a part of the input and a halo (ShardingRule.windows).
Where that is not so, or parts are not equal, a rule of its own has the space that windows make and the space
that they read as factors of their own, `made` and `read`, and tells what parts of one read of the other
(ShardingRule.apart). Elsewhere space is whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.rules.rules_elementwise import Rule, named
from partc.passes.rules.sharding_rule import Axis, Combine, Dims, Fill, Halo, Reach, ShardingRule
from partc.passes.windows.read_windows import gradient_of, transposed_windows_of, windows_of
from partc.passes.windows.windows import Windows

HaloOf = Callable[[Windows, int], tuple[int, int]]  # of the windows of an axis: entries before and behind
EntriesOf = Callable[[Windows, int, int, int], tuple[int, int]]  # of a part of an axis: what it reads


class _ImageFactors:
    """Names the factors of image-like tensors: sample n, group g, channels c and o, space.

    `spatial`: the factors of the images' and the kernel's space, by its letter.
    """

    def __init__(self, group: int, windows: Windows | None = None) -> None:
        self.group = group
        self.windows = windows
        self.sizes: dict[str, int] = {"g": group}
        self.spatial: dict[str, tuple[str, ...]] = {}

    def image(self, shape: tuple[int, ...], channel: str, space: str) -> Dims:
        self.sizes |= {"n": shape[0], channel: shape[1] // self.group}
        return (("n",), ("g", channel), *self._space(space, shape[2:]))

    def kernel(self, shape: tuple[int, ...], first: str, second: str) -> Dims:
        self.sizes |= {first: shape[0] // self.group, second: shape[1]}
        return (("g", first), (second,), *self._space("k", shape[2:]))

    def _space(self, letter: str, sizes: tuple[int, ...]) -> Dims:
        if letter == "x" and self.windows is not None:
            dims = read_by_windows(self.windows, sizes, self.sizes)
            self.spatial[letter] = tuple(factor for axis in dims for factor in axis)
            return dims
        self.spatial[letter] = tuple(f"{letter}{axis}" for axis in range(len(sizes)))
        self.sizes |= zip(self.spatial[letter], sizes, strict=True)
        return tuple((factor,) for factor in self.spatial[letter])

    def whole(self) -> frozenset[str]:
        """Space, for its windows, and the groups, whose number is an attribute."""
        return frozenset({"g"}.union(*self.spatial.values()))


def read_by_windows(windows: Windows, sizes: tuple[int, ...], known: dict[str, int]) -> Dims:
    """Name the factors of the space that windows read, and tell their sizes."""
    dims: list[tuple[str, ...]] = []
    for axis, size in enumerate(sizes):
        if windows.has_parts(axis):
            known |= {f"y{axis}": windows.target[axis], f"s{axis}": windows.strides[axis]}
            dims.append((f"y{axis}", f"s{axis}"))
        else:
            known[f"x{axis}"] = size
            dims.append((f"x{axis}",))
    return tuple(dims)


def _halos(
    windows: Windows | None, reach: Mapping[int, HaloOf], fills: Mapping[int, Fill] | None = None
) -> dict[str, dict[int, Halo]]:
    """Return the halos of parts of every axis that has them. `reach`: of each operand that is widened."""
    if windows is None:
        return {}
    return {
        f"y{axis}": {
            index: Halo(axis + 2, before, after, (fills or {}).get(index, "zero"))
            for index, (before, after) in ((i, reach_of(windows, axis)) for i, reach_of in reach.items())
        }
        for axis in range(len(windows.kernel))
        if windows.has_parts(axis)
    }


def _with_apart(
    rule: ShardingRule,
    windows: Windows | None,
    cut: Literal["made", "read"],
    reach: Mapping[int, EntriesOf],
    fills: Mapping[int, Fill] | None = None,
) -> ShardingRule:
    """Add the rule in which parts of the space that windows make, or read, are of any size.

    `reach`: of each operand of which more is read.
    """
    if windows is None:
        return rule
    names: dict[Axis, str] = {}
    for axis in range(len(windows.kernel)):
        names |= {(f"y{axis}",): f"made{axis}", (f"y{axis}", f"s{axis}"): f"read{axis}"}
        names[(f"x{axis}",)] = f"read{axis}"
    sizes = {name: size for name, size in rule.sizes.items() if name[0] not in "xys"}
    sizes |= {f"made{axis}": size for axis, size in enumerate(windows.target)}
    sizes |= {f"read{axis}": size for axis, size in enumerate(windows.source)}

    def spell(dims: Dims) -> Dims:
        return tuple((names[axis],) if axis in names else axis for axis in dims)

    inputs = tuple(None if dims is None else spell(dims) for dims in rule.inputs)
    space = [axis + 2 for axis in range(len(windows.kernel))]

    def reached(index: int, axis: int, entries_of: EntriesOf) -> Reach:
        ((factor,),) = (inputs[index] or ())[axis : axis + 1]
        fill: Fill = (fills or {}).get(index, "zero")
        return Reach(axis, sizes[factor], partial(entries_of, windows, axis - 2), fill)

    apart = ShardingRule(
        inputs,
        tuple(spell(dims) for dims in rule.outputs),
        sizes,
        rule.terms,
        rule.linear,
        {names.get((factor,), factor): how for factor, how in rule.combine.items()},
        rule.whole | set(names.values()),
        reaches={
            f"{cut}{axis - 2}": {index: reached(index, axis, of) for index, of in reach.items()}
            for axis in space
        },
    )
    return replace(rule, apart=apart)


def convolution(node: gs.Node, facts: Facts) -> ShardingRule:
    """Conv: n (g c) x.., (g o) c k.. -> n (g o) y.., sums c and k; terms (X W) + (B)."""
    windows = windows_of(node, facts)
    factors = _ImageFactors(node.attrs.get("group", 1), windows)
    shapes = [facts.shape(tensor.name) for tensor in node.inputs]
    inputs: list[Dims] = [factors.image(shapes[0], "c", "x"), factors.kernel(shapes[1], "o", "c")]
    output = factors.image(facts.shape(node.outputs[0].name), "o", "y")
    rule = _contraction(factors, inputs, output, len(shapes) > 2, ("c",))
    rule = replace(rule, windows=_halos(windows, {0: Windows.halo}))
    return _with_apart(rule, windows, "made", {0: Windows.entries_read})


def transposed_convolution(node: gs.Node, facts: Facts) -> ShardingRule:
    """ConvTranspose: n (g c) y.., (g c) o k.. -> n (g o) x.., sums c and k; terms (X W) + (B).

    It is the gradient of the data of a convolution whose windows lie on what it makes.
    """
    windows = transposed_windows_of(node, facts)
    factors = _ImageFactors(node.attrs.get("group", 1), windows)
    shapes = [facts.shape(tensor.name) for tensor in node.inputs]
    inputs: list[Dims] = [factors.image(shapes[0], "c", "y"), factors.kernel(shapes[1], "c", "o")]
    output = factors.image(facts.shape(node.outputs[0].name), "o", "x")
    rule = _contraction(factors, inputs, output, len(shapes) > 2, ("c",))
    rule = replace(rule, windows=_halos(windows, {0: Windows.halo_back}))
    return _with_apart(rule, windows, "read", {0: Windows.readers})


def _contraction(
    factors: _ImageFactors, inputs: list[Dims], output: Dims, bias: bool, sums: tuple[str, ...]
) -> ShardingRule:
    terms: list[tuple[int, ...]] = [(0, 1)]
    if bias:
        inputs.append((("g", "o"),))
        terms.append((2,))
    return ShardingRule(
        tuple(inputs),
        (output,),
        factors.sizes,
        tuple(terms),
        frozenset(range(len(inputs))),
        combine=dict.fromkeys((*sums, *factors.spatial["k"]), "sum"),
        whole=factors.whole(),
    )


def weight_gradient(node: gs.Node, facts: Facts) -> ShardingRule:
    """ConvWeightGrad: n (g c) x.., n (g o) y.. -> (g o) c k.., sums n and y."""
    data, output_gradient = (facts.shape(tensor.name) for tensor in node.inputs[:2])
    result = facts.shape(node.outputs[0].name)
    gradient = gradient_of(node, facts)
    windows = None if gradient is None else gradient.windows
    factors = _ImageFactors(max(1, data[1] // result[1]), windows)
    inputs: list[Dims | None] = [
        factors.image(data, "c", "x"),
        factors.image(output_gradient, "o", "y"),
        *(None for _ in node.inputs[2:]),
    ]
    output = factors.kernel(result, "o", "c")
    counted = {"o", "c"} if factors.group > 1 else set()  # a group's channels are counted in its body
    rule = ShardingRule(
        tuple(inputs),
        (output,),
        factors.sizes,
        ((0, 1),),
        frozenset({0, 1}),
        combine=dict.fromkeys(("n", *factors.spatial["y"]), "sum"),
        whole=factors.whole() | counted,
        windows=_halos(windows, {0: Windows.halo}),
    )
    return _with_apart(rule, windows, "made", {0: Windows.entries_read})


def data_gradient(node: gs.Node, facts: Facts) -> ShardingRule:
    """ConvDataGrad: n (g o) y.., (g o) c k.. -> n (g c) x.., sums o and k."""
    output_gradient, kernel = (facts.shape(tensor.name) for tensor in node.inputs[:2])
    result = facts.shape(node.outputs[0].name)
    gradient = gradient_of(node, facts)
    windows = None if gradient is None else gradient.windows
    factors = _ImageFactors(max(1, result[1] // kernel[1]), windows)
    inputs: list[Dims] = [factors.image(output_gradient, "o", "y"), factors.kernel(kernel, "o", "c")]
    output = factors.image(result, "c", "x")
    rule = _contraction(factors, inputs, output, False, ("o",))
    rule = replace(rule, windows=_halos(windows, {0: Windows.halo_back}))
    return _with_apart(rule, windows, "read", {0: Windows.readers})


def pool(linear: bool) -> Rule:
    """Make the rule of a pooling op: samples and channels are free, and parts of space."""

    def rule(node: gs.Node, facts: Facts) -> ShardingRule | None:
        if _tells_places(node):
            return None
        shape, output = (facts.shape(tensor.name) for tensor in (node.inputs[0], node.outputs[0]))
        dims, sizes = named("d", shape)
        fills: dict[int, Fill] = {0: "lowest" if node.op == "MaxPool" else "zero"}
        windows, halos = windows_of(node, facts), {}
        if windows is not None and not windows.can_pool(bool(node.attrs.get("count_include_pad", 0))):
            windows = None  # a part would need the padding of the axes that stay whole
        if windows is not None:
            dims = (*dims[:2], *read_by_windows(windows, shape[2:], sizes))
            halos = _halos(windows, {0: Windows.halo}, fills)
        sizes |= {f"y{axis}": size for axis, size in enumerate(output[2:])}
        out = (*dims[:2], *((f"y{axis}",) for axis in range(len(output) - 2)))
        result = ShardingRule(
            (dims,),
            tuple(out for _ in node.outputs),
            sizes,
            ((0,),) if linear else (),
            frozenset({0}) if linear else frozenset(),
            whole=frozenset(name for name in sizes if name not in ("d0", "d1")),
            windows=halos,
        )
        return _with_apart(result, windows, "made", {0: Windows.entries_read}, fills)

    return rule


def _tells_places(node: gs.Node) -> bool:
    """Tell whether a MaxPool makes Indices, which count through the whole batch; unread ones are dropped."""
    return len(node.outputs) > 1 and bool(node.outputs[1].name)


def global_pool(reduction: Combine | None) -> Rule:
    """Make the rule of a pooling op whose one window is all of space: a mean or a maximum over it."""

    def rule(node: gs.Node, facts: Facts) -> ShardingRule:
        dims, sizes = named("d", facts.shape(node.inputs[0].name))
        space = [factor for axis in dims[2:] for factor in axis]
        is_mean = reduction == "mean"
        return ShardingRule(
            (dims,),
            ((*dims[:2], *(() for _ in dims[2:])),),
            sizes,
            ((0,),) if is_mean else (),
            frozenset({0}) if is_mean else frozenset(),
            combine={} if reduction is None else dict.fromkeys(space, reduction),
            whole=frozenset(space),
            windows={} if reduction is None else {factor: {} for factor in space},
        )

    return rule


def response_gradient(node: gs.Node, facts: Facts) -> ShardingRule:
    """LRNGrad: mixes channels only, so that parts of space need nothing of others."""
    dims, sizes = named("d", facts.shape(node.outputs[0].name))
    space = frozenset(factor for axis in dims[2:] for factor in axis)
    return ShardingRule(
        (dims, dims),
        (dims,),
        sizes,
        ((1,),),
        frozenset({1}),
        whole=space | {"d1"},
        windows={factor: {} for factor in space},
    )


def window_gradient(node: gs.Node, facts: Facts) -> ShardingRule:
    """MaxPoolGrad (x, dy -> dx), AveragePoolGrad (dy -> dx) and LpPoolGrad (x, y, dy -> dx); linear in dy.

    Windows that reach into a part are run by the part's rank too: it has their gradients, of a LpPool what
    they made, and all that a MaxPool's winners are found among. Bodies of averages count the channels.
    """
    gradient = gradient_of(node, facts)
    windows = None if gradient is None else gradient.windows
    last = len(node.inputs) - 1
    output, shape = facts.shape(node.inputs[last].name), facts.shape(node.outputs[0].name)
    sizes = {"n": shape[0], "c": shape[1]}
    if windows is None:
        sizes |= {f"x{axis}": size for axis, size in enumerate(shape[2:])}
        space: Dims = tuple((f"x{axis}",) for axis in range(len(shape) - 2))
    else:
        space = read_by_windows(windows, shape[2:], sizes)
    sizes |= {f"y{axis}": size for axis, size in enumerate(output[2:])}
    image, result = (("n",), ("c",), *space), (("n",), ("c",), *((f"y{a}",) for a in range(len(output) - 2)))
    is_maximum = node.op.startswith("MaxPoolGrad")
    on_windows = range(1 if last else 0, last + 1)  # operands that are as windows make them
    operands: dict[int, HaloOf] = dict.fromkeys(on_windows, Windows.halo_back)
    reach: dict[int, EntriesOf] = dict.fromkeys(on_windows, Windows.readers)
    fills: dict[int, Fill] = {}
    if is_maximum:
        operands[0], reach[0], fills[0] = Windows.halo_of_readers, Windows.entries_of_readers, "lowest"
    rule = ShardingRule(
        (*(image for _ in range(min(last, 1))), *(result for _ in on_windows)),
        (image,),
        sizes,
        ((last,),),
        frozenset({last}),
        whole=frozenset(sizes.keys() - {"n", *(("c",) if is_maximum else ())}),
        windows=_halos(windows, operands, fills),
    )
    return _with_apart(rule, windows, "read", reach, fills)


def local_response(node: gs.Node, facts: Facts) -> ShardingRule:
    """LRN: mixes channels only."""
    dims, sizes = named("d", facts.shape(node.inputs[0].name))
    return ShardingRule((dims,), (dims,), sizes, whole=frozenset({"d1"}))


def batch_normalization(node: gs.Node, facts: Facts) -> ShardingRule:
    """BatchNormalization: in training the sample and space factors are mixed, else free."""
    dims, sizes = named("d", facts.shape(node.inputs[0].name))
    channel: Dims = (("d1",),)
    training = node.attrs.get("training_mode", 0)
    mixed = frozenset(name for name in sizes if name != "d1") if training else frozenset()
    inputs = (dims, channel, channel, channel, channel)
    outputs = (dims, channel, channel)[: len(node.outputs)]
    return ShardingRule(inputs, outputs, sizes, whole=mixed)


def layer_normalization(node: gs.Node, facts: Facts) -> ShardingRule:
    """LayerNormalization: the axes from `axis` on are mixed."""
    shape = facts.shape(node.inputs[0].name)
    axis = node.attrs.get("axis", -1) % len(shape)
    dims, sizes = named("d", shape)
    inputs = (dims, *(None for _ in node.inputs[1:]))
    statistics = (*dims[:axis], *(() for _ in dims[axis:]))
    outputs = (dims, statistics, statistics)[: len(node.outputs)]
    return ShardingRule(inputs, outputs, sizes, whole=frozenset(f for a in dims[axis:] for f in a))
