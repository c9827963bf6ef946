"""Gather many small messages into few large ones, without copying.

    before   AllReduce (dW1)   AllReduce (db1)   AllReduce (dW2)
    after    AllReduce (dW1, db1, dW2)           one buffer: the segment writes its slices

Two communications may share a bucket only if neither waits for the other: those with equally many
communications before them never do, nor do those that no other waits for, such as most gradients. Buckets
of what servers own are laid out by owner, so that each owner's part is contiguous; a parameter whose rows are
spread over servers has a bucket of its own.

Pieces along an axis of a mesh are laid out by rank (divide_pieces.py). They share buckets in the order in
which what is gathered is read first, and what is scattered is made; a large one whose pieces follow each
other in memory has a bucket of its own, since in one with others it would have to be copied.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.layouts.layouts import Reduction
from partc.passes.layouts.meshes import Meshes
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.microbatches.find_repeated import find_repeated, joins_microbatches
from partc.passes.scheduling.divide_pieces import BucketPiece, Pieces, is_contiguous, lay_out_pieces
from partc.runtime.plan.program import Rounding, Site

AnyItem = TypeVar("AnyItem")

BUCKET_BYTES = 25_000_000  # where an AllReduce nears the line rate of fast links
BUCKET_S = 30e-3  # of a bucket on the slowest link: measured quickest at 1 Gbit/s (decision 033)
LEAST_BUCKET_BYTES = 1_000_000
IN_PLACE_BYTES = 1_000_000  # of contiguous pieces: more are cheaper sent alone than copied
IN_PIECES = ("ReduceScatter", "AllGather")  # along an axis of the workers' mesh
BY_ROWS = ("AllGatherRows", "RowsToStage")  # of variables, where parts differ in size
BUCKETED = ("AllReduce", "Push", "Pull", "ToServers", "ToWorkers", "ToStage", *IN_PIECES)


@dataclass(frozen=True)
class Bucket:
    """Communications of one kind that travel together.

    `offsets` are elements; `rows_of` gives, for a bucket of owned rows, each server's range of rows
    per member.
    """

    name: str
    op: str
    site: Site
    reduction: Reduction
    dtype: np.dtype
    members: tuple[gs.Node, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    elements: int
    counts: tuple[int, ...] = ()  # elements per server, or per part of a mesh axis
    axes: tuple[int, ...] = ()  # of the mesh, along which its ranks meet
    receivers: tuple[Site, ...] = ()  # of what goes to another mesh
    pieces: tuple[tuple[BucketPiece, ...], ...] = ()  # by member and part along the mesh axis
    rounds_to: Rounding = ""  # what sums of it are sent as

    @property
    def is_divided(self) -> bool:
        """Tell whether segments read or write its members' pieces, and not the wholes."""
        if self.op not in IN_PIECES:
            return False
        return len(self.members) > 1 or not is_contiguous(self.shapes[0], self.members[0].attrs["cut"])

    @property
    def nbytes(self) -> int:
        """Return the buffer's size."""
        return self.elements * int(self.dtype.itemsize)


def depths(lowered: LoweredGraph) -> dict[str, int]:
    """Return for each node the number of communications on the longest way to it."""
    reached: dict[str, int] = {}  # value -> communications up to and including its producer
    result: dict[str, int] = {}
    for node in lowered.nodes:
        depth = max((reached.get(tensor.name, 0) for tensor in node.inputs), default=0)
        result[node.name] = depth
        for tensor in node.outputs:
            reached[tensor.name] = depth + is_communication(node)
    return result


def communications_ahead(lowered: LoweredGraph) -> dict[str, int]:
    """Return for each node the number of communications on the longest way from it, its own not counted."""
    ahead: dict[str, int] = {}  # value -> communications behind its maker
    result: dict[str, int] = {}
    for node in reversed(lowered.nodes):
        count = max((ahead.get(tensor.name, 0) for tensor in node.outputs), default=0)
        result[node.name] = count
        behind = count + is_communication(node)
        if behind:
            ahead.update((t.name, behind) for t in node.inputs if ahead.get(t.name, 0) < behind)
    return result


