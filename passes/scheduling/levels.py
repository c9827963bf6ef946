"""How a communication crosses the cluster, level by level: within hosts, among hosts, back.

AllReduce   among all, or by levels of its own: to the host's first worker, among these, back
Push        reduce to the host's server, reduce-scatter among servers to the owners
Pull        all-gather among servers, broadcast in the host
ToServers   the host's first worker tells its server        ToWorkers   broadcast in the host
Shift       to the member behind, or before
Exchange    between any members of two meshes
rows        gathered on the host's server, exchanged among servers, scattered in the host
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from partc.passes.layouts.layouts import Reduction
from partc.passes.layouts.meshes import Meshes
from partc.passes.lowering.exchange import describe_exchange
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.bucket_communications import IN_PIECES, Bucket
from partc.passes.scheduling.schedule import Communication
from partc.runtime.plan.moves import shape_of
from partc.runtime.plan.program import Exchange, Kind, Rounding, Site, Start

CollectiveShape = tuple[Kind, str, Site, Site]  # of a collective: its kind, group, senders and receivers

ROWS: dict[str, CollectiveShape] = {
    "AllGatherRows": ("all_gather_rows", "workers", "worker", "worker"),
    "GatherRows": ("gather_rows", "host", "worker", "server"),
    "ScatterRows": ("scatter_rows", "host", "server", "worker"),
    "AllToAllRows": ("all_to_all_rows", "servers", "server", "server"),
    "ShareRows": ("all_gather_rows", "servers", "server", "server"),
    "SpreadRows": ("all_gather_rows", "host", "server", "worker"),
    "FeedRows": ("all_gather_rows", "feed", "worker", "server"),
    "RowsToStage": ("all_gather_rows", "", "", ""),  # the node tells between whom
}

SHIFTS: dict[str, CollectiveShape] = {
    "ShiftAhead": ("shift_ahead", "workers", "worker", "worker"),
    "ShiftBack": ("shift_back", "workers", "worker", "worker"),
}

BETWEEN_LEVELS: dict[str, tuple[CollectiveShape, ...]] = {
    "Push": (("reduce", "host", "worker", "server"), ("reduce_scatter", "servers", "server", "server")),
    "Pull": (("all_gather", "servers", "server", "server"), ("broadcast", "host", "server", "worker")),
    "ToServers": (("broadcast", "feed", "worker", "server"),),
    "ToWorkers": (("broadcast", "host", "server", "worker"),),
}


def name_way(source: Site, target: Site) -> str:
    """Return the name of the pairs of ranks at one place of two meshes: the first of a pair sends."""
    return f"{source}>{target}"


@dataclass(frozen=True, slots=True)
class HostGrid:
    """The two levels of a cluster.

    hosts           how many
    host_of         each worker's host
    goes_by_levels  whether a sum of so many bytes along axes of a mesh, rounded or not, goes level by level
    """

    hosts: int
    host_of: tuple[str, ...]
    goes_by_levels: Callable[[Site, tuple[int, ...], int, bool], bool]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a message: a Start that has no tag yet."""

    kind: Kind
    group: str
    senders: Site
    receivers: Site
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reduction: Reduction = "sum"
    counts: tuple[int, ...] = ()
    payload_bytes: int = 0
    label: str = ""
    exchange: Exchange | None = None
    rounds_to: Rounding = ""
    by_levels: bool = False

    def start(self, tag_id: int) -> Start:
        """Return what begins it."""
        return Start(
            tag_id,
            self.kind,
            self.group,
            self.senders,
            self.receivers,
            self.reads,
            self.writes,
            self.reduction,
            self.counts,
            self.payload_bytes,
            self.label,
            exchange=self.exchange,
            rounds_to=self.rounds_to,
            by_levels=self.by_levels,
        )


