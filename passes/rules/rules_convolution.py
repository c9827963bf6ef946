"""Sharding rules of convolution, pooling and normalisation, and of their gradients.

Windows (halo) along the spatial axes are not split: those factors are whole.
"""

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.rules.rules_elementwise import Rule, named
from partc.passes.rules.sharding_rule import Dims, ShardingRule

COUNT_OR_MIX_CHANNELS = ("LRNGrad", "AveragePoolGrad", "LpPoolGrad")


class _ImageFactors:
    """Names the factors of image-like tensors: sample n, group g, channels c and o, space.

    `spatial`: the factors of the images' and the kernel's space, by its letter.
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self.sizes: dict[str, int] = {"g": group}
        self.spatial: dict[str, tuple[str, ...]] = {}

    def image(self, shape: tuple[int, ...], channel: str, space: str) -> Dims:
        self.sizes |= {"n": shape[0], channel: shape[1] // self.group}
        return (("n",), ("g", channel), *self._space(space, shape[2:]))

    def kernel(self, shape: tuple[int, ...], first: str, second: str) -> Dims:
        self.sizes |= {first: shape[0] // self.group, second: shape[1]}
        return (("g", first), (second,), *self._space("k", shape[2:]))

    def _space(self, letter: str, sizes: tuple[int, ...]) -> Dims:
        self.spatial[letter] = tuple(f"{letter}{axis}" for axis in range(len(sizes)))
        self.sizes |= zip(self.spatial[letter], sizes, strict=True)
        return tuple((factor,) for factor in self.spatial[letter])

    def whole(self) -> frozenset[str]:
        """Space, for its windows, and the groups, whose number is an attribute."""
        return frozenset({"g"}.union(*self.spatial.values()))


def convolution(node: gs.Node, facts: Facts) -> ShardingRule:
    """Conv: n (g c) x.., (g o) c k.. -> n (g o) y.., sums c and k; terms (X W) + (B)."""
    factors = _ImageFactors(node.attrs.get("group", 1))
    shapes = [facts.shape(tensor.name) for tensor in node.inputs]
    inputs: list[Dims] = [factors.image(shapes[0], "c", "x"), factors.kernel(shapes[1], "o", "c")]
    output = factors.image(facts.shape(node.outputs[0].name), "o", "y")
    return _contraction(factors, inputs, output, len(shapes) > 2, ("c",))


def transposed_convolution(node: gs.Node, facts: Facts) -> ShardingRule:
    """ConvTranspose: n (g c) x.., (g c) o k.. -> n (g o) y.., sums c and k."""
    factors = _ImageFactors(node.attrs.get("group", 1))
    shapes = [facts.shape(tensor.name) for tensor in node.inputs]
    inputs: list[Dims] = [factors.image(shapes[0], "c", "x"), factors.kernel(shapes[1], "c", "o")]
    output = factors.image(facts.shape(node.outputs[0].name), "o", "y")
    return _contraction(factors, inputs, output, len(shapes) > 2, ("c",))


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
    factors = _ImageFactors(max(1, data[1] // result[1]))
    inputs: list[Dims | None] = [
        factors.image(data, "c", "x"),
        factors.image(output_gradient, "o", "y"),
        *(None for _ in node.inputs[2:]),
    ]
    output = factors.kernel(result, "o", "c")
    counted = {"o", "c"} if factors.group > 1 else set()  # a group's channels are counted in its body
    return ShardingRule(
        tuple(inputs),
        (output,),
        factors.sizes,
        ((0, 1),),
        frozenset({0, 1}),
        combine=dict.fromkeys(("n", *factors.spatial["y"]), "sum"),
        whole=factors.whole() | counted,
    )


def data_gradient(node: gs.Node, facts: Facts) -> ShardingRule:
    """ConvDataGrad: n (g o) y.., (g o) c k.. -> n (g c) x.., sums o and k."""
    output_gradient, kernel = (facts.shape(tensor.name) for tensor in node.inputs[:2])
    result = facts.shape(node.outputs[0].name)
    factors = _ImageFactors(max(1, result[1] // kernel[1]))
    inputs: list[Dims] = [factors.image(output_gradient, "o", "y"), factors.kernel(kernel, "o", "c")]
    output = factors.image(result, "c", "x")
    return _contraction(factors, inputs, output, False, ("o",))


def pool(linear: bool, combine_all: bool = False) -> Rule:
    """Make the rule of a pooling op: samples and channels are free, space whole."""

    def rule(node: gs.Node, facts: Facts) -> ShardingRule | None:
        if len(node.outputs) > 1 and node.outputs[1].name and node.outputs[1].outputs:
            return None  # MaxPool's Indices count through the whole batch
        shape = facts.shape(node.inputs[0].name)
        dims, sizes = named("d", shape)
        output = facts.shape(node.outputs[0].name)
        sizes |= {f"y{axis}": size for axis, size in enumerate(output) if axis > 1}
        out = (*dims[:2], *((() if combine_all else (f"y{axis}",)) for axis in range(2, len(output))))
        space = frozenset(name for name in sizes if name not in ("d0", "d1"))
        return ShardingRule(
            (dims,),
            tuple(out for _ in node.outputs),
            sizes,
            ((0,),) if linear else (),
            frozenset({0}) if linear else frozenset(),
            whole=space,
        )

    return rule


def pool_gradient(node: gs.Node, facts: Facts) -> ShardingRule:
    """MaxPoolGrad, LRNGrad and their kin (image-like in, image-like out): space is whole, and the
    channels too where the op mixes or its body counts them; linear in its last image, the gradient."""
    sizes: dict[str, int] = {}
    whole = {"c"} if node.op.startswith(COUNT_OR_MIX_CHANNELS) else set()

    def name_factors(shape: tuple[int, ...], index: int) -> Dims:
        sizes.update({"n": shape[0], "c": shape[1]})
        space = [f"x{index}.{axis}" for axis in range(len(shape) - 2)]
        sizes.update(zip(space, shape[2:], strict=True))
        whole.update(space)
        return (("n",), ("c",), *((name,) for name in space))

    inputs: list[Dims | None] = []
    for index, tensor in enumerate(node.inputs):
        shape = facts.shape(tensor.name)
        inputs.append(name_factors(shape, index) if len(shape) > 2 else None)
    output = name_factors(facts.shape(node.outputs[0].name), len(inputs))
    last = max(index for index, dims in enumerate(inputs) if dims is not None)
    return ShardingRule(
        tuple(inputs), (output,), sizes, ((last,),), frozenset({last}), whole=frozenset(whole)
    )


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
