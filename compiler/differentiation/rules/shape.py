"""Gradient rules of ops that move elements about."""

from collections.abc import Mapping, Sequence

import numpy as np

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.rules.along_axis import static_size
from partc.compiler.differentiation.rules.product import turned_gradient


def _reshape(at: ForwardNode, dy: str) -> Gradients:
    # By default a 0 in the new shape copies a size of dy; here it says that the tensor is empty.
    literal = {"allowzero": 1} if 0 in at.shape(at.x(0)) else {}
    return {0: at.op("Reshape", dy, at.shape_of(at.x(0)), **literal)}


def _squeeze(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Unsqueeze", dy, at.x(1))} if at.x(1) else _reshape(at, dy)


def _unsqueeze(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("Squeeze", dy, at.x(1))}


def _transpose(at: ForwardNode, dy: str) -> Gradients:
    rank = at.rank(at.x(0))
    order = at.attribute("perm", list(range(rank))[::-1])
    assert isinstance(order, Sequence)
    if list(order) == [1, 0]:
        return {0: turned_gradient(at.build, dy)}
    return {0: at.op("Transpose", dy, perm=np.argsort(np.array(order)).tolist())}


def _expand(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.unbroadcast(dy, at.y(), at.x(0))}


def _concat(at: ForwardNode, dy: str) -> Gradients:
    axis = at.integer("axis", 0)
    inputs = list(at.node.input)
    if len(inputs) == 1:
        return {0: dy}
    axis %= at.rank(at.y())
    sizes = [at.shape(x)[axis] for x in inputs]
    if all(isinstance(size, int) for size in sizes):
        lengths = at.build.ints(*(size for size in sizes if isinstance(size, int)))
    else:
        parts = [at.op("Shape", x, start=axis, end=axis + 1) for x in inputs]
        lengths = at.op("Concat", *parts, axis=0)
    pieces = at.build.call("Split", [dy, lengths], len(inputs), axis=axis)
    return dict(enumerate(pieces))


def _split(at: ForwardNode, gradients: Sequence[str | None]) -> Gradients:
    pieces = [
        gradient or at.zeros(output) for gradient, output in zip(gradients, at.node.output, strict=True)
    ]
    return {0: at.op("Concat", *pieces, axis=at.integer("axis", 0))}


def _trilu(at: ForwardNode, dy: str) -> Gradients:
    extra = (at.x(1),) if at.x(1) else ()
    return {0: at.op("Trilu", dy, *extra, upper=at.integer("upper", 1))}


# ---------------------------------------------------------------- repetition and blocks


def _tile(at: ForwardNode, dy: str) -> Gradients:
    """Count the copies by axes of their own, and sum over those."""
    repeats = at.constants.get(at.x(1))
    rank = at.rank(at.x(0))
    if repeats is None:
        pairs = at.op("Concat", _as_column(at, at.x(1)), _as_column(at, at.shape_of(at.x(0))), axis=1)
        split = at.op("Reshape", dy, at.op("Reshape", pairs, at.build.ints(-1)), allowzero=1)
        return {0: at.op("ReduceSum", split, at.build.ints(*range(0, 2 * rank, 2)), keepdims=0)}
    sizes: list[str] = []
    copies = []
    for axis, count in enumerate(repeats.tolist()):
        if count != 1:
            copies.append(len(sizes))
            sizes.append(at.build.ints(count))
        sizes.append(_size(at, axis))
    if not copies:
        return {0: dy}
    split = at.op("Reshape", dy, at.op("Concat", *sizes, axis=0), allowzero=1)
    return {0: at.op("ReduceSum", split, at.build.ints(*copies), keepdims=0)}


def _as_column(at: ForwardNode, vector: str) -> str:
    return at.op("Unsqueeze", vector, at.build.ints(1))


def _size(at: ForwardNode, axis: int) -> str:
    size = at.shape(at.x(0))[axis]
    return at.build.ints(size) if isinstance(size, int) else at.op("Shape", at.x(0), start=axis, end=axis + 1)


def _depth_to_space(at: ForwardNode, dy: str) -> Gradients:
    """SpaceToDepth orders channels [block, block, c]; mode CRD has [c, block, block]."""
    block = at.integer("blocksize", 1)
    packed = at.op("SpaceToDepth", dy, blocksize=block)
    if at.attribute("mode", "DCR") == "DCR":
        return {0: packed}
    channels = static_size(at, at.x(0), 1)
    order = np.arange(channels).reshape(block * block, -1).T.ravel()
    return {0: at.op("Gather", packed, at.build.constant(order), axis=1)}


def _space_to_depth(at: ForwardNode, dy: str) -> Gradients:
    return {0: at.op("DepthToSpace", dy, blocksize=at.integer("blocksize", 1))}


def _reverse_sequence(at: ForwardNode, dy: str) -> Gradients:
    """Reversing twice changes nothing."""
    axes = {"batch_axis": at.integer("batch_axis", 1), "time_axis": at.integer("time_axis", 0)}
    return {0: at.op("ReverseSequence", dy, at.x(1), **axes)}


RULES: Mapping[str, Rule] = {
    "Reshape": of_first_output(_reshape),
    "Flatten": of_first_output(_reshape),
    "Squeeze": of_first_output(_squeeze),
    "Unsqueeze": of_first_output(_unsqueeze),
    "Transpose": of_first_output(_transpose),
    "Expand": of_first_output(_expand),
    "Concat": of_first_output(_concat),
    "Split": _split,
    "Tile": of_first_output(_tile),
    "DepthToSpace": of_first_output(_depth_to_space),
    "SpaceToDepth": of_first_output(_space_to_depth),
    "ReverseSequence": of_first_output(_reverse_sequence),
    "Trilu": of_first_output(_trilu),
}
