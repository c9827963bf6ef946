"""Where a tensor that comes from no data meets the data: the operations that read it beside some.

W ── Transpose ── MatMul ── h        W is met as a weight, through what only rearranges or computes it
x ────────────────┘       Add ── y   b is added to what weights made
b ────────────────────────┘          x is raw: nothing that could be trained has touched it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import onnx

from partc.compiler.differentiation.forward.expand_ops import reads_of
from partc.compiler.differentiation.tensor_types import Shape, Types

# Inputs that hold what a layer learns: matrices, filters, tables, and their biases and scales.
WEIGHT_INPUTS: Mapping[str, frozenset[int]] = {
    "BatchNormalization": frozenset({1, 2}),
    "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}),
    "DeformConv": frozenset({1, 3}),
    "Einsum": frozenset({0, 1, 2, 3}),
    "GRU": frozenset({1, 2, 3}),
    "Gather": frozenset({0}),
    "GatherND": frozenset({0}),
    "Gemm": frozenset({0, 1, 2}),
    "GroupNormalization": frozenset({1, 2}),
    "InstanceNormalization": frozenset({1, 2}),
    "LSTM": frozenset({1, 2, 3, 7}),
    "LayerNormalization": frozenset({1, 2}),
    "MatMul": frozenset({0, 1}),
    "PRelu": frozenset({1}),
    "RMSNormalization": frozenset({1}),
    "RNN": frozenset({1, 2, 3}),
}
BROADCASTING = frozenset({"Add", "Div", "Mul", "Sub"})


class DataUse(Enum):
    """How a tensor meets data, the surest sign of a parameter first."""

    WEIGHT = "weight"  # a weight's input of a layer
    BIAS = "bias"  # added to, or multiplied with, what a layer made
    VECTOR = "vector"  # as wide as one axis of values that layers have touched
    ARRAY = "array"  # as wide as several, but not as the samples
    JOINED = "joined"  # concatenated with values that layers have touched
    PER_SAMPLE = "per sample"  # as long as the first axis of what it meets
    RAW = "raw"  # with data that no layer has touched
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class _Reading:
    node: onnx.NodeProto
    index: int
    shape: Shape | None  # of what is read, before it was repeated


class DataUses:
    """The places of all tensors of a graph."""

    def __init__(self, graph: onnx.GraphProto, types: Types, candidates: Iterable[str]) -> None:
        self._types = types
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        self._makers = {name: node for node in graph.node for name in node.output}
        for node in graph.node:
            for index, name in enumerate(node.input):
                self._readers.setdefault(name, []).append((node, index))
        initializers = {tensor.name for tensor in graph.initializer}
        self._data = _reachable_from(graph, {value.name for value in graph.input} - initializers)
        weights = [
            r.node for name in candidates for r in self._readings(name) if r.index in _weight_inputs(r.node)
        ]
        self._learned = _reachable_from(graph, {name for node in weights for name in node.output})

    def of(self, name: str) -> frozenset[DataUse]:
        """Return the places where a tensor meets data."""
        return frozenset(self._place(reading) for reading in self._readings(name))

    def _readings(self, name: str) -> list[_Reading]:
        """Follow a tensor through what is computed without data, to where data is read beside it.

        Rows that are read from it by constant ids are rows of a table.
        """
        readings, queue, visited = [], [(name, self._shape(name))], {name}
        while queue:
            name, shape = queue.pop()
            for node, index in self._readers.get(name, []):
                outputs = set(node.output)
                if outputs & self._data or (node.op_type == "Gather" and index == 0):
                    readings.append(_Reading(node, index, shape))
                    continue
                repeats = node.op_type == "Expand"
                queue += [(o, shape if repeats else self._shape(o)) for o in outputs - visited]
                visited |= outputs
        return readings

    def _place(self, reading: _Reading) -> DataUse:
        node, index = reading.node, reading.index
        if index in _weight_inputs(node):
            return DataUse.WEIGHT
        others = [name for name in node.input if name in self._data]
        if node.op_type not in (*BROADCASTING, "Concat"):
            return DataUse.OTHER
        if not self._learned.intersection(others):
            return DataUse.RAW
        own, other_shape = reading.shape, self._shape(others[0])
        if own is None or other_shape is None:
            return DataUse.OTHER
        if node.op_type == "Concat":
            return DataUse.PER_SAMPLE if _spans_first_axis(own, other_shape) else DataUse.JOINED
        return self._broadcast_place(own, other_shape, others[0])

    def _broadcast_place(self, own: Shape, other_shape: Shape, other: str) -> DataUse:
        wide = [size for size in own if size != 1]
        maker = self._makers.get(other)
        if len(other_shape) > 1 and _spans_first_axis(own, other_shape):
            return DataUse.PER_SAMPLE
        if len(wide) <= 1 and own and maker is not None and maker.op_type in WEIGHT_INPUTS:
            return DataUse.BIAS
        if not wide:
            return DataUse.OTHER
        return DataUse.VECTOR if len(wide) == 1 else DataUse.ARRAY

    def _shape(self, name: str) -> Shape | None:
        return self._types[name].shape if name in self._types else None


def _weight_inputs(node: onnx.NodeProto) -> frozenset[int]:
    return WEIGHT_INPUTS.get(node.op_type, frozenset())


def _spans_first_axis(own: Shape, other_shape: Shape) -> bool:
    """Tell whether a tensor has an entry for each of the first axis of what it meets."""
    return len(own) >= len(other_shape) and own[len(own) - len(other_shape)] != 1


def _reachable_from(graph: onnx.GraphProto, sources: Iterable[str]) -> set[str]:
    """Return the sources and what is computed from them; nodes are in topological order."""
    reachable = set(sources)
    for node in graph.node:
        if reachable & reads_of(node):
            reachable.update(name for name in node.output if name)
    return reachable
