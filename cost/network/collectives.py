"""What each kind of communication moves between its members, and how long that takes.

A collective is one or more *phases*, one after the other. A phase lasts its latency plus what its
busiest lane carries over that lane's rate, so all traffic of a host counts, in and out. Members
are ends of the cluster's network: devices, or hosts for servers with a process of their own.

    p members, m bytes, a latency of one message, b rate of the narrowest lane, l = ceil(log2 p)

    kind                 algorithm                    time on equal links
    broadcast            chain, or binomial tree      (p - 1) a + m / b     or   l (a + m / b)
    reduce               reduce_scatter and gather,   2 (p - 1) (a + m / (p b))
                         or binomial tree             or  l (a + m / b)
    all_reduce           ring, or recursive doubling  2 (p - 1) (a + m / (p b))  or  l (a + m / b)
    reduce_scatter,
    all_gather           pairwise exchange            (p - 1) (a + m / (p b))
    gather, scatter      direct                       (p - 1) (a + m / b)     m of each member
    all_gather_rows      ring                         (p - 1) (a + m / b)     m of each member
    all_to_all_rows      pairwise exchange            (p - 1) (a + m / (p b)) m of each member

Where two algorithms are named the quicker one counts, as MPI libraries choose by size.
Sources: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) 117-124, for the ring; Thakur,
Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19 (2005) 49-66, for the others.
Row kinds first tell each other their sizes: one more latency a step. Adding m bytes on a CPU moves
3 m through its host's memory (two reads, a write), and what a member gives to a sum is copied once; a GPU
adds in its own memory, at no cost here.
Ignored: protocol overhead, a pipeline's first chunk.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from partc.cost.network.topology import Flow, Lane, Network, Work

SUM_TRAFFIC = 3  # memory bytes per byte added
COPY_TRAFFIC = 2  # memory bytes per byte copied


@dataclass(frozen=True, slots=True)
class Phase:
    """Flows that run together, work beside them, and the latency of messages in sequence."""

    flows: tuple[Flow, ...]
    latency_s: float
    work: tuple[Work, ...] = ()


Phases = tuple[Phase, ...]


def seconds_of(network: Network, phases: Iterable[Phase]) -> float:
    """Return how long the phases take one after the other."""
    return sum(phase_s(network, phase) for phase in phases)


def phase_s(network: Network, phase: Phase) -> float:
    """Return how long one phase takes."""
    return phase.latency_s + network.busiest_s(network.loads(phase.flows, phase.work))


def flows_of(phases: Iterable[Phase]) -> tuple[Flow, ...]:
    """Return all flows of the phases."""
    return tuple(flow for phase in phases for flow in phase.flows)


def together(groups: Iterable[Phases]) -> Phases:
    """Overlay the collectives of several groups that run at the same time."""
    groups = [group for group in groups if group]
    if not groups:
        return ()
    steps = max(len(group) for group in groups)
    padded = [group + (Phase((), 0.0),) * (steps - len(group)) for group in groups]
    return tuple(
        Phase(
            flows=tuple(flow for phase in step for flow in phase.flows),
            latency_s=max(phase.latency_s for phase in step),
            work=tuple(work for phase in step for work in phase.work),
        )
        for step in zip(*padded, strict=True)
    )


def reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum at the first member: each sums a part and sends it there, or a binomial tree for short messages."""
    parts = [message_bytes / max(1, len(members))] * len(members)  # a host may have no worker
    sent = [[part if i and not j else 0.0 for j in range(len(members))] for i, part in enumerate(parts)]
    return _quicker(
        network,
        reduce_scatter(network, members, parts) + _phase(network, _pairs(members, sent), len(members) - 1),
        _hops(network, [(b, a) for a, b in _tree(members)], message_bytes, _log2(members), sums=True),
    )


