"""What each kind of communication moves between its members, and how long that takes.

A collective is one or more *phases*, one after the other. A phase lasts its latency plus what its
busiest lane carries over that lane's rate, so all traffic of a host counts, in and out. Members
are ends of the cluster's network: devices, or hosts for servers with a process of their own.

    p members, m bytes, a latency of one message, b rate of the narrowest lane, l = ceil(log2 p)

    kind                 algorithm                    time on equal links
    broadcast            chain, or binomial tree      (p - 1) a + m / b     or   l (a + m / b)
    reduce               reduce_scatter and gather,   2 (p - 1) (a + m / (p b))
                         or binomial tree             or  l (a + m / b)
    all_reduce, long     exchange, then ring          2 (p - 1) (a + m / (p b))
    all_reduce, short    ring, or recursive doubling  2 (p - 1) (a + m / (p b))  or  l (a + m / b)
    reduce_scatter       pairwise exchange            (p - 1) (a + m / (p b))
    all_gather           ring; short: exchange        (p - 1) (a + m / (p b))
    shift                to one neighbour             a + m / b
    exchange             direct                       a + m / b    for each message of the busiest member
    gather, scatter      direct                       (p - 1) (a + m / b)     m of each member
    all_gather_rows      doubling, or Bruck et al.    l a + (p - 1) m / b     m of each member
    all_gather_rows,     ring                         (p - 1) (a + m / b)     m of each member
    long
    all_to_all_rows      pairwise exchange            (p - 1) (a + m / (p b)) m of each member

Where two algorithms are named the quicker one counts, as MPI libraries choose by size; rows go as MPICH sends
them (docs/decisions/100). A long sum is what the runtime makes in two collectives; a short one MPICH makes
within hosts, among their first members, and back, where hosts have several (docs/decisions/077).
Sources: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) 117-124, for the ring; Thakur,
Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005) 49-66, for the others; Bruck et al.,
IEEE Trans. Parallel Distrib. Syst. 8 (1997) 1143-1156.
Row kinds first tell each other their sizes: one more latency a step, l where all tell all. Adding m bytes on
a CPU moves 3 m through its host's memory (two reads, a write), and what a member gives to a sum is copied
once; a GPU adds in its own memory, at no cost here.
Ignored: protocol overhead, a pipeline's first chunk.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from partc.cost.network.families import families_by_host, in_every, overlaid
from partc.cost.network.topology import Network, Pairs, Pattern
from partc.cost.network.traffic import (
    AllToAllTraffic,
    MemoryTraffic,
    MessageTraffic,
    Phase,
    Phases,
    numbers_of,
    seconds_of,
)
from partc.cost.network.ways import Array
from partc.runtime.transports.communication import LONG_SUM_BYTES

AllReduce = Callable[[Network, Sequence[str], float], Phases]  # of a value of so many bytes

SUM_TRAFFIC = 3  # memory bytes per byte added
COPY_TRAFFIC = 2  # memory bytes per byte copied

# From so many bytes of all members together MPICH's Iallgatherv goes around a ring; the second where members
# are no power of two.
LONG_ROWS_BYTES, LONG_ODD_ROWS_BYTES = 512 << 10, 80 << 10


def reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum at the first member: each sums a part and sends it there, or a binomial tree for short messages."""
    p = len(members)
    if p < 2:
        return ()
    part = message_bytes / p
    parts_to_first = _direct(network, _to_first, members, np.full(p - 1, part), p - 1)
    received = _children(p) * message_bytes
    tree = _direct(network, _up_a_tree, members, np.full(p - 1, message_bytes), _log2(p))
    return _quicker(
        network,
        reduce_scatter(network, members, [part] * p) + parts_to_first,
        _with_work(network, tree, members, SUM_TRAFFIC * received + COPY_TRAFFIC * message_bytes),
    )


