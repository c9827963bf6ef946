"""Refuse sums over as many copies as the batch has samples: x.unsqueeze(0).expand(B, -1, -1).sum(0).

    c = Expand (x[1, 4, 6], [4, 4, 6])      copies along axis -3, of the old batch
    s = Mul (c, c)                          the same axis
    t = ReduceSum (s, [0])                  refused: over another batch it would be another sum

A mean over copies is the same for any number of them. Where copies meet samples, shapes clash.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from partc.compiler.differentiation.forward.batch_axes import SYMBOLIC, BatchAxes
from partc.compiler.differentiation.forward.sample_counts import ENTRYWISE, MOVING, SUMS, axes_of_reduction
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.runtime.errors import UnsupportedModel

ALIGNED = ENTRYWISE - MOVING - {"Concat"} | {"Cast", "Identity"}  # their axes are those of their operands


def refuse_copied_samples(
    graph: onnx.GraphProto, constants: Mapping[str, np.ndarray], batch: BatchAxes
) -> None:
    """Raise UnsupportedModel at the first sum over copies of which there are as many as samples."""
    copied: dict[str, frozenset[int]] = {}  # axes, counted from the last
    build = NodeBuilder()
    for node in graph.node:
        at = ForwardNode(build, node, batch.before.types, constants, frozenset(), frozenset(), 0)
        if node.op_type in ("Expand", "Tile"):
            axes = frozenset(_copied_axes(at, batch))
        elif node.op_type in ALIGNED:
            axes = frozenset[int]().union(*(copied.get(name, ()) for name in node.input))
        else:
            axes = frozenset()
        if axes:
            copied[node.output[0]] = axes
        if node.op_type in SUMS and at.x(0) in copied:
            _check_sum(at, batch, copied[at.x(0)])


def _copied_axes(at: ForwardNode, batch: BatchAxes) -> Iterator[int]:
    """Yield axes along which a node copies one entry, or one tensor, as often as there were samples."""
    numbers = at.constants.get(at.x(1))
    rank = batch.rank(at.x(0))
    if numbers is None or batch.size == 1:
        return
    for axis, number in enumerate(numbers.ravel().tolist(), start=-len(numbers)):
        is_one = -axis > rank or batch.old_size(at.x(0), axis) == 1
        if number == batch.size and is_one and rank + axis not in batch.axes(at.x(0)):
            yield axis


def _check_sum(at: ForwardNode, batch: BatchAxes, copied: frozenset[int]) -> None:
    rank = batch.rank(at.x(0))
    if any(rank + axis in axes_of_reduction(at, rank) for axis in copied):
        raise UnsupportedModel(
            f"the model's own batch ({batch.size}) may be held in a constant: {at.x(0)!r} has as many copies "
            "of its entries, and they are summed",
            at=at.place,
            fix=SYMBOLIC,
        )
