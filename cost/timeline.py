"""Play a plan on a cluster: when every rank computes, when it communicates.

    rank 0  compute        [ run ]──────[ run ]      a Start is issued and does not stop the rank
            communication      [ sum ]               it begins when all members have issued it, their
    rank 1  compute        [  run  ]────[ run ]      communication lanes are free, and its links are
            communication      [ sum ]               a Wait stops the rank until it is complete

Ranks meet their communications in the plan's one order, so one pass over the instructions plays
them all: first issued, first served. A Run lasts the greater of arithmetic and memory time
(roofline: Williams, Waterman and Patterson, CACM 52 (2009) 65-76), or what its segment was measured to take.
A communication takes a little of each member's own time; what one server alone gives its host is copied.
Where a host has fewer cores than its ranks have threads, each computes in proportion longer. Left out:
ranks that compete for caches; Store, which copies what is in the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from partc.cost.cluster import Cluster, Host, Placement
from partc.cost.network import collectives
from partc.cost.network.collectives import COPY_TRAFFIC, Phases, flows_of, seconds_of, total_loads
from partc.cost.network.topology import Lane, Network, memory_of
from partc.cost.profiles import CROWDED_WAIT_S, PER_COMMUNICATION_S, PER_ROWS_S, PROFILES
from partc.runtime.program import Plan, Rank, Run, Start, Wait
from partc.runtime.transports.communication import ROW_KINDS


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of the picture. `payload_bytes` is what the rank contributes; 0 for computing."""

    rank: int
    lane: Literal["compute", "communication"]
    label: str
    start_s: float
    stop_s: float
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step's events in the order in which they were issued, and every rank's bytes on the wire."""

    events: tuple[Event, ...]
    step_s: float
    sent_bytes: dict[int, int]
    received_bytes: dict[int, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a plan on this machine.

    segments  seconds of one run, alone on its device
    beside_s  of a rank's step: drawing its batch
    """

    segments: Mapping[str, float] = field(default_factory=dict)
    beside_s: float = 0.0


NOTHING_MEASURED = Measured()


def simulate(plan: Plan, cluster: Cluster, measured: Measured = NOTHING_MEASURED) -> Timeline:
    """Return the predicted timeline of one step. Segments that are not `measured` are priced."""
    play = _Play(plan, cluster, measured)
    for instruction in plan.instructions:
        if isinstance(instruction, Run):
            play.run(instruction)
        elif isinstance(instruction, Start):
            play.start(instruction)
        elif isinstance(instruction, Wait):
            play.wait(instruction)
    return play.timeline()


class _Play:
    """The clocks of ranks and links while a plan is played."""

    def __init__(self, plan: Plan, cluster: Cluster, measured: Measured) -> None:
        self.plan = plan
        self.measured = measured
        self.crowding = {host.name: _crowding(host, plan) for host in cluster.hosts}
        self.network = Network(cluster)
        self.cluster = cluster
        self.ranks = {rank.rank: rank for rank in plan.ranks}
        self.clock = {  # until when the rank computes or waits
            rank.rank: measured.beside_s * self._stretch(rank) for rank in plan.ranks
        }
        self.busy = dict.fromkeys(self.ranks, 0.0)  # until when it communicates
        self.lanes: dict[Lane, float] = {}  # until when a lane is occupied
        self.done: dict[tuple[int, int], float] = {}  # (tag, rank) -> when
        self.events: list[Event] = []
        self.sent = dict.fromkeys(self.ranks, 0.0)
        self.received = dict.fromkeys(self.ranks, 0.0)

    def run(self, run: Run) -> None:
        for rank in self.plan.ranks:
            if run.site in rank.sites:
                begin = self.clock[rank.rank]
                self.clock[rank.rank] = begin + self._seconds_of(run, rank)
                label = f"{run.site} {PurePosixPath(run.segment).stem[:8]}"
                self.events.append(Event(rank.rank, "compute", label, begin, self.clock[rank.rank], 0))

    def _seconds_of(self, run: Run, rank: Rank) -> float:
        alone_s = self.measured.segments.get(run.segment, 0.0) or run_s(run, rank, self.cluster)
        return alone_s * self._stretch(rank)

    def _stretch(self, rank: Rank) -> float:
        return self.crowding[rank.host] if rank.kind == "cpu" else 1.0

    def start(self, start: Start) -> None:
        groups = [rank.groups[start.group] for rank in self.plan.ranks if start.group in rank.groups]
        for members in dict.fromkeys(groups):
            for member in members:
                self.clock[member] += self._own_s(start, members) * self._stretch(self.ranks[member])
            self._communicate(start, members)

    def _own_s(self, start: Start, members: tuple[int, ...]) -> float:
        """Return what a member does itself to begin and end a communication."""
        if start.kind in ROW_KINDS:
            return PER_ROWS_S if len(members) > 1 else PER_COMMUNICATION_S
        if len(members) > 1 or start.kind != "all_gather":
            return PER_COMMUNICATION_S
        memory = self.network.bytes_per_s[memory_of(self.ranks[members[0]].host)]
        return PER_COMMUNICATION_S + COPY_TRAFFIC * start.payload_bytes / memory

    def _communicate(self, start: Start, members: tuple[int, ...]) -> None:
        phases = phases_of(start, [self.ranks[member] for member in members], self.network)
        loads = total_loads(self.network, phases)
        ready = max(max(self.clock[member], self.busy[member]) for member in members)
        begin = max([ready, *(self.lanes.get(lane, 0.0) for lane in loads)])
        # Who shares a core moves messages as seldom as it computes, and is not always awake when they come.
        stretch = max(self._stretch(self.ranks[member]) for member in members)
        woken_s = (stretch - 1) * CROWDED_WAIT_S if len(members) > 1 else 0.0
        stop = begin + stretch * seconds_of(self.network, phases) + woken_s
        for lane, carried in loads.items():
            self.lanes[lane] = begin + carried / self.network.bytes_per_s[lane]
        for member in members:
            self.busy[member] = self.done[start.tag_id, member] = stop
            payload = start.payload_bytes if start.senders in self.ranks[member].sites else 0
            label = start.label or start.kind
            self.events.append(Event(member, "communication", label, begin, stop, payload))
        self._count_bytes(phases, members)

    def _count_bytes(self, phases: Phases, members: tuple[int, ...]) -> None:
        rank_at = {self.ranks[member].device: member for member in members}
        for flow in flows_of(phases):
            self.sent[rank_at[flow.source]] += flow.bytes
            self.received[rank_at[flow.target]] += flow.bytes

    def wait(self, wait: Wait) -> None:
        for rank in self.clock:
            self.clock[rank] = max(self.clock[rank], self.done.get((wait.tag_id, rank), 0.0))

    def timeline(self) -> Timeline:
        return Timeline(
            events=tuple(self.events),
            step_s=max(max(self.clock.values()), max(self.busy.values())),
            sent_bytes={rank: round(carried) for rank, carried in self.sent.items()},
            received_bytes={rank: round(carried) for rank, carried in self.received.items()},
        )


