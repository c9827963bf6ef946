"""Draw fresh parameters, so that gradients differ from channel to channel.

    convolution                 normal, scale sqrt(2 / fan in)         He et al., arXiv:1502.01852, eq. 10
    dense layer, other matrix   normal, scale sqrt(2 / (in + out))     Glorot and Bengio, AISTATS 2010, eq. 12
    embedding                   normal, scale 1 / sqrt(width)
    scale of a normalisation 1, its bias 0, running mean 0, running variance 1, other biases 0

A convolution whose result is added to other branches is scaled down, for a deep residual network
without trained statistics would otherwise blow up: by the square root of the branches where all of
them end in convolutions, else (the shortcut passes as it is) by that of the sums in the graph.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from partc.compiler.differentiation.tensor_types import Types, element_count, static_shape
from partc.runtime.plan.variables import Constant, Normal

WEIGHTED = frozenset({"Conv", "Einsum", "Gather", "Gemm", "MatMul"})  # what they read is no bias

# What to fill in for the vectors that an op reads, by op and input; 0 for others.
FILLS: Mapping[tuple[str, int], float] = {
    ("BatchNormalization", 1): 1.0,
    ("BatchNormalization", 2): 0.0,
    ("BatchNormalization", 3): 0.0,
    ("BatchNormalization", 4): 1.0,
    ("LayerNormalization", 1): 1.0,
    ("LayerNormalization", 2): 0.0,
    ("Mul", 0): 1.0,
    ("Mul", 1): 1.0,
}
RESHAPING = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
BEHIND_CONVOLUTION = frozenset({"BatchNormalization", "Identity", "Add"})  # between a convolution and its sum


@dataclass(frozen=True, slots=True)
class _Reader:
    node: onnx.NodeProto
    index: int


def fresh_values(
    graph: onnx.GraphProto, types: Types, names: Sequence[str], seed: int
) -> dict[str, Constant | Normal]:
    """Return a new initial value per tensor; seeds count up from `seed`."""
    readers = _readers(graph)
    return {name: _fresh_value(readers, types, name, seed + position) for position, name in enumerate(names)}


def statistics(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Return the running means and variances that the graph reads."""
    cast_from = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast"}
    names = [name for node in graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]]
    return tuple(dict.fromkeys(cast_from.get(name, name) for name in names))


def _readers(graph: onnx.GraphProto) -> dict[str, list[_Reader]]:
    readers: dict[str, list[_Reader]] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            readers.setdefault(name, []).append(_Reader(node, index))
    return readers


def _fresh_value(
    readers: Mapping[str, list[_Reader]], types: Types, name: str, seed: int
) -> Constant | Normal:
    shape = static_shape(types, name, needed_by=f"drawing {name!r} anew")
    reader = _first_use(readers, name)
    is_matrix = len(shape) > 1 and reader.node.op_type in WEIGHTED
    if is_matrix or sum(size != 1 for size in shape) > 1:
        return Normal(0.0, _scale(readers, reader, shape), seed)
    return Constant(FILLS.get((reader.node.op_type, reader.index), 0.0))


def _first_use(readers: Mapping[str, list[_Reader]], name: str) -> _Reader:
    """Return the first reader that computes: reshaping and transposing a parameter does not."""
    reader = readers[name][0]
    while reader.node.op_type in RESHAPING and reader.node.output[0] in readers:
        reader = readers[reader.node.output[0]][0]
    return reader


def _scale(readers: Mapping[str, list[_Reader]], reader: _Reader, shape: tuple[int, ...]) -> float:
    match reader.node.op_type:
        case "Conv":
            return math.sqrt(2 / element_count(shape[1:])) / math.sqrt(_damping(readers, reader.node))
        case "Gather":
            return 1 / math.sqrt(shape[-1])
        case _:
            return math.sqrt(2 / (element_count(shape[:-1]) + shape[-1]))


def _damping(readers: Mapping[str, list[_Reader]], convolution: onnx.NodeProto) -> float:
    """Return the variance of which a convolution's result shall have the inverse."""
    makers = {
        output: reader.node for uses in readers.values() for reader in uses for output in reader.node.output
    }
    node = convolution
    while len(uses := readers.get(node.output[0], [])) == 1:
        node = uses[0].node
        if _adds_branches(node, makers):
            if all(_ends_in_convolution(name, makers) for name in node.input):
                return len(node.input)
            return len({maker.name for maker in makers.values() if _adds_branches(maker, makers)})
        if node.op_type not in BEHIND_CONVOLUTION:
            break
    return 1


def _adds_branches(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """An Add of a bias adds no branch."""
    if node.op_type not in ("Sum", "Add"):
        return False
    return all(name in makers and makers[name].op_type != "ConstantOfShape" for name in node.input)


def _ends_in_convolution(name: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    node = makers[name]
    while node.op_type in BEHIND_CONVOLUTION and node.input[0] in makers:
        node = makers[node.input[0]]
    return node.op_type == "Conv"
