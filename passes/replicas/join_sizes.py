"""What becomes of sizes, and of what is computed from them, when the batch is several times as large.

    labels [8, 16]   Size -> 128   Cast -> 128.0      twice the batch: 256, so that T = T_1 / N^-1

Numbers that follow from shapes alone are known; they are computed once more for a batch of twice the
size, where a power of two shows exactly, and for that of all replicas together, since a number that is
cut off may grow only so far. What differs by the same power of both is alike with that power. ONNX Runtime
computes them, so a node is spelled as a model of ONNX for that.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper

from partc.passes.graph.facts import SMALL, UNKNOWN, Facts
from partc.passes.graph.infer_facts import NUMBERS
from partc.passes.graph.infer_shapes import run_constants
from partc.passes.graph.training_graph import IR_VERSION
from partc.passes.replicas.batch_relation import ALIKE, BatchRelation, coupled
from partc.runtime.errors import BadModel, UnsupportedModel

LARGEST_POWER = 4
ROUNDINGS = 16  # of a number that a few nodes compute


@dataclass(frozen=True, slots=True)
class Sizes:
    """A tensor's value for one batch, and for batches so many times as large."""

    values: Mapping[int, np.ndarray]  # times the batch -> value

    @property
    def once(self) -> np.ndarray:
        """The value for one batch."""
        return self.values[1]

    @property
    def is_same(self) -> bool:
        """Tell whether the batch does not matter."""
        return all(np.array_equal(self.once, value) for value in self.values.values())

    @property
    def is_proportional(self) -> bool:
        """Tell whether every number grows as the batch does."""
        return all(np.array_equal(times * self.once, value) for times, value in self.values.items())


def sizes_of_shape(node: gs.Node, shape: Sizes) -> Sizes:
    """Return what Shape or Size gives."""
    return Sizes({times: _give(node, value) for times, value in shape.values.items()})


def grown_shape(tensor: str, joined: BatchRelation, facts: Facts, batches: Collection[int]) -> Sizes | None:
    """Return a tensor's shape for so many times the batch, None where it is not known."""
    shape = facts.shape(tensor)
    if UNKNOWN in shape or joined.kind == "coupled":
        return None
    shapes = {times: np.array(shape, np.int64) for times in batches}
    if joined.kind == "beside":
        for times, grown in shapes.items():
            grown[joined.axis] *= times
    return Sizes(shapes)


def _give(node: gs.Node, shape: np.ndarray) -> np.ndarray:
    if node.op == "Size":
        return np.array(np.prod(shape, dtype=np.int64))
    return shape[node.attrs.get("start", 0) : node.attrs.get("end")]


def spell_out(spelled: Sizes, source: Sizes) -> Sizes:
    """Return the shapes that Reshape makes of a source's shapes: 0 keeps an axis, -1 is what is left."""
    return Sizes({times: _spell_out(shape, source.values[times]) for times, shape in spelled.values.items()})