def copy_where_shared(lowered: LoweredGraph, sessions: bool = False) -> None:
    """Give a communication in place an operand of its own where others read the operand too.

    `sessions`: several sessions share what servers own, so that even what is pulled is a copy.
    """
    readers: dict[str, int] = {}
    messages = [n for n in lowered.nodes if is_communication(n) and not joins_microbatches(n, lowered.meshes)]
    received = {t.name for n in messages for t in n.outputs}
    produced = {t.name for n in lowered.nodes for t in n.outputs} - received
    for node in lowered.nodes:
        for tensor in node.inputs:
            readers[tensor.name] = readers.get(tensor.name, 0) + 1
    sent: set[str] = set()
    variables = {state.value for state in lowered.states}
    outliving = {state.next for state in lowered.states} | {value for _, value, _ in lowered.outputs}
    nodes: list[gs.Node] = []
    for node in lowered.nodes:
        is_message = is_communication(node) and not joins_microbatches(node, lowered.meshes)
        if is_message and node.op in (*BUCKETED, "Exchange"):
            operand = node.inputs[0]
            is_busy = readers[operand.name] > 1 or operand.name in outliving or operand.name not in produced
            # Owners' rows are pulled from where they lie, unless that is a place in another bucket.
            must_copy = (sessions or operand.name in received) if node.op == "Pull" else is_busy
            if node.op in (
                "ToStage",
                "Exchange",
            ):  # which leaves what it sends as it is, so that others may read it
                must_copy = operand.name not in produced or operand.name in sent
                sent.add(operand.name)
            if must_copy:
                nodes.append(_copy_operand(lowered, node))
        elif is_message and node.op in BY_ROWS and node.inputs[0].name in variables:
            nodes.append(_copy_operand(lowered, node))  # an update may be written while it is on its way
        nodes.append(node)
    lowered.nodes = nodes


def _copy_operand(lowered: LoweredGraph, node: gs.Node) -> gs.Node:
    operand = node.inputs[0]
    name = f"{operand.name}.sent.{node.op}"
    if f"{name}.node" in lowered.site_of:  # along another axis of the mesh
        name = f"{node.outputs[0].name}.sent"
    copy = gs.Variable(name, dtype=operand.dtype)
    node.inputs = [copy]
    identity = gs.Node("Identity", f"{copy.name}.node", {}, [operand], [copy])
    lowered.site_of[identity.name] = _sender_site(node)
    if operand.name in lowered.shapes:
        lowered.shapes[copy.name] = lowered.shapes[operand.name]
    lowered.nbytes[copy.name] = lowered.nbytes.get(operand.name, 0)
    return identity


def _sender_site(node: gs.Node) -> Site:
    if "site" in node.attrs:
        site: Site = node.attrs["site"]
        return site
    return "server" if node.op in ("ToWorkers", "Pull") else "worker"


def bucket_communications(
    lowered: LoweredGraph,
    whole_shapes: Mapping[str, tuple[int, ...]],
    owned_rows: Mapping[str, tuple[tuple[int, int], ...]],
    limit_bytes: int = BUCKET_BYTES,
    slots: Mapping[str, int] | None = None,
    places: Mapping[str, int] | None = None,
) -> dict[str, Bucket]:
    """Return communication node name -> bucket, for those whose size is known.

    whole_shapes  value -> shape of the whole tensor     owned_rows  parameter -> rows per server
    slots         communication -> a number, which those of a bucket have in common
    places        of communications, in whose order they are put into buckets: else that of the graph
    """
    depth, ahead = depths(lowered), communications_ahead(lowered)
    groups: dict[tuple[object, ...], list[gs.Node]] = {}
    repeated = find_repeated(lowered)
    for node in lowered.nodes:
        if not is_communication(node) or node.op not in BUCKETED or joins_microbatches(node, lowered.meshes):
            continue
        if whole_value(node) not in whole_shapes:
            continue
        dtype = np.dtype(node.inputs[0].dtype).name
        ways = ("to", "axes", "reduction", "again", "rounds_to")
        way = (node.op, _sender_site(node), *map(node.attrs.get, ways))
        alone = _alone(node, owned_rows, whole_shapes)
        slot = None if node.op in IN_PIECES else (slots or {}).get(node.name)
        level = depth[node.name] if ahead[node.name] else None  # nobody waits for the last
        key = (*way, node.name in repeated.nodes, dtype, level, alone, slot)
        groups.setdefault(key, []).append(node)
    order = _order(lowered)
    for nodes in groups.values():
        if nodes[0].op in IN_PIECES:
            nodes.sort(key=lambda node: order[node.name])
        elif places:
            nodes.sort(key=lambda node: places[node.name])
    buckets: dict[str, Bucket] = {}

    def nbytes(node: gs.Node) -> int:
        return _elements(whole_shapes[whole_value(node)]) * int(np.dtype(node.inputs[0].dtype).itemsize)

    for nodes in groups.values():
        for chunk in fill_buckets(nodes, nbytes, limit_bytes):
            name = f"bucket{len(set(map(id, buckets.values())))}"
            bucket = _lay_out(name, chunk, whole_shapes, owned_rows, lowered.meshes)
            buckets.update((node.name, bucket) for node in chunk)
    return buckets