def _crowding(host: Host, plan: Plan) -> float:
    """Return how many threads of CPU ranks there are per core, at least 1."""
    threads = sum(rank.threads for rank in plan.ranks if rank.host == host.name and rank.kind == "cpu")
    return 1.0 if host.cores is None else max(1.0, threads / host.cores)


def run_s(run: Run, rank: Rank, cluster: Cluster) -> float:
    """Return how long a segment takes on a rank's device."""
    return work_s(run.flops, run.touched_bytes, rank, cluster, run.one_thread)


def work_s(
    flops: int, touched_bytes: int, rank: Rank | Placement, cluster: Cluster, one_thread: bool = False
) -> float:
    """Return how long work takes on a rank's device.

        t = o + max(F / f, B / b)

    F flops, B touched_bytes, o the cost of starting anything, f and b the device's rates: of its
    threads together for a CPU, whose b its host's memory also limits.
    """
    host = next(host for host in cluster.hosts if host.name == rank.host)
    device = next((device for device in host.devices if device.name == rank.device), None)
    profile = PROFILES[device.profile if device else "cpu-core"]
    threads = (1 if one_thread else rank.threads) if rank.kind == "cpu" else 1
    bytes_per_s = profile.memory_bytes_per_s * threads
    if rank.kind == "cpu":
        bytes_per_s = min(bytes_per_s, host.memory_bytes_per_s)
    arithmetic_s = flops / (profile.matmul_flops_per_s * threads)
    return profile.start_s + max(arithmetic_s, touched_bytes / bytes_per_s)


def phases_of(start: Start, members: Sequence[Rank], network: Network) -> Phases:
    """Return what one group sends for a communication. Members that are no senders send nothing.

    `payload_bytes` is the whole value for dense kinds, and for row kinds one member's part: what it
    sends, or for scatter_rows what it receives.
    """
    ends = [member.device for member in members]
    payload = start.payload_bytes
    sends = [payload if start.senders in member.sites else 0 for member in members]
    takes = [start.receivers in member.sites for member in members]
    match start.kind:
        case "all_reduce":
            return collectives.all_reduce(network, ends, payload)
        case "reduce":
            return collectives.reduce(network, ends, payload)
        case "broadcast":
            return collectives.broadcast(network, ends, payload)
        case "reduce_scatter":
            return collectives.reduce_scatter(network, ends, _regions(start, payload, len(ends)))
        case "all_gather":
            return collectives.all_gather(network, ends, _regions(start, payload, len(ends)))
        case "gather_rows":
            return collectives.gather(network, ends, sends)
        case "scatter_rows":
            return collectives.scatter(network, ends, [payload * take for take in takes])
        case "all_gather_rows":
            return collectives.ring_all_gather_rows(network, ends, sends)
        case "all_to_all_rows":
            parts = [[sent / max(1, sum(takes)) * take for take in takes] for sent in sends]
            return collectives.all_to_all_rows(network, ends, parts)


def _regions(start: Start, whole_bytes: float, members: int) -> list[float]:
    """Return each member's region in bytes, in proportion to `counts`."""
    counts = start.counts or (1,) * members
    return [whole_bytes * count / max(1, sum(counts)) for count in counts]