def broadcast(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Send from the first member to all: a pipelined chain, or a binomial tree for short messages."""
    return _quicker(
        network,
        _hops(network, list(pairwise(members)), message_bytes),
        _hops(network, _tree(members), message_bytes, _log2(members)),
    )


def all_reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum everywhere, by the quicker of ring and recursive doubling."""
    return _quicker(
        network,
        ring_all_reduce(network, members, message_bytes),
        _doubling_all_reduce(network, members, message_bytes),
    )


def ring_all_reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum everywhere. Each hop of the ring carries 2 (p - 1) / p of the message."""
    p = len(members)
    summed = (p - 1) / p * message_bytes
    flows = _around(members, [2 * summed] * p)
    return _phase(network, flows, 2 * (p - 1), dict.fromkeys(members, summed), message_bytes)


def _doubling_all_reduce(network: Network, members: Sequence[str], message_bytes: float) -> Phases:
    """Sum everywhere: in step s, members whose positions differ in bit s exchange their sums."""
    steps = _log2(members)
    pairs = [
        (members[i], members[i ^ 1 << step])
        for step in range(steps)
        for i in range(len(members))
        if i ^ 1 << step < len(members)
    ]
    # A count that is no power of two needs one more exchange before, and one after.
    extra = 2 if 1 << steps != len(members) else 0
    flows = [Flow(*pair, message_bytes) for pair in pairs]
    summed = dict.fromkeys(members, steps * message_bytes)
    return _phase(network, flows, steps + extra, summed, message_bytes)


def reduce_scatter(network: Network, members: Sequence[str], regions: Sequence[float]) -> Phases:
    """Sum region i (bytes) at member i: every member sends it its part directly."""
    summed = {member: (len(members) - 1) * r for member, r in zip(members, regions, strict=True)}
    flows = _pairs(members, [regions] * len(members))
    return _phase(network, flows, len(members) - 1, summed, sum(regions))


def all_gather(network: Network, members: Sequence[str], regions: Sequence[float]) -> Phases:
    """Send region i (bytes) from member i to everybody directly."""
    parts = [[region] * len(members) for region in regions]
    return _phase(network, _pairs(members, parts), len(members) - 1)


def gather(network: Network, members: Sequence[str], parts: Sequence[float]) -> Phases:
    """Send part i (bytes) from member i to the first member. Sizes are exchanged first."""
    flows = [Flow(member, members[0], part) for member, part in zip(members, parts, strict=True)]
    return _phase(network, flows, 2 * (len(members) - 1))


def scatter(network: Network, members: Sequence[str], parts: Sequence[float]) -> Phases:
    """Send part i (bytes) from the first member to member i. Sizes are exchanged first."""
    flows = [Flow(members[0], member, part) for member, part in zip(members, parts, strict=True)]
    return _phase(network, flows, 2 * (len(members) - 1))


def ring_all_gather_rows(network: Network, members: Sequence[str], parts: Sequence[float]) -> Phases:
    """Give part i (bytes) of member i to everybody, around a ring. Sizes are exchanged first."""
    total = sum(parts)
    # The hop into a member carries all parts but that member's own.
    carried = [total - parts[(i + 1) % len(parts)] for i in range(len(parts))]
    return _phase(network, _around(members, carried), 2 * (len(members) - 1))


def all_to_all_rows(network: Network, members: Sequence[str], parts: Sequence[Sequence[float]]) -> Phases:
    """Send parts[i][j] (bytes) from member i to member j. Sizes are exchanged first."""
    return _phase(network, _pairs(members, parts), 2 * (len(members) - 1))


def total_loads(network: Network, phases: Iterable[Phase]) -> dict[Lane, float]:
    """Return what each lane carries over all phases."""
    phases = tuple(phases)
    return network.loads(flows_of(phases), [work for phase in phases for work in phase.work])


# ---------------------------------------------------------------- who sends to whom


def _pairs(members: Sequence[str], parts: Sequence[Sequence[float]]) -> list[Flow]:
    return [
        Flow(source, target, part)
        for source, row in zip(members, parts, strict=True)
        for target, part in zip(members, row, strict=True)
    ]


def _around(members: Sequence[str], carried: Sequence[float]) -> list[Flow]:
    followers = [*members[1:], members[0]]
    return [Flow(*ends) for ends in zip(members, followers, carried, strict=True)]


def _tree(members: Sequence[str]) -> list[tuple[str, str]]:
    """Return (parent, child) of a binomial tree: a child's position is its parent's plus one bit."""
    return [(members[i & i - 1], members[i]) for i in range(1, len(members))]


def _log2(members: Sequence[str]) -> int:
    return (len(members) - 1).bit_length()


# ---------------------------------------------------------------- phases


def _quicker(network: Network, one: Phases, other: Phases) -> Phases:
    return one if seconds_of(network, one) <= seconds_of(network, other) else other


def _hops(
    network: Network,
    hops: Sequence[tuple[str, str]],
    message_bytes: float,
    messages: int | None = None,
    *,
    sums: bool = False,
) -> Phases:
    summed = dict.fromkeys((end for hop in hops for end in hop), 0.0) if sums else {}
    for _, target in hops if sums else ():
        summed[target] += message_bytes
    flows = [Flow(*hop, message_bytes) for hop in hops]
    copied = message_bytes if sums else 0.0
    return _phase(network, flows, len(hops) if messages is None else messages, summed, copied)


def _phase(
    network: Network,
    flows: Iterable[Flow],
    messages: int,
    summed: Mapping[str, float] = MappingProxyType({}),
    copied: float = 0.0,
) -> Phases:
    """Make a phase of `messages` that follow one another, each as slow as the slowest route.

    summed: bytes that each member adds to its own; `copied`: bytes that each of them copies before.
    """
    moving = tuple(flow for flow in flows if flow.source != flow.target)
    if not moving:
        return ()
    latency_s = max(network.route(flow.source, flow.target).latency_s for flow in moving)
    work = tuple(Work(end, SUM_TRAFFIC * added + COPY_TRAFFIC * copied) for end, added in summed.items())
    return (Phase(tuple(flow for flow in moving if flow.bytes > 0), messages * latency_s, work),)