def _spell_out(spelled: np.ndarray, source: np.ndarray) -> np.ndarray:
    shape = spelled.copy()
    kept = np.flatnonzero(shape[: len(source)] == 0)
    shape[kept] = source[kept]
    return np.where(shape == -1, np.prod(source) // max(1, -np.prod(shape)), shape)


def grown_axis(shape: Sizes) -> int | None:
    """Return the one axis that grows, and as the batch does."""
    once, others = shape.once, shape.values
    if any(value.shape != once.shape for value in others.values()):
        return None
    grown = {int(axis) for value in others.values() for axis in np.flatnonzero(value != once)}
    axis = grown.pop() if len(grown) == 1 else None
    is_proportional = axis is not None and all(t * once[axis] == v[axis] for t, v in others.items())
    return axis if is_proportional else None


def compute_sizes(
    node: gs.Node, known: Mapping[str, Sizes], facts: Facts, opset: int
) -> dict[str, Sizes] | None:
    """Run a node for one batch and for larger ones; None where that is not known, or does not fit."""
    operands: dict[str, Sizes] = {}
    batches = next(iter(known.values())).values.keys()
    for tensor in node.inputs:
        if not tensor.name:
            continue
        value = facts.value(tensor.name)
        operand = known.get(tensor.name) or (None if value is None else Sizes(dict.fromkeys(batches, value)))
        if operand is None:
            return None
        operands[tensor.name] = operand
    if any(facts.dtypes[t.name].kind not in NUMBERS for t in node.outputs if t.name in facts.dtypes):
        return None  # bfloat16 follows from a size, but numpy has none
    shapes = [facts.shape(tensor.name) for tensor in node.outputs if tensor.name]
    is_small = all(UNKNOWN not in shape and 2 * np.prod(shape) <= SMALL for shape in shapes)
    if not is_small or node.domain not in (None, "", "ai.onnx"):
        return None
    results: dict[int, dict[str, np.ndarray]] = {}
    for times in sorted(batches):
        try:
            results[times] = _run(
                node, {name: sizes.values[times] for name, sizes in operands.items()}, opset
            )
        except (BadModel, UnsupportedModel):
            if times == 1:
                raise
            return None  # a constant of the batch's size stands in the way of a larger one
    return {name: Sizes({times: made[name] for times, made in results.items()}) for name in results[1]}


def _run(node: gs.Node, operands: Mapping[str, np.ndarray], opset: int) -> dict[str, np.ndarray]:
    attributes = {
        name: numpy_helper.from_array(value.values) if isinstance(value, gs.Constant) else value
        for name, value in node.attrs.items()
    }
    names = [tensor.name for tensor in node.outputs]
    spelled = helper.make_node(node.op, [t.name for t in node.inputs], names, **attributes)
    constants = [numpy_helper.from_array(np.array(v, order="C"), name) for name, v in operands.items()]
    results = [helper.make_empty_tensor_value_info(name) for name in names if name]
    graph = helper.make_graph([spelled], "doubled", [], results, constants)
    imports = [helper.make_opsetid("", opset)]
    return run_constants(helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION))


def joined_value(node: gs.Node, sizes: Sizes) -> BatchRelation:
    """Return how a tensor grows that follows from sizes."""
    if any(value.shape != sizes.once.shape for value in sizes.values.values()):
        return _joined_along(node, sizes)
    for power in range(-LARGEST_POWER, LARGEST_POWER + 1):
        if all(_is_scaled(sizes.once, value, times, power) for times, value in sizes.values.items()):
            return ALIKE.with_power(power)
    return BatchRelation("sizes")


def _is_scaled(once: np.ndarray, value: np.ndarray, times: int, power: int) -> bool:
    """Tell whether once = value * times^power, up to rounding where `times` is no power of two."""
    is_exact = times & (times - 1) == 0
    dtype = once.dtype if once.dtype.kind == "f" else np.dtype(np.float64)
    rounding = 0.0 if is_exact else ROUNDINGS * float(np.finfo(dtype).eps)
    scaled = np.asarray(value, float) * float(times) ** power
    return np.allclose(np.asarray(once, float), scaled, rtol=rounding, atol=0)


def _joined_along(node: gs.Node, sizes: Sizes) -> BatchRelation:
    """Return how a tensor grows that is longer for a larger batch: equal entries may lie anywhere."""
    if all(value.ndim == sizes.once.ndim for value in sizes.values.values()):
        shapes = Sizes({times: np.array(value.shape) for times, value in sizes.values.items()})
        axis = grown_axis(shapes)
        if axis is not None and all(is_uniform_along(value, axis) for value in sizes.values.values()):
            firsts = {times: np.take(value, [0], axis) for times, value in sizes.values.items()}
            joined = joined_value(node, Sizes(firsts))
            if joined.kind == "alike":
                return BatchRelation("beside", joined.power, axis, None)
    return coupled(f"node {node.name!r} ({node.op}) tells samples apart by their place in the batch")


def is_uniform_along(value: np.ndarray, axis: int) -> bool:
    """Tell whether all entries along an axis are equal."""
    return bool(np.all(value == np.take(value, [0], axis)))
