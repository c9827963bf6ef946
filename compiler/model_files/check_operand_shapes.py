"""Shapes that an op does not take together: ONNX's inference leaves them to who runs it.

before   SoftmaxCrossEntropyLoss (scores[12,5], labels[4])      after   refused, with the node and both shapes

A rule says of a node's other inputs what shape they have, by that of the first. Sizes are compared where both
are numbers: a symbol may yet be anything.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx

from partc.runtime.errors import BadModel

UNNAMED = "unk__"  # what ONNX's inference calls a size that it does not know
BIAS_FIX = (
    "give it one axis; if PyTorch wrote it for a Conv3d(bias=False) with optimize=False, "
    "give the convolution a bias, or export the module optimised"
)

Size = int | str | None
Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class _Operands:
    """A node's inputs, and their shapes where their ranks are known."""

    node: onnx.NodeProto
    shapes: Mapping[str, Shape]

    def name(self, index: int) -> str:
        return str(self.node.input[index]) if index < len(self.node.input) else ""

    def shape(self, index: int) -> Shape | None:
        return self.shapes.get(self.name(index))

    def attribute(self, name: str, default: int) -> int:
        return next((int(a.i) for a in self.node.attribute if a.name == name), default)

    def text(self, name: str) -> str:
        return next((a.s.decode() for a in self.node.attribute if a.name == name), "")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The shape that an input is to have; `may` says which smaller sizes it may have.

    fix: what helps where it has another number of axes, if exporting the model again does not
    """

    index: int
    shape: Shape
    may: str = ""  # "be smaller", "broadcast"
    fix: str = ""

    def fits(self, actual: Shape) -> bool:
        sizes, wanted = actual, self.shape
        if self.may == "broadcast":
            wanted = wanted[len(wanted) - len(sizes) :] if len(sizes) <= len(wanted) else ()
        return len(sizes) == len(wanted) and all(map(self._fits_size, sizes, wanted))

    def _fits_size(self, size: Size, wanted: Size) -> bool:
        if not isinstance(size, int) or not isinstance(wanted, int):
            return True
        return size == wanted or (
            size < wanted if self.may == "be smaller" else self.may == "broadcast" and size == 1
        )


def check_operand_shapes(inferred: onnx.ModelProto) -> None:
    """Raise BadModel at the first node of a graph, shapes inferred, whose inputs do not fit together."""
    graph = inferred.graph
    shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            shapes.setdefault(value.name, tuple(map(_size, value.type.tensor_type.shape.dim)))
    for node in graph.node:
        if node.domain in ("", "ai.onnx") and node.op_type in _RULES:
            _check_node(_Operands(node, shapes))


def _check_node(at: _Operands) -> None:
    if at.shape(0) is None:
        return
    for wanted in _RULES[at.node.op_type](at):
        actual = at.shape(wanted.index)
        if actual is not None and not wanted.fits(actual):
            raise BadModel(
                f"{at.node.op_type} takes {_spell(wanted.shape)} beside {at.name(0)!r} of "
                f"{_spell(at.shape(0) or ())}, and {at.name(wanted.index)!r} is of {_spell(actual)}",
                at=f"node {at.node.name or at.node.output[0]!r} ({at.node.op_type})",
                fix=wanted.fix
                if wanted.fix and len(actual) != len(wanted.shape)
                else f"give {at.name(wanted.index)!r} the shape that fits, or export the model again",
            )


def _size(dimension: onnx.TensorShapeProto.Dimension) -> Size:
    return dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or None


def _spell(shape: Shape) -> str:
    return "[" + ",".join("?" if _is_unknown(size) else str(size) for size in shape) + "]"


def _is_unknown(size: Size) -> bool:
    return size is None or str(size).startswith(UNNAMED)


# ---------------------------------------------------------------- one rule an op


def _times(size: Size, factor: int) -> Size:
    return size * factor if isinstance(size, int) else None


def _label_loss(at: _Operands) -> Iterator[_Wanted]:
    scores = at.shape(0) or ()
    if len(scores) > 1:
        yield _Wanted(1, (scores[0], *scores[2:]))
        yield _Wanted(2, (scores[1],))


def _elements(at: _Operands) -> Iterator[_Wanted]:
    """Indices go no further than the data, but along their own axis."""
    sizes = list(at.shape(0) or ())
    if sizes:
        sizes[at.attribute("axis", 0)] = None
        yield _Wanted(1, tuple(sizes), may="be smaller")
    if (indices := at.shape(1)) is not None:
        yield _Wanted(2, indices)


def _gather_nd(at: _Operands) -> Iterator[_Wanted]:
    data, indices = at.shape(0) or (), at.shape(1) or ()
    count = at.attribute("batch_dims", 0)
    yield _Wanted(1, (*data[:count], *(None for _ in indices[count:])))


def _scatter_nd(at: _Operands) -> Iterator[_Wanted]:
    data, indices = at.shape(0) or (), at.shape(1) or ()
    if indices and isinstance(indices[-1], int):
        yield _Wanted(2, (*indices[:-1], *data[indices[-1] :]))


def _reverse_sequence(at: _Operands) -> Iterator[_Wanted]:
    yield _Wanted(1, ((at.shape(0) or ())[at.attribute("batch_axis", 1)],))


def _recurrence(at: _Operands) -> Iterator[_Wanted]:
    sizes = at.shape(0) or ()
    if len(sizes) != 3:
        return
    batch, width = (sizes[0] if at.attribute("layout", 0) else sizes[1]), sizes[2]
    directions = 2 if at.text("direction") == "bidirectional" else 1
    hidden = at.attribute("hidden_size", 0) or (at.shape(2) or (None,))[-1]
    gates = _times(hidden, {"LSTM": 4, "GRU": 3, "RNN": 1}[at.node.op_type])
    state = (batch, directions, hidden) if at.attribute("layout", 0) else (directions, batch, hidden)
    yield _Wanted(1, (directions, gates, width))
    yield _Wanted(2, (directions, gates, hidden))
    yield _Wanted(3, (directions, _times(gates, 2)))
    yield _Wanted(4, (batch,))
    yield from (_Wanted(index, state) for index in (5, 6))
    yield _Wanted(7, (directions, _times(hidden, 3)))


def _einsum(at: _Operands) -> Iterator[_Wanted]:
    """A label has one size wherever it stands; 1 stretches."""
    operands = at.text("equation").replace(" ", "").partition("->")[0].split(",")
    if any("." in labels for labels in operands):
        return
    sizes: dict[str, Size] = {}
    for index, labels in enumerate(operands):
        yield _Wanted(index, tuple(sizes.get(label) for label in labels), may="broadcast")
        for label, size in zip(labels, at.shape(index) or (), strict=False):
            if isinstance(size, int) and size != 1:
                sizes.setdefault(label, size)


def _gemm(at: _Operands) -> Iterator[_Wanted]:
    left, right = at.shape(0) or (), at.shape(1) or ()
    if len(left) == len(right) == 2:
        rows, columns = left[at.attribute("transA", 0)], right[1 - at.attribute("transB", 0)]
        yield _Wanted(2, (rows, columns), may="broadcast")


def _convolution(at: _Operands) -> Iterator[_Wanted]:
    data, weight = at.shape(0) or (), at.shape(1) or ()
    groups, rest = at.attribute("group", 1), (None for _ in weight[2:])
    if len(data) < 3 or len(weight) < 3:
        return
    if at.node.op_type == "Conv":
        channels = data[1] // groups if isinstance(data[1], int) else None
        yield _Wanted(1, (None, channels, *rest))
        yield _Wanted(2, (weight[0],), fix=BIAS_FIX)
    else:
        yield _Wanted(1, (data[1], None, *rest))
        yield _Wanted(2, (_times(weight[1], groups),), fix=BIAS_FIX)


def _instance_normalization(at: _Operands) -> Iterator[_Wanted]:
    yield from (_Wanted(index, (at.shape(0) or ())[1:2]) for index in (1, 2))


def _layer_normalization(at: _Operands) -> Iterator[_Wanted]:
    data = at.shape(0) or ()
    yield from (_Wanted(index, data, may="broadcast") for index in (1, 2))


_RULES: Mapping[str, Callable[[_Operands], Iterator[_Wanted]]] = {
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), _label_loss),
    **dict.fromkeys(("GatherElements", "ScatterElements"), _elements),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrence),
    **dict.fromkeys(("Conv", "ConvTranspose"), _convolution),
    "Einsum": _einsum,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "ReverseSequence": _reverse_sequence,
    "ScatterND": _scatter_nd,
}