def levels_of(
    message: Communication, topology: HostGrid, lowered: LoweredGraph, microbatch: int = 0
) -> list[Collective]:
    """Return the collectives that carry out a message of a micro-batch, in order."""
    if message.bucket is not None:
        return _bucket_levels(message.bucket, topology, lowered.meshes)
    node = message.nodes[0]
    sizes = sum(lowered.nbytes.get(value, 0) for value in message.reads)
    if node.op == "AllReduce":
        group = _group(node.attrs["site"], node.attrs["axes"], lowered.meshes)
        site: Site = node.attrs["site"]
        reduction: Reduction = node.attrs["reduction"]
        return [
            Collective(
                "all_reduce",
                group,
                site,
                site,
                message.reads,
                message.writes,
                reduction,
                payload_bytes=sizes,
                label=_label(node.op, (message.reads[0],)),
            )
        ]
    if node.op == "Exchange":
        return [_exchange_level(message, topology, lowered, microbatch)]
    kind, group, senders, receivers = (ROWS | SHIFTS)[node.op]
    if "axes" in node.attrs:
        senders = receivers = node.attrs["site"]
        group = _group(senders, node.attrs["axes"], lowered.meshes)
    elif "to" in node.attrs:
        senders, receivers = node.attrs["site"], node.attrs["to"]
        group = name_way(senders, receivers)
    label = _label(node.op, (message.reads[0],))
    return [
        Collective(
            kind, group, senders, receivers, message.reads, message.writes, payload_bytes=sizes, label=label
        )
    ]


def _exchange_level(
    message: Communication, topology: HostGrid, lowered: LoweredGraph, microbatch: int
) -> Collective:
    (node,) = message.nodes
    exchange = describe_exchange(node, lowered.meshes, topology.host_of, microbatch)
    elements = sum(prod(shape_of(move.region)) for move in exchange.moves if move.source != move.target)
    senders, receivers = node.attrs["site"], node.attrs["to"]
    return Collective(
        "exchange",
        f"{senders}+{receivers}",
        senders,
        receivers,
        message.reads,
        message.writes,
        payload_bytes=elements * np.dtype(exchange.dtype).itemsize,
        label=_label(node.op, (message.reads[0],)),
        exchange=exchange,
    )


def _group(site: Site, axes: tuple[int, ...], meshes: Meshes) -> str:
    return "servers" if site == "server" else meshes.of(site).group(axes)


def _bucket_levels(bucket: Bucket, topology: HostGrid, meshes: Meshes) -> list[Collective]:
    by_levels = (
        bucket.op == "AllReduce"
        and bucket.site != "server"
        and topology.goes_by_levels(bucket.site, bucket.axes, bucket.nbytes, bool(bucket.rounds_to))
    )
    levels = [_bucket_level(bucket, *level) for level in _ways_of_bucket(bucket, meshes)]
    return [replace(level, by_levels=True) for level in levels] if by_levels else levels


def _ways_of_bucket(bucket: Bucket, meshes: Meshes) -> tuple[CollectiveShape, ...]:
    """Return the way of each collective that carries a bucket, in order."""
    if bucket.op in BETWEEN_LEVELS:
        return BETWEEN_LEVELS[bucket.op]
    site = bucket.site
    if bucket.op == "ToStage":
        (target,) = bucket.receivers
        return (("broadcast", name_way(site, target), site, target),)
    if bucket.op == "AllReduce" and site == "server":
        return (("all_reduce", "servers", site, site),)
    group = meshes.of(site).group(bucket.axes)
    if bucket.op in IN_PIECES:
        return (("reduce_scatter" if bucket.op == "ReduceScatter" else "all_gather", group, site, site),)
    assert bucket.op == "AllReduce", bucket.op
    return (("all_reduce", group, site, site),)


def _bucket_level(bucket: Bucket, kind: Kind, group: str, senders: Site, receivers: Site) -> Collective:
    adds = kind in ("reduce", "all_reduce", "reduce_scatter")
    is_rounded = bucket.rounds_to and kind in ("all_reduce", "reduce_scatter")
    rounds_to: Rounding = bucket.rounds_to if is_rounded else ""
    return Collective(
        kind,
        group,
        senders,
        receivers,
        reads=(bucket.name,),
        writes=(bucket.name,),
        reduction=bucket.reduction if adds else "sum",
        counts=bucket.counts if kind in ("reduce_scatter", "all_gather") else (),
        payload_bytes=bucket.elements * np.dtype(rounds_to or bucket.dtype).itemsize,
        label=_label(bucket.op, tuple(node.inputs[0].name for node in bucket.members)),
        rounds_to=rounds_to,
    )


def _label(op: str, values: tuple[str, ...]) -> str:
    names = values[0] if len(values) == 1 else f"{values[0]} and {len(values) - 1} more"
    return f"{op} {names}"
