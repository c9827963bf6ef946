"""Order a distributed step: what its ranks do, segment by segment and message by message.

What is ordered has nodes that were not lowered, such as pieces of what a bucket brings: the order and the
graph go together, and a step that was priced is written as it was ordered.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from partc.compiler.planning.describe_ranks import OwnedRows
from partc.compiler.planning.price_items import ItemSeconds, first_worker
from partc.compiler.planning.price_messages import MessagePrices
from partc.cost.cluster.cluster import Cluster, SessionView, ranks_of
from partc.cost.simulation.roofline import node_s
from partc.cost.strategy import Strategy
from partc.passes.analysis import Analysis
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.microbatches.cut_behind_messages import cut_behind_messages
from partc.passes.microbatches.find_repeated import Repeated, find_repeated
from partc.passes.microbatches.join_microbatches import join_microbatches
from partc.passes.microbatches.take_turns import Turn, take_turns
from partc.passes.scheduling.bucket_communications import (
    BUCKET_BYTES,
    BUCKET_S,
    LEAST_BUCKET_BYTES,
    Bucket,
    bucket_communications,
    whole_shapes,
)
from partc.passes.scheduling.cut_at_arrivals import cut_at_arrivals
from partc.passes.scheduling.divide_pieces import BucketPiece, divide_pieces
from partc.passes.scheduling.fill_gaps import fill_gaps
from partc.passes.scheduling.join_sums import join_sums
from partc.passes.scheduling.order_by_time import (
    TimesOf,
    Workers,
    lead_first,
    order_by_time,
    orders_differ,
    ready_slots,
    simulate_items,
)
from partc.passes.scheduling.place_gathers import gather_again, place_gathers
from partc.passes.scheduling.recompute import Cutter, Recomputation
from partc.passes.scheduling.resources import Resources, Seconds, Time, step_s
from partc.passes.scheduling.schedule import Chunk, Item, schedule
from partc.passes.scheduling.sums_first import sums_first
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.runtime.plan.program import Recomputed

LEAST_GAIN = 0.99  # of the seconds of the order of the graph: else that is kept


@dataclass(frozen=True)
class OrderedStep:
    """A distributed step, and the order of what ranks do.

    repeated    what there is of every micro-batch
    late        buckets that are gathered when they are read
    recomputed  what is computed again, where memory is limited
    fewer       turns that keep less at once, where there are such: with no more micro-batches under way than
                1F1B has, or in the order of the graph
    """

    lowered: LoweredGraph
    turns: Sequence[Turn]
    repeated: Repeated
    late: Collection[str]
    recomputed: Recomputed | None
    fewer: Sequence[Turn] | None = None


def order_step(
    analysis: Analysis, lowered: LoweredGraph, strategy: Strategy, cluster: Cluster
) -> OrderedStep:
    """Schedule and bucket a step. Adds nodes to the lowered graph."""
    rows = owned_rows(strategy, cluster)
    is_limited = strategy.recompute_bytes is not None
    if is_limited and lowered.meshes.microbatches == 1:  # else what both ways read is read all the time
        gather_again(lowered, {node.name for node in forward_nodes(analysis.training, analysis.main)})
    message_s = MessagePrices(lowered, cluster)
    seconds = ItemSeconds(lowered, cluster, message_s)
    segment_s = seconds.whole
    orders, repeated = _in_order(analysis, lowered, rows, cluster, message_s, seconds.within, is_limited)
    overwrites = [(state.value, state.next) for state in lowered.states]

    def in_turns(items: Sequence[Item]) -> tuple[list[Turn], list[Turn], set[str]]:
        placed, gathered = place_gathers(items, lowered, are_late=is_limited)
        cut = cut_behind_messages(placed, lowered, segment_s)
        orders = [placed] if len(cut) == len(placed) else [placed, cut]
        joined = [join_microbatches(order, lowered, repeated) for order in orders]
        taken = [take_turns(each, repeated, overwrites, lowered.meshes.sites, segment_s) for each in joined]
        quickest = min((each[-1] for each in taken), key=lambda one: one.length_s)
        return taken[0][0].turns, quickest.turns, gathered

    fewer, quickest, gathered = in_turns(orders[0])
    if len(orders) > 1 and not is_limited:  # what is computed sooner may be kept longer
        fewer = in_turns(orders[1])[0]
    turns, recomputed = fewer if is_limited else quickest, None
    if strategy.recompute_bytes is not None:
        limit_bytes = strategy.recompute_bytes
        search = _recomputation(analysis, lowered, repeated, limit_bytes, cluster)
        before_bytes = search.most_bytes(turns)
        if before_bytes > limit_bytes:
            cutter = Cutter(lowered, search.sizes, before_bytes)
            if repeated.count == 1:
                turns, _, gathered = in_turns([piece for item in orders[0] for piece in cutter.cut(item)])
            else:
                turns = [Turn(piece, turn.microbatch) for turn in turns for piece in cutter.cut(turn.item)]
            search.fit(turns)
            repeated = search.repeated
        after_bytes = search.most_bytes(turns)
        recomputed = Recomputed(limit_bytes, before_bytes, after_bytes, len(search.nodes), search.flops)
    late = gathered if is_limited else ()
    has_fewer = not is_limited and _differ(turns, fewer)
    return OrderedStep(lowered, turns, repeated, late, recomputed, fewer if has_fewer else None)


def _differ(turns: Sequence[Turn], others: Sequence[Turn]) -> bool:
    return len(turns) != len(others) or any(
        turn.item is not other.item or turn.microbatch != other.microbatch
        for turn, other in zip(turns, others, strict=True)
    )


def owned_rows(strategy: Strategy, cluster: Cluster) -> OwnedRows:
    """Return for each parameter on servers the rows that each host's server owns."""
    hosts = [host.name for host in cluster.hosts]
    result: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, choice in strategy.parameters.items():
        if choice.method != "servers":
            continue
        at = {shard.host: (shard.start, shard.stop) for shard in choice.shards}
        ranges: list[tuple[int, int]] = []
        end = 0
        for host in hosts:
            start, stop = at.get(host, (end, end))
            ranges.append((start, stop))
            end = stop
        result[name] = tuple(ranges)
    return result


