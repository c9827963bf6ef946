"""Evaluate a node on small integers of which some are symbols or unknown.

    Shape (x[batch, 6, 8])     [batch, 6, 8]
    Gather (that, 0)           batch
    Mul (that, 6)              6*batch

Values are numpy arrays of objects: int or bool, a symbol, or None for unknown. Ops that only move
elements are numpy's own; arithmetic is that of symbolic.py. What is here suffices for shapes: a node
whose inputs are all numbers is left to ONNX's reference implementation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from partc.compiler.differentiation.sizes import symbolic
from partc.compiler.differentiation.tensor_types import Size

Element = Size | bool
Entries = np.ndarray  # of Element


@dataclass(frozen=True, slots=True)
class SizeNode:
    """A node, what is known of its inputs' values, and its output's shape."""

    node: onnx.NodeProto
    inputs: Sequence[Entries | None]
    shape: tuple[int, ...]  # of output 0

    def attribute(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        return next((a.i for a in self.node.attribute if a.name == name), default)

    def numbers(self, index: int) -> list[int] | None:
        """Return an input's values where all are numbers."""
        values = self.inputs[index] if index < len(self.inputs) else None
        if values is None or not all(isinstance(value, int) for value in values.ravel().tolist()):
            return None
        return [int(value) for value in values.ravel().tolist()]


def evaluate_sizes(at: SizeNode) -> Entries | None:
    """Return the values of a node's first output, None where this module does not know the op."""
    if at.node.op_type in _ARITHMETIC:
        return _apply(_ARITHMETIC[at.node.op_type], at)
    rule = _RULES.get(at.node.op_type)
    return None if rule is None else rule(at)


# ---------------------------------------------------------------- elements are moved


def _reshape(at: SizeNode) -> Entries | None:
    """Identity, Reshape, Squeeze, Unsqueeze, Flatten: the inferred shape says it all."""
    data = at.inputs[0]
    return None if data is None else data.reshape(at.shape)


def _expand(at: SizeNode) -> Entries | None:
    data = at.inputs[0]
    return None if data is None else np.broadcast_to(data, at.shape)


def _cast(at: SizeNode) -> Entries | None:
    """Cast and CastLike between integers; of a truth, 0 or 1."""
    data = at.inputs[0]
    if data is None:
        return None
    elements = [int(value) if isinstance(value, bool) else value for value in data.ravel().tolist()]
    return as_values(elements).reshape(at.shape)


def _gather(at: SizeNode) -> Entries | None:
    data, indices = at.inputs[0], at.inputs[1]
    if data is None or indices is None or at.numbers(1) is None:
        return None
    axis = at.attribute("axis", 0)
    if any(not -data.shape[axis] <= place < data.shape[axis] for place in indices.ravel()):
        return None
    return np.array(np.take(data, indices.astype(np.int64), axis=axis), object)


def _slice(at: SizeNode) -> Entries | None:
    data = at.inputs[0]
    starts, ends = at.numbers(1), at.numbers(2)
    if data is None or data.ndim != 1 or starts is None or ends is None:
        return None
    (step,) = at.numbers(4) or [1]
    if len(starts) != 1 or step != 1:
        return None
    return data[starts[0] : ends[0]]


def _concat(at: SizeNode) -> Entries | None:
    parts = [part for part in at.inputs if part is not None]
    if len(parts) < len(at.inputs):
        return None
    return np.concatenate(parts, axis=at.attribute("axis", 0))


# ---------------------------------------------------------------- arithmetic


def _apply(operation: Callable[..., Element], at: SizeNode) -> Entries | None:
    operands = [values for values in at.inputs if values is not None]
    if len(operands) < len(at.inputs):
        return None
    wide = np.broadcast_arrays(*operands)
    rows = zip(*(array.ravel().tolist() for array in wide), strict=True)
    return as_values([operation(*elements) for elements in rows]).reshape(wide[0].shape)


def as_values(elements: Sequence[Element]) -> Entries:
    """Return a vector of objects."""
    values = np.empty(len(elements), object)
    values[:] = elements
    return values


def _choose(condition: Element, yes: Element, no: Element) -> Element:
    if isinstance(condition, bool):
        return yes if condition else no
    return yes if yes == no else None


def _negate(value: Element) -> Element:
    return -value if isinstance(value, int) else None


def _product(at: SizeNode) -> Entries | None:
    """ReduceProd of a whole vector."""
    data = at.inputs[0]
    if data is None or data.ndim != 1 or at.numbers(1) not in (None, [0], [-1]):
        return None
    total: Size = 1
    for size in data.tolist():
        total = symbolic.multiply(total, size)
    return as_values([total]).reshape(at.shape)


_ARITHMETIC: Mapping[str, Callable[..., Element]] = {
    "Add": symbolic.add,
    "Sub": symbolic.subtract,
    "Mul": symbolic.multiply,
    "Div": symbolic.divide,
    "Max": lambda *sizes: _fold(symbolic.largest, sizes),
    "Min": lambda *sizes: _fold(symbolic.smallest, sizes),
    "Neg": _negate,
    "Equal": symbolic.is_equal,
    "Less": symbolic.is_less,
    "Greater": lambda a, b: symbolic.is_less(b, a),
    "LessOrEqual": lambda a, b: _inverse(symbolic.is_less(b, a)),
    "GreaterOrEqual": lambda a, b: _inverse(symbolic.is_less(a, b)),
    "Not": lambda value: _inverse(value),
    "Where": _choose,
}
_RULES: Mapping[str, Callable[[SizeNode], Entries | None]] = {
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"), _reshape),
    **dict.fromkeys(("Cast", "CastLike"), _cast),
    "Expand": _expand,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "ReduceProd": _product,
}


def _fold(operation: Callable[[Size, Size], Size], sizes: Sequence[Size]) -> Size:
    total = sizes[0]
    for size in sizes[1:]:
        total = operation(total, size)
    return total


def _inverse(truth: Element) -> bool | None:
    return not truth if isinstance(truth, bool) else None


# ---------------------------------------------------------------- numbers


def symbols_of(values: np.ndarray) -> Entries:
    """Return numbers as objects of Python."""
    return as_values(values.ravel().tolist()).reshape(values.shape)


def numbers_of(values: Entries, element: int) -> np.ndarray | None:
    """Return values as an array of an element type, None where one is no number."""
    if not all(isinstance(value, int) for value in values.ravel().tolist()):
        return None
    return np.array(values.tolist(), helper.tensor_dtype_to_np_dtype(element)).reshape(values.shape)
