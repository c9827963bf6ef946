"""What becomes of sizes, and of what is computed from them, when the batch is twice as large.

    labels [8, 16]   Size -> 128   Cast -> 128.0      twice the batch: 256, so that T = T_1 / N^-1

Numbers that follow from shapes alone are known; they are computed once more for a batch of twice the
size, and what differs by a power of two is alike with that power. ONNX Runtime
computes them, so a node is spelled as a model of ONNX for that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper

from partc.passes.graph.facts import NUMBERS, SMALL, UNKNOWN, Facts
from partc.passes.graph.infer_shapes import run_constants
from partc.passes.graph.training_graph import IR_VERSION
from partc.passes.replicas.batch_relation import ALIKE, BatchRelation, coupled
from partc.runtime.errors import BadModel, UnsupportedModel

LARGEST_POWER = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """A tensor's value for one batch, and for twice the batch."""

    once: np.ndarray
    twice: np.ndarray

    @property
    def is_same(self) -> bool:
        """Tell whether the batch does not matter."""
        return self.once.shape == self.twice.shape and np.array_equal(self.once, self.twice)


def sizes_of_shape(node: gs.Node, source: BatchRelation, facts: Facts) -> Sizes | None:
    """Return what Shape or Size gives, None where it is not known."""
    shape = grown_shape(node.inputs[0].name, source, facts)
    return None if shape is None else Sizes(_give(node, shape.once), _give(node, shape.twice))


def grown_shape(tensor: str, joined: BatchRelation, facts: Facts) -> Sizes | None:
    """Return a tensor's shape, None where it is not known."""
    shape = facts.shape(tensor)
    if UNKNOWN in shape or joined.kind == "coupled":
        return None
    once = np.array(shape, np.int64)
    twice = once.copy()
    if joined.kind == "beside":
        twice[joined.axis] *= 2
    return Sizes(once, twice)


def _give(node: gs.Node, shape: np.ndarray) -> np.ndarray:
    if node.op == "Size":
        return np.array(np.prod(shape, dtype=np.int64))
    return shape[node.attrs.get("start", 0) : node.attrs.get("end")]


def spell_out(spelled: Sizes, source: Sizes) -> Sizes:
    """Return the shapes that Reshape makes of a source's shapes: 0 keeps an axis, -1 is what is left."""
    return Sizes(_spell_out(spelled.once, source.once), _spell_out(spelled.twice, source.twice))


def _spell_out(spelled: np.ndarray, source: np.ndarray) -> np.ndarray:
    shape = spelled.copy()
    kept = np.flatnonzero(shape[: len(source)] == 0)
    shape[kept] = source[kept]
    return np.where(shape == -1, np.prod(source) // max(1, -np.prod(shape)), shape)


def grown_axis(shape: Sizes) -> int | None:
    """Return the one axis that is twice as long for twice the batch."""
    once, twice = shape.once, shape.twice
    grown = np.flatnonzero(once != twice).tolist() if once.shape == twice.shape else []
    return int(grown[0]) if len(grown) == 1 and 2 * once[grown[0]] == twice[grown[0]] else None


def compute_sizes(
    node: gs.Node, known: Mapping[str, Sizes], facts: Facts, opset: int
) -> dict[str, Sizes] | None:
    """Run a node for one batch and for twice the batch; None where that is not known, or does not fit."""
    operands: dict[str, Sizes] = {}
    for tensor in node.inputs:
        if not tensor.name:
            continue
        value = facts.value(tensor.name)
        operand = known.get(tensor.name) or (None if value is None else Sizes(value, value))
        if operand is None:
            return None
        operands[tensor.name] = operand
    if any(facts.dtypes[t.name].kind not in NUMBERS for t in node.outputs if t.name in facts.dtypes):
        return None  # bfloat16 follows from a size, but numpy has none
    shapes = [facts.shape(tensor.name) for tensor in node.outputs if tensor.name]
    is_small = all(UNKNOWN not in shape and 2 * np.prod(shape) <= SMALL for shape in shapes)
    if not is_small or node.domain not in (None, "", "ai.onnx"):
        return None
    once = _run(node, {name: operand.once for name, operand in operands.items()}, opset)
    try:
        twice = _run(node, {name: operand.twice for name, operand in operands.items()}, opset)
    except (BadModel, UnsupportedModel):
        return None  # a constant of the batch's size stands in the way of a larger one
    return {name: Sizes(once[name], twice[name]) for name in once}


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
    once, twice = sizes.once, sizes.twice
    if once.shape != twice.shape:
        return _joined_along(node, sizes)
    for power in range(-LARGEST_POWER, LARGEST_POWER + 1):
        if np.array_equal(np.asarray(once, float), np.asarray(twice, float) * 2.0**power):
            return ALIKE.with_power(power)
    return BatchRelation("sizes")


def _joined_along(node: gs.Node, sizes: Sizes) -> BatchRelation:
    """Return how a tensor grows that is longer for twice the batch: equal entries may lie anywhere."""
    once, twice = sizes.once, sizes.twice
    if once.ndim == twice.ndim:
        grown = [axis for axis in range(once.ndim) if once.shape[axis] != twice.shape[axis]]
        axis = grown[0]
        is_twice = len(grown) == 1 and twice.shape[axis] == 2 * once.shape[axis]
        if is_twice and is_uniform_along(once, axis) and is_uniform_along(twice, axis):
            joined = joined_value(node, Sizes(np.take(once, [0], axis), np.take(twice, [0], axis)))
            if joined.kind == "alike":
                return BatchRelation("beside", joined.power, axis, None)
    return coupled(f"node {node.name!r} ({node.op}) tells samples apart by their place in the batch")


def is_uniform_along(value: np.ndarray, axis: int) -> bool:
    """Tell whether all entries along an axis are equal."""
    return bool(np.all(value == np.take(value, [0], axis)))