def _in_order(
    analysis: Analysis,
    lowered: LoweredGraph,
    rows: OwnedRows,
    cluster: Cluster,
    message_s: MessagePrices,
    seconds: Callable[[Item], float],
    is_limited: bool,
) -> tuple[Sequence[list[Item]], Repeated]:
    """Bucket the communications and order what ranks do: by the graph, or otherwise where that is quicker.

    Returns the quickest order, and that of the graph if it is another; and what there is of every
    micro-batch, once pieces are divided.
    """
    order = {node.name: index for index, node in enumerate(analysis.training.graph.nodes)}
    position_of = {copy: order[node] for copy, node in lowered.original.items()}
    in_buckets = partial(
        bucket_communications,
        whole_shapes=whole_shapes(analysis.facts, lowered),
        owned_rows=rows,
        limit_bytes=bucket_bytes(cluster, _hosts_of(lowered, cluster)),
    )
    join_sums(lowered, in_buckets, position_of, message_s)
    # What a session pushes is whole before any of it is applied: that order is its own.
    has_times = orders_differ(lowered) and not isinstance(cluster, SessionView)
    crosses = has_times and len(lowered.meshes.each) > 1
    slots = ready_slots(lowered, position_of, seconds) if crosses else {}
    to_sums = partial(
        sums_first,
        node_s=lambda node: seconds(Chunk(lowered.site_of[node.name], [node])),
        tail_s=message_s.handed_on_s,
    )
    moves_sums = not is_limited and _moves_sums(lowered)
    sooner = [to_sums(lowered, position_of)] if moves_sums else []
    buckets = [in_buckets(lowered, places=places) for places in (None, *sooner)]
    timed = in_buckets(lowered, slots=slots) if has_times else {}
    if of_pieces := divide_pieces(lowered, _divided_pieces(buckets[0]), position_of):
        position_of |= of_pieces
        sooner = [to_sums(lowered, position_of) for _ in sooner]
    repeated = find_repeated(lowered)
    places = [position_of, *sooner]
    orders = [schedule(lowered, *each, repeated) for each in zip(buckets, places, strict=True)]
    if has_times:
        leading = lead_first(lowered, position_of)
        schedules = _schedules(lowered, seconds, message_s, cluster, is_limited)
        orders += [order_by_time(lowered, timed, leading, times_of) for times_of in schedules]
    segment_s = ItemSeconds(lowered, cluster, message_s).whole
    quickest = _quickest(orders, lowered, cluster, message_s, segment_s)
    if repeated.count > 1 or is_limited:
        return quickest, repeated
    divided = cut_at_arrivals(quickest[0], lowered, seconds)
    best, *whole = _quickest([quickest[0], divided], lowered, cluster, message_s, segment_s)
    return [best, *(quickest[1:] or whole)], repeated


