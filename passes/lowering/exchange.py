"""Send a tensor from a mesh to another of any shape: what each rank wants, of those who have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.layouts.boxes import box_of
from partc.passes.layouts.layouts import Layout, Partial, PerReplica, Replicate, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.layouts.reshard import Transfer
from partc.passes.lowering.lowering import Lowering
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.moves import find_moves, region_of
from partc.runtime.plan.program import Exchange, Move, Region


def exchange(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """Return the value that holds a tensor as wanted on another mesh.

    Raises UnsupportedModel where the sizes of its pieces follow the data.
    """
    source, target = transfer.source, transfer.target
    if not lowering.graph.has_fixed_pieces(tensor):
        raise UnsupportedModel(
            "a tensor whose size the data alone tells goes between devices of operators' own",
            at=f"tensor {tensor!r}",
            fix="give the operators that share it the same devices",
        )
    operand = lowering.need(tensor, source)
    result = gs.Variable(lowering.value_name(tensor, target), dtype=lowering.facts.dtypes[tensor])
    shape = lowering.facts.shape(tensor)
    lowering.out.communicate(
        "Exchange",
        [operand],
        [result],
        site=source.site,
        to=target.site,
        source=source,
        target=target,
        shape=shape,
    )
    return result


def describe_exchange(node: gs.Node, meshes: Meshes, hosts: Sequence[str], microbatch: int = 0) -> Exchange:
    """Return who sends what to whom: members are the source's workers, then the target's.

    `hosts`: by worker. Where micro-batches are alike, they are told as tensors of their own; else as parts of
    the whole.
    """
    source, target, shape = (node.attrs[name] for name in ("source", "target", "shape"))
    dtype = np.dtype(node.inputs[0].dtype).name
    return _describe(dtype, source, target, tuple(shape), meshes, tuple(hosts), microbatch)


@lru_cache(maxsize=1 << 10)
def _describe(
    dtype: str,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    meshes: Meshes,
    hosts: tuple[str, ...],
    microbatch: int,
) -> Exchange:
    ends = meshes.of(source.site), meshes.of(target.site)
    workers = list(dict.fromkeys((*ends[0].workers, *ends[1].workers)))
    axis = meshes.microbatch_axis
    if axis is not None and isinstance(micro := source.along(axis), Split) and not micro.uneven:
        shape = tuple(s // meshes.microbatches if a == micro.axis else s for a, s in enumerate(shape))
        source, target = (_within(axis, layout, meshes.microbatches) for layout in (source, target))
    has, wants = (_pieces(*end, shape, microbatch) for end in zip(ends, (source, target), strict=True))
    moves: list[Move] = []
    for term in sorted({piece.term for piece in has.values()}):
        moves += find_moves(
            _regions_of(term, has, workers),
            _regions_of(term, wants, workers),
            [hosts[worker] for worker in workers],
        )
    return Exchange(
        dtype,
        tuple(shape),
        has=tuple(_regions_of(None, has, workers)),
        wants=tuple(_regions_of(None, wants, workers)),
        moves=tuple(moves),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a worker has of a tensor, and of which: replicas have one each, and ranks have terms of a sum."""

    region: Region
    term: tuple[int, ...]


def _within(micro_axis: int, layout: Layout, microbatches: int) -> Layout:
    """Return a layout as one of a micro-batch, which has fewer of the blocks that are divided."""
    micro = layout.along(micro_axis)
    assert isinstance(micro, Split)
    layout = layout.with_along(micro_axis, Replicate())
    for axis, split in layout.splits():
        if split.axis == micro.axis and split.outer > micro.outer:
            layout = layout.with_along(axis, replace(split, outer=split.outer // microbatches))
    return layout


def _pieces(mesh: Mesh, layout: Layout, shape: Sequence[int], microbatch: int) -> dict[int, _Piece]:
    own = [axis for axis, p in enumerate(layout.placements) if isinstance(p, PerReplica | Partial)]
    pieces: dict[int, _Piece] = {}
    for position, worker in enumerate(mesh.workers):
        place = (*mesh.coordinates(position), microbatch)
        region = region_of(box_of(mesh, layout, shape, place))
        pieces[worker] = _Piece(region, tuple(place[axis] for axis in own))
    return pieces


def _regions_of(
    term: tuple[int, ...] | None, pieces: Mapping[int, _Piece], workers: Sequence[int]
) -> list[Region | None]:
    """Return what each worker has of a replica's tensor, or of a term, or of any one's."""
    piece_of = (pieces.get(worker) for worker in workers)
    return [None if p is None or term not in (None, p.term) else p.region for p in piece_of]
