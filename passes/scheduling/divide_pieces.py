"""Where pieces lie in their bucket, and what joins those that are gathered and divides what is scattered.

    bucket          rank 0: of W, of b, of V | rank 1: of W, of b, of V      one contiguous region for each
    AllGather       pieces of W ── Concat ──> W
    ReduceScatter   dW ── Split ──> pieces of dW                             each piece is a value of its own

A lone member that is cut at its first axis lies in its bucket as it is, and nothing is copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph, PieceCut, constant
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import Site

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """A piece in its bucket: its first element, its shape, and that with blocks as an axis of their own."""

    offset: int
    shape: Shape
    apart: Shape


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a bucket's members: by member and part, and the elements of each part's region."""

    of_members: tuple[tuple[BucketPiece, ...], ...]
    counts: tuple[int, ...]


def is_contiguous(shape: Shape, cut: PieceCut) -> bool:
    """Tell whether the pieces of a tensor follow each other in its memory."""
    return prod(shape[: cut.axis]) * cut.blocks == 1


def lay_out_pieces(shapes: Sequence[Shape], cuts: Sequence[PieceCut], parts: int) -> Pieces:
    """Return where pieces lie: by part, and within a part's region by member. `shapes`: of the wholes."""
    shapes_of = [
        [_piece_shapes(shape, cut, parts, part) for part in range(parts)]
        for shape, cut in zip(shapes, cuts, strict=True)
    ]
    sizes = [[prod(shape) for shape, _ in of_member] for of_member in shapes_of]
    by_part = [size for part in range(parts) for size in (of_member[part] for of_member in sizes)]
    offsets = [0, *accumulate(by_part)]
    return Pieces(
        tuple(
            tuple(
                BucketPiece(offsets[part * len(shapes) + member], *shapes_of[member][part])
                for part in range(parts)
            )
            for member in range(len(shapes))
        ),
        tuple(sum(of_member[part] for of_member in sizes) for part in range(parts)),
    )


def _piece_shapes(shape: Shape, cut: PieceCut, parts: int, part: int) -> tuple[Shape, Shape]:
    before, length, behind = shape[: cut.axis], shape[cut.axis] // cut.blocks, shape[cut.axis + 1 :]
    entries = cut.entries or length
    start, stop = part_range(entries, parts, part)
    own = (stop - start) * length // entries
    natural = (*before, cut.blocks * own, *behind)
    return natural, (*before, cut.blocks, own, *behind) if cut.blocks > 1 else natural


def divide_pieces(
    lowered: LoweredGraph,
    pieces_of: Mapping[str, Sequence[BucketPiece]],
    position_of: Mapping[str, int],
) -> dict[str, int]:
    """Let communications gather and scatter pieces, and join and divide these in segments.

    `pieces_of`: communication -> the pieces of its member. Returns for what joins pieces the place in the
    original graph of who first reads them.
    """
    nodes: list[gs.Node] = []
    joins: list[gs.Node] = []
    for node in lowered.nodes:
        pieces = pieces_of.get(node.name)
        if pieces is None:
            nodes.append(node)
        elif node.op == "AllGather":
            added = _join(lowered, node, pieces)
            nodes += [node, *added]
            joins += added
        else:
            nodes += [*_divide(lowered, node, pieces), node]
    lowered.nodes = nodes
    first = _first_readers(lowered, position_of)
    names = {node.name: node.outputs[0].name for node in joins}
    return {name: first[value] for name, value in names.items() if value in first}


def _first_readers(lowered: LoweredGraph, position_of: Mapping[str, int]) -> dict[str, int]:
    """Return value -> the place in the original graph of who first reads it, or what is made of it."""
    first: dict[str, int] = {}
    for node in reversed(lowered.nodes):
        reads = [first[tensor.name] for tensor in node.outputs if tensor.name in first]
        if node.name in position_of or reads:
            place = position_of.get(node.name, min(reads, default=0))
            for tensor in node.inputs:
                first[tensor.name] = min(place, first.get(tensor.name, place))
    return first


def _join(lowered: LoweredGraph, node: gs.Node, pieces: Sequence[BucketPiece]) -> list[gs.Node]:
    whole, cut = node.outputs[0], node.attrs["cut"]
    site: Site = node.attrs.get("to", node.attrs["site"])
    parts = node.outputs = _parts(lowered, whole, pieces)
    if cut.blocks == 1:
        return [_compute(lowered, site, "Concat", parts, [whole], axis=cut.axis)]
    apart, shape = _apart(lowered, whole, pieces, cut)
    blocks, length = shape[cut.axis : cut.axis + 2]
    together = [*shape[: cut.axis], blocks * length, *shape[cut.axis + 2 :]]
    sizes = constant(f"{whole.name}.joined.sizes", together, np.int64)
    return [
        _compute(lowered, site, "Concat", parts, [apart], axis=cut.axis + 1),
        _compute(lowered, site, "Reshape", [apart, sizes], [whole]),
    ]


def _divide(lowered: LoweredGraph, node: gs.Node, pieces: Sequence[BucketPiece]) -> list[gs.Node]:
    whole, cut = node.inputs[0], node.attrs["cut"]
    site: Site = node.attrs["site"]
    parts = node.inputs = _parts(lowered, whole, pieces)
    along = cut.axis + (cut.blocks > 1)
    lengths = constant(f"{whole.name}.pieces.lengths", [piece.apart[along] for piece in pieces], np.int64)
    if cut.blocks == 1:
        return [_compute(lowered, site, "Split", [whole, lengths], parts, axis=along)]
    apart, shape = _apart(lowered, whole, pieces, cut)
    sizes = constant(f"{whole.name}.in_blocks.sizes", list(shape), np.int64)
    return [
        _compute(lowered, site, "Reshape", [whole, sizes], [apart]),
        _compute(lowered, site, "Split", [apart, lengths], parts, axis=along),
    ]


def _apart(
    lowered: LoweredGraph, whole: gs.Tensor, pieces: Sequence[BucketPiece], cut: PieceCut
) -> tuple[gs.Variable, Shape]:
    """Return a whole with the blocks as an axis of their own, and its shape."""
    along = cut.axis + 1
    first = pieces[0].apart
    shape = (*first[:along], sum(piece.apart[along] for piece in pieces), *first[along + 1 :])
    apart = _like(whole, f"{whole.name}.in_blocks")
    lowered.shapes[apart.name] = shape
    lowered.nbytes[apart.name] = prod(shape) * int(np.dtype(whole.dtype).itemsize)
    return apart, shape


def _parts(lowered: LoweredGraph, whole: gs.Tensor, pieces: Sequence[BucketPiece]) -> list[gs.Variable]:
    parts = [_like(whole, f"{whole.name}.piece{number}") for number in range(len(pieces))]
    itemsize = int(np.dtype(whole.dtype).itemsize)
    for part, piece in zip(parts, pieces, strict=True):
        lowered.shapes[part.name] = piece.apart
        lowered.nbytes[part.name] = prod(piece.shape) * itemsize
    return parts


def _like(tensor: gs.Tensor, name: str) -> gs.Variable:
    return gs.Variable(name, dtype=tensor.dtype)


def _compute(
    lowered: LoweredGraph,
    site: Site,
    op: str,
    inputs: list[gs.Tensor],
    outputs: list[gs.Variable],
    **attributes: int,
) -> gs.Node:
    node = gs.Node(op, f"{outputs[0].name}.{op}", attributes, list(inputs), list(outputs))
    lowered.site_of[node.name] = site
    return node