def _moves_sums(lowered: LoweredGraph) -> bool:
    """Tell whether nodes may have an order in which sums begin sooner: that of micro-batches is their own."""
    return any(map(is_communication, lowered.nodes)) and find_repeated(lowered).count == 1


def _quickest(
    orders: Sequence[list[Item]],
    lowered: LoweredGraph,
    cluster: Cluster,
    message_s: MessagePrices,
    segment_s: Seconds,
) -> Sequence[list[Item]]:
    """Return the quickest order and the first; the first alone, if no other saves a hundredth."""
    orders = list({tuple(tuple(map(id, item.nodes)) for item in order): order for order in orders}.values())
    if len(orders) == 1:
        return orders
    taken_s = _played(orders, lowered, cluster, message_s, segment_s)
    quickest = min(range(len(orders)), key=taken_s.__getitem__)
    is_worth_it = taken_s[quickest] < LEAST_GAIN * taken_s[0]
    return [orders[quickest], orders[0]] if is_worth_it else orders[:1]


def _played(
    orders: Sequence[Sequence[Item]],
    lowered: LoweredGraph,
    cluster: Cluster,
    message_s: MessagePrices,
    segment_s: Seconds,
) -> list[float]:
    """Return the seconds of a step in each order, about as its plan is simulated."""
    resources = _resources(lowered, chain.from_iterable(orders), segment_s, message_s, cluster)
    return [step_s(order, resources) for order in orders]


def _schedules(
    lowered: LoweredGraph, seconds: Seconds, message_s: MessagePrices, cluster: Cluster, is_limited: bool
) -> list[TimesOf]:
    """Return the schedules that are tried: where memory is limited, the one that keeps to the graph."""

    def in_turn(items: Sequence[Item]) -> Sequence[Time]:
        return simulate_items(items, Workers(lowered, _servers(cluster)), seconds)

    def by_rank(items: Sequence[Item]) -> Sequence[Time]:
        return fill_gaps(items, _resources(lowered, items, seconds, message_s, cluster))

    return [in_turn] if is_limited else [in_turn, by_rank]


def _resources(
    lowered: LoweredGraph,
    items: Iterable[Item],
    seconds: Seconds,
    message_s: MessagePrices,
    cluster: Cluster,
) -> Resources:
    return Resources(lowered, items, seconds, message_s.levels, _servers(cluster))


def _servers(cluster: Cluster) -> tuple[int, ...]:
    """Return the workers whose processes servers share, -1 for servers that have their own."""
    servers = [rank for rank in ranks_of(cluster) if "server" in rank.sites]
    return tuple(-1 if server.replica is None else server.replica for server in servers)


def bucket_bytes(cluster: Cluster, hosts: Collection[str] | None = None) -> int:
    """Return how large buckets may be: on slow links less, so that one is sent while the next is made.

    `hosts`: those that exchange anything; None: all.
    """
    if len(ranks_of(cluster)) == 1:  # it sends nothing: one bucket, so that its step is not cut
        return sys.maxsize
    idle = {host.name for host in cluster.hosts if hosts is not None and host.name not in hosts}
    reached = [link for link in cluster.links if idle.isdisjoint(link.ends)]
    if not reached or (hosts is not None and len(hosts) == 1):
        return BUCKET_BYTES
    slowest = min(link.bytes_per_s for link in reached)
    return int(min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, BUCKET_S * slowest)))


def _hosts_of(lowered: LoweredGraph, cluster: Cluster) -> set[str]:
    """Return the hosts whose ranks have a part in a step: all, where rows are on servers."""
    ranks = ranks_of(cluster)
    if "server" in lowered.site_of.values():
        return {rank.host for rank in ranks}
    return {ranks[worker].host for mesh in lowered.meshes.each for worker in mesh.workers}


def _divided_pieces(buckets: Mapping[str, Bucket]) -> dict[str, Sequence[BucketPiece]]:
    """Return communication -> its member's pieces, where segments read or write these."""
    return {
        node.name: pieces
        for bucket in buckets.values()
        if bucket.is_divided
        for node, pieces in zip(bucket.members, bucket.pieces, strict=True)
    }


def _recomputation(
    analysis: Analysis, lowered: LoweredGraph, repeated: Repeated, limit_bytes: int, cluster: Cluster
) -> Recomputation:
    return Recomputation(lowered, repeated, analysis.main, limit_bytes, _node_seconds(cluster))


def _node_seconds(cluster: Cluster) -> Callable[[int, int], float]:
    """Return what tells the seconds of a node on the first worker by its FLOP and the bytes it touches."""
    return partial(node_s, rank=first_worker(cluster), cluster=cluster)