def broadcast(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Send from the first member to all: a pipelined chain, or a binomial tree for short messages."""
    p = len(members)
    if p < 2:
        return ()
    sent = np.full(p - 1, message_bytes)
    return _quicker(
        network,
        _direct(network, _chain, members, sent, p - 1),
        _direct(network, _tree, members, sent, _log2(p)),
    )


def all_reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum everywhere, in one communication of all members."""
    if message_bytes >= LONG_SUM_BYTES and len(members) > 2:
        return long_all_reduce(network, members, message_bytes)
    if has_levels(network, members):
        return all_reduce_by_levels(network, members, message_bytes)
    return _quicker(
        network,
        ring_all_reduce(network, members, message_bytes),
        doubling_all_reduce(network, members, message_bytes),
    )


def has_levels(network: Network, members: Sequence[str]) -> bool:
    """Tell whether members are on several hosts, and several of them on one."""
    return 1 < len(network.by_host(tuple(members))) < len(members)


def all_reduce_by_levels(
    network: Network, members: Sequence[str], message_bytes: float, way: AllReduce = all_reduce
) -> Phases:
    """Sum at the first member on each host, among these in some way, and hand the sum on within hosts."""
    here = network.by_host(tuple(members))
    families = families_by_host(network, members)
    return (
        in_every(network, families, lambda m: reduce(network, m, message_bytes))
        + way(network, [first for first, *_ in here], message_bytes)
        + in_every(network, families, lambda m: broadcast(network, m, message_bytes))
    )


def long_all_reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum everywhere: each sums a part that all send it directly, and parts go around a ring.

    Chunks overlap, so that what both send is one phase.
    """
    p = len(members)
    if p < 2:
        return ()
    summed = (p - 1) / p * message_bytes
    (ring,) = _direct(network, _ring, members, np.full(p, summed), p - 1)
    (exchanged,) = _exchange(network, members, np.ones(p), np.full(p, message_bytes / p), p - 1)
    both = (Phase((*exchanged.flows, *ring.flows), exchanged.latency_s + ring.latency_s),)
    return _with_work(network, both, members, SUM_TRAFFIC * summed + COPY_TRAFFIC * message_bytes)


def rounded_all_reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum float32 everywhere, of which 16 bits are sent, in two collectives however short."""
    return long_all_reduce(network, members, message_bytes / 2)


def ring_all_reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum everywhere. Each hop of the ring carries 2 (p - 1) / p of the message."""
    p = len(members)
    if p < 2:
        return ()
    summed = (p - 1) / p * message_bytes
    ring = _direct(network, _ring, members, np.full(p, 2 * summed), 2 * (p - 1))
    return _with_work(network, ring, members, SUM_TRAFFIC * summed + COPY_TRAFFIC * message_bytes)


def doubling_all_reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum everywhere: in step s, members whose positions differ in bit s exchange their sums."""
    p = len(members)
    if p < 2:
        return ()
    steps = _log2(p)
    hops = network.hops(_doubling, tuple(members))
    # A count that is no power of two needs one more exchange before, and one after.
    extra = 2 if 1 << steps != p else 0
    moved = MessageTraffic(hops, np.full(len(hops.sources), message_bytes))
    doubled = (Phase((moved,), (steps + extra) * hops.latency_s),)
    return _with_work(network, doubled, members, (SUM_TRAFFIC * steps + COPY_TRAFFIC) * message_bytes)


def reduce_scatter(network: Network, members: Sequence[str], regions: Sequence[float]) -> Phases:
    """Sum region i (bytes) at member i: every member sends it its part directly.

    Where all hosts have as many members, and several, long values are summed within hosts first: the regions
    of those at one place on all hosts at the one there. Then these scatter them.
    """
    here = network.by_host(tuple(members))
    is_even = has_levels(network, members) and len({len(ends) for ends in here}) == 1
    if sum(regions) < LONG_SUM_BYTES or not is_even:
        return direct_reduce_scatter(network, members, regions)
    region_of = dict(zip(members, regions, strict=True))
    places = list(zip(*here, strict=True))
    sizes = [[region_of[member] for member in place] for place in places]
    of_places = [sum(own) for own in sizes]
    within = in_every(
        network, families_by_host(network, members), lambda m: direct_reduce_scatter(network, m, of_places)
    )
    return within + overlaid(
        [direct_reduce_scatter(network, place, own) for place, own in zip(places, sizes, strict=True)]
    )


def direct_reduce_scatter(network: Network, members: Sequence[str], regions: Sequence[float]) -> Phases:
    """Sum region i (bytes) at member i, in one collective of all."""
    p = len(members)
    taken = np.array(regions)
    exchanged = _exchange(network, members, np.ones(p), taken, p - 1)
    return _with_work(network, exchanged, members, SUM_TRAFFIC * (p - 1) * taken + COPY_TRAFFIC * taken.sum())


def all_gather(network: Network, members: Sequence[str], regions: Sequence[float]) -> Phases:
    """Send region i (bytes) from member i to everybody: around a ring.

    Directly if all are short, or if a member has none, which would pass on those of others.
    """
    if sum(regions) >= LONG_SUM_BYTES and all(regions):
        return _around(network, members, np.array(regions), len(members) - 1)
    return _exchange(network, members, np.array(regions), np.ones(len(members)), len(members) - 1)


def shift(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Send a message from every member to the one behind it, all at once."""
    if len(members) < 2:
        return ()
    return _direct(network, _chain, members, np.full(len(members) - 1, message_bytes), 1)


def exchange(network: Network, members: Sequence[str], sent: Mapping[tuple[int, int], float]) -> Phases:
    """Send bytes from member to member, (source, target) -> bytes, all at once."""
    if not sent:
        return ()
    hops = network.hops_between([(members[source], members[target]) for source, target in sent])
    busiest = max((Counter(source for source, _ in sent) | Counter(target for _, target in sent)).values())
    return (Phase((MessageTraffic(hops, np.array([*sent.values()], float)),), busiest * hops.latency_s),)


def gather(network: Network, members: Sequence[str], parts: Sequence[float]) -> Phases:
    """Send part i (bytes) from member i to the first member. Sizes are exchanged first."""
    return _direct(network, _to_first, members, np.array(parts[1:]), 2 * (len(members) - 1))


def scatter(network: Network, members: Sequence[str], parts: Sequence[float]) -> Phases:
    """Send part i (bytes) from the first member to member i. Sizes are exchanged first."""
    return _direct(network, _from_first, members, np.array(parts[1:]), 2 * (len(members) - 1))


def all_gather_rows(network: Network, members: Sequence[str], parts: Sequence[float]) -> Phases:
    """Give part i (bytes) of member i to everybody. Sizes are exchanged first.

    Around a ring, or in steps after which each has the parts of twice as many.
    """
    p, own = len(members), np.array(parts)
    if p < 2:
        return ()
    is_power_of_two = p & p - 1 == 0
    if own.sum() >= (LONG_ROWS_BYTES if is_power_of_two else LONG_ODD_ROWS_BYTES):
        return _around(network, members, own, p - 1 + _log2(p))
    pattern, sent = (_doubling, _doubled(own)) if is_power_of_two else (_bruck, _gathered_behind(own))
    return _direct(network, pattern, members, sent, 2 * _log2(p))


def all_to_all_rows(
    network: Network, members: Sequence[str], sent: Sequence[float], shares: Sequence[float]
) -> Phases:
    """Send sent[i] * shares[j] bytes from member i to member j. Sizes are exchanged first."""
    return _exchange(network, members, np.array(sent), np.array(shares), 2 * (len(members) - 1))


# ---------------------------------------------------------------- who sends to whom


def _ring(members: Sequence[str]) -> Pairs:
    return list(zip(members, [*members[1:], members[0]], strict=True))


def _chain(members: Sequence[str]) -> Pairs:
    return list(pairwise(members))


def _to_first(members: Sequence[str]) -> Pairs:
    return [(member, members[0]) for member in members[1:]]


def _from_first(members: Sequence[str]) -> Pairs:
    return [(members[0], member) for member in members[1:]]


def _tree(members: Sequence[str]) -> Pairs:
    """Return (parent, child) of a binomial tree: a child's position is its parent's plus one bit."""
    return [(members[i & i - 1], members[i]) for i in range(1, len(members))]


def _up_a_tree(members: Sequence[str]) -> Pairs:
    return [(child, parent) for parent, child in _tree(members)]


def _children(members: int) -> Array:
    """Return how many children each member has in a binomial tree, float64[members]."""
    parents = [i & i - 1 for i in range(1, members)]
    return np.bincount(parents, minlength=members).astype(np.float64)


def _doubling(members: Sequence[str]) -> Pairs:
    p = len(members)
    return [
        (members[i], members[i ^ 1 << step])
        for step in range(_log2(p))
        for i in range(p)
        if i ^ 1 << step < p
    ]


def _doubled(parts: Array) -> Array:
    """Return what a power of two of members send in `_doubling`: step by step, all that they have."""
    p = len(parts)
    have = [parts.reshape(-1, 1 << step).sum(axis=1) for step in range(_log2(p))]
    return np.concatenate([np.repeat(known, p // len(known)) for known in have])


def _bruck(members: Sequence[str]) -> Pairs:
    """Return who sends to whom where parts are gathered from behind, 2 ** step places at a time."""
    p = len(members)
    return [(members[i], members[i - (1 << step)]) for step in range(_log2(p)) for i in range(p)]


def _gathered_behind(parts: Array) -> Array:
    """Return what members send in `_bruck`: their own parts, and of those behind what the others lack."""
    p = len(parts)
    around = np.concatenate([[0.0], np.cumsum(np.concatenate([parts, parts]))])
    has = [min(1 << step, p - (1 << step)) for step in range(_log2(p))]
    return np.concatenate([around[count : count + p] - around[:p] for count in has])


def _log2(members: int) -> int:
    return (members - 1).bit_length()


# ---------------------------------------------------------------- phases


def _quicker(network: Network, one: Phases, other: Phases) -> Phases:
    return one if seconds_of(network, one) <= seconds_of(network, other) else other


def _direct(network: Network, pattern: Pattern, members: Sequence[str], sent: Array, messages: int) -> Phases:
    """Make a phase of bytes `sent`, one a pair of the pattern; `messages` follow one another."""
    if len(members) < 2:
        return ()
    hops = network.hops(pattern, tuple(members))
    return (Phase((MessageTraffic(hops, sent),), messages * hops.latency_s),)


def _around(network: Network, members: Sequence[str], parts: Array, messages: int) -> Phases:
    # The hop into a member carries all parts but that member's own.
    return _direct(network, _ring, members, parts.sum() - np.roll(parts, -1), messages)


def _exchange(network: Network, members: Sequence[str], sent: Array, taken: Array, messages: int) -> Phases:
    if len(members) < 2:
        return ()
    flows = AllToAllTraffic(numbers_of(network, members), sent, taken)
    return (Phase((flows,), messages * network.farthest_s(tuple(members))),)


def _with_work(
    network: Network, phases: Phases, members: Sequence[str], touched_bytes: Array | float
) -> Phases:
    """Add memory traffic of each member, float64[members] or the same for all, to a single phase."""
    if not phases:
        return ()
    (phase,) = phases
    ends = numbers_of(network, members)
    work = MemoryTraffic(ends, np.broadcast_to(np.asarray(touched_bytes, np.float64), ends.shape))
    return (Phase((*phase.flows, work), phase.latency_s),)