def whole_shapes(facts: Facts, lowered: LoweredGraph) -> dict[str, tuple[int, ...]]:
    """Return the shape, of owned rows the whole's, of every value whose shape data cannot change."""
    shapes = {
        value: facts.shape(tensor)
        for value, (tensor, layout) in lowered.meanings.items()
        if tensor in facts.fixed_shapes and all(facts.shape(tensor)) and not layout.uneven()
    }
    for value, shape in lowered.shapes.items():
        is_piece = value in lowered.meanings and lowered.meanings[value][1].splits()
        if (value not in lowered.meanings or is_piece) and None not in shape:
            shapes[value] = tuple(size or 0 for size in shape)
    return shapes


def whole_value(node: gs.Node) -> str:
    """Return which of the values that a communication reads and writes has the shape of the whole."""
    (value,) = node.inputs[:1] if node.op == "ReduceScatter" else node.outputs[:1]
    return str(value.name)


def _order(lowered: LoweredGraph) -> dict[str, int]:
    """Return when what is gathered is read first, and when what is scattered is made: places of nodes."""
    places: dict[str, int] = {}
    read: dict[str, int] = {}
    for place, node in enumerate(lowered.nodes):
        places.update((tensor.name, place) for tensor in node.outputs)
        for tensor in node.inputs:
            read.setdefault(tensor.name, place)
    return {
        node.name: places.get(node.inputs[0].name, -1)
        if node.op == "ReduceScatter"
        else read.get(node.outputs[0].name, len(lowered.nodes))
        for node in lowered.nodes
        if is_communication(node) and node.op in IN_PIECES
    }


def _alone(
    node: gs.Node,
    owned_rows: Mapping[str, tuple[tuple[int, int], ...]],
    shapes: Mapping[str, tuple[int, ...]],
) -> str | None:
    """Return what a communication shares its bucket with nobody for: it would be copied, or has owners."""
    if node.op in IN_PIECES:
        shape = shapes[whole_value(node)]
        is_large = _elements(shape) * np.dtype(node.inputs[0].dtype).itemsize >= IN_PLACE_BYTES
        return str(node.name) if is_large and is_contiguous(shape, node.attrs["cut"]) else None
    owner: str | None = node.attrs.get("owner")
    return owner if owner is not None and _is_spread(owned_rows[owner]) else None


def _is_spread(rows: tuple[tuple[int, int], ...]) -> bool:
    return sum(stop > start for start, stop in rows) > 1


def fill_buckets(
    items: Iterable[AnyItem], nbytes: Callable[[AnyItem], int], limit_bytes: int
) -> list[list[AnyItem]]:
    """Return items in order, as many together as have at most `limit_bytes`; a larger one is alone."""
    buckets: list[list[AnyItem]] = [[]]
    filled = 0
    for item in items:
        own = nbytes(item)
        if buckets[-1] and filled + own > limit_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(item)
        filled += own
    return buckets


def _elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _lay_out(
    name: str,
    nodes: list[gs.Node],
    whole_shapes: Mapping[str, tuple[int, ...]],
    owned_rows: Mapping[str, tuple[tuple[int, int], ...]],
    meshes: Meshes,
) -> Bucket:
    first = nodes[0]
    axes: tuple[int, ...] = first.attrs.get("axes", ())
    owned = "owner" in first.attrs
    if owned:
        nodes = sorted(nodes, key=lambda node: _first_owner(owned_rows[node.attrs["owner"]]))
    shapes = tuple(whole_shapes[whole_value(node)] for node in nodes)
    sizes = [_elements(shape) for shape in shapes]
    offsets = tuple(int(offset) for offset in np.cumsum([0, *sizes[:-1]]))
    counts: tuple[int, ...] = ()
    pieces = Pieces((), ())
    if first.op in IN_PIECES:
        cuts = [node.attrs["cut"] for node in nodes]
        pieces = lay_out_pieces(shapes, cuts, meshes.size(_sender_site(first), axes[0]))
        counts = pieces.counts
    if owned:
        per_member = [
            [(stop - start) * _elements(shape[1:]) for start, stop in owned_rows[node.attrs["owner"]]]
            for node, shape in zip(nodes, shapes, strict=True)
        ]
        counts = tuple(sum(column) for column in zip(*per_member, strict=True))
    return Bucket(
        name,
        first.op,
        _sender_site(first),
        first.attrs.get("reduction") or "sum",
        np.dtype(first.inputs[0].dtype),
        tuple(nodes),
        shapes,
        offsets,
        sum(sizes),
        counts,
        axes,
        (first.attrs["to"],) if "to" in first.attrs else (),
        pieces.of_members,
        first.attrs.get("rounds_to", ""),
    )


def _first_owner(rows: tuple[tuple[int, int], ...]) -> int:
    return next((server for server, (start, stop) in enumerate(rows) if stop > start), 0)
