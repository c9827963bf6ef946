"""Play a plan on a cluster: when every rank computes, when it communicates.

    rank 0  compute        [ run ]──────[ run ]      a Start is issued and does not stop the rank
            communication      [ sum ]               it begins when all members have issued it and their
    rank 1  compute        [  run  ]────[ run ]      communication lanes are free; each link carries its
            communication      [ sum ]               share from when it is free, too. A Wait stops the
                                                     rank until it is complete

Links serve first what begins first (play_order.py). A Run lasts what its work is priced at (roofline.py), or
what its segment was measured to take.
A communication takes a little of each member's own time; what one server alone gives its host is copied.
Who sums by levels begins the next sum while links carry this one on.
Where a host has fewer cores than its ranks at work have threads, each computes in proportion longer; who
waits leaves its core to others. Bytes in memory are moved by a core: where a host has none to spare, a rank
computes so much longer while they move, or they move while it waits. Left out: ranks that compete for caches;
Store, which copies what is in the cache.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, TypeVar

import numpy as np

from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.profiles import OVERSUBSCRIBED_WAIT_S
from partc.cost.network.families import Family, families_of, repeated
from partc.cost.network.topology import network_of
from partc.cost.network.traffic import Flows, Totals, lane_loads, seconds_of
from partc.cost.network.ways import Array, Numbers
from partc.cost.simulation.communication_phases import own_s, phases_of, what_moves
from partc.cost.simulation.host_cores import Flags, HostCores
from partc.cost.simulation.measured_kernels import NO_TIMES, KernelTimes
from partc.cost.simulation.play_order import order_of_play
from partc.cost.simulation.roofline import run_s
from partc.runtime.plan.program import Instruction, Plan, Rank, Run, Site, Start, Wait

COMPACTED = 16  # elements from which on equal ones are kept as one
LaneKind = Literal["compute", "communication"]
AnyColumn = TypeVar("AnyColumn", Array, Numbers)


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of the picture. `payload_bytes` is what the rank contributes; 0 for computing."""

    rank: int
    lane: LaneKind
    label: str
    start_s: float
    stop_s: float
    payload_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """The same event of several ranks: arrays by position in `ranks`, int64.

    `instruction`: which of the plan's it is.
    """

    lane: LaneKind
    label: str
    ranks: Numbers
    start_s: Array
    stop_s: Array
    payload_bytes: Numbers
    instruction: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step's bars in the order in which they were played, and every rank's bytes on the wire.

    `beside_s`: rank -> until when it draws its batch, before all bars; empty where that was not measured.
    """

    bars: tuple[Bars, ...]
    step_s: float
    sent_bytes: dict[int, int]
    received_bytes: dict[int, int]
    beside_s: dict[int, float] = field(default_factory=dict)

    @property
    def events(self) -> tuple[Event, ...]:
        """Return every rank's bars one by one."""
        return tuple(
            Event(rank, bars.lane, bars.label, start_s, stop_s, payload)
            for bars in self.bars
            for rank, start_s, stop_s, payload in zip(
                bars.ranks.tolist(),
                bars.start_s.tolist(),
                bars.stop_s.tolist(),
                bars.payload_bytes.tolist(),
                strict=True,
            )
        )

    def busy_s(self, lane: LaneKind) -> dict[int, float]:
        """Return how long each rank computes, or communicates."""
        busy_s = np.zeros(len(self.sent_bytes))
        for bars in self.bars:
            if bars.lane == lane:
                np.add.at(busy_s, bars.ranks, bars.stop_s - bars.start_s)
        return dict(enumerate(busy_s.tolist()))


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a plan on this machine.

    segments  seconds of one run, alone on its device
    beside_s  of a rank's step: drawing its batch
    kernels   of segments that were not measured: prices are made of them
    """

    segments: Mapping[str, float] = field(default_factory=dict)
    beside_s: float = 0.0
    kernels: KernelTimes = NO_TIMES


NOTHING_MEASURED = Measured()


@dataclass(frozen=True, slots=True, eq=False)
class PlayedTraffic:
    """What one family of groups does for a communication, and for every other that moves the same.

    flows       of all its groups
    seconds     from begin to end
    lanes, occupied_s   int64[groups, lanes of one], float64[lanes of one]: in use, and how long
    busy_s      from begin until its members may begin the next: a sum by levels is handed on meanwhile
    moving_s    float64[members]: how long each member's bytes move in memory
    own_s       what a member does itself to begin and end it
    payload_bytes   int64[ranks]: what each contributes
    """

    flows: tuple[Flows, ...]
    seconds: float
    lanes: Numbers
    occupied_s: Array
    busy_s: float
    moving_s: Array
    own_s: float
    payload_bytes: Numbers


def simulate(plan: Plan, cluster: Cluster, measured: Measured = NOTHING_MEASURED) -> Timeline:
    """Return the predicted timeline of one step. Segments that are not `measured` are priced."""
    play = Play(plan, cluster, measured)
    play.execute_all()
    return play.timeline()


class Play:
    """The clocks of ranks and links while a plan is played; ranks that are alike are played as one array.

    Arrays are by rank: `beside` until when it draws its batch, `clock` until when it computes or waits,
    `computing` until when it computes, `busy` until when it communicates; `alone` what its last segment takes
    on a core of its own; `lanes`, float64[lanes], until when a lane is occupied; `done` when a communication
    is complete.
    `moving` what bytes that have begun to move take of its core in all, and `due` those up to a
    communication; `moved` what they have had of it.
    """

    def __init__(self, plan: Plan, cluster: Cluster, measured: Measured) -> None:
        self.plan = plan
        self.measured = measured
        self.network = network_of(cluster)
        self.cluster = cluster
        self.ranks = {rank.rank: rank for rank in plan.ranks}
        self.rank_at = {rank.device: rank.rank for rank in plan.ranks}
        self.cores = HostCores(plan, cluster)
        self.kinds = _kinds_of(plan, cluster)
        self.families: dict[str, list[tuple[Family, Numbers]]] = {}
        self.waiting: dict[Site | None, Numbers] = {}  # ranks by the site that a wait names
        self.carried: dict[Hashable, list[PlayedTraffic]] = {}  # by family, of what communications move
        self.beside = measured.beside_s * self.cores.oversubscription_of_all
        self.clock = self.beside.copy()
        self.computing = self.clock.copy()
        self.busy, self.alone, self.moving, self.moved = (np.zeros(len(plan.ranks)) for _ in range(4))
        self.lanes = np.zeros(len(self.network.lanes))
        self.done: dict[int, Array] = {}
        self.due: dict[int, Array] = {}
        self.bars: list[Bars] = []
        self.totals = Totals.nothing(self.network)

    def execute_all(self) -> None:
        """Play a step."""
        for number in order_of_play(self.plan, self._begins_s):
            self.execute(self.plan.instructions[number], number)

    def _begins_s(self, number: int) -> float:
        """Return when an instruction can begin whose ranks have come to it; links may be occupied then."""
        match self.plan.instructions[number]:
            case Run(site=site):
                return min(float(self.clock[ranks].min()) for kind, ranks in self.kinds if site in kind.sites)
            case Start(group=group):
                ready = (float(self._ready(ranks).min()) for _, ranks in self._families(group))
                return min(ready, default=0.0)
        return 0.0

    def _ready(self, ranks: Numbers) -> Array:
        """Return when all members of groups can begin a communication, float64[groups]."""
        ready: Array = np.maximum(self.clock[ranks], self.busy[ranks]).max(axis=1)
        return ready

    def execute(self, instruction: Instruction, number: int) -> None:
        """Play one instruction on all ranks that it concerns. `number`: its place in the plan's list."""
        match instruction:
            case Run():
                self.run(instruction, number)
            case Start():
                self.start(instruction, number)
            case Wait():
                self.wait(instruction)

    def run(self, run: Run, number: int) -> None:
        """Play a segment on the ranks of its site."""
        label = f"{run.site} {PurePosixPath(run.segment).stem}"
        kinds = [(kind, ranks) for kind, ranks in self.kinds if run.site in kind.sites]
        running = np.concatenate([ranks for _, ranks in kinds]) if kinds else np.zeros(0, np.int64)
        oversubscription = self.cores.oversubscription(running, self._at_work(running))
        for kind, ranks in kinds:
            alone_s = self.measured.segments.get(run.segment, 0.0) or run_s(
                run, kind, self.cluster, self.measured.kernels
            )
            begin, self.alone[ranks] = self.clock[ranks], alone_s
            # Half of the core each, while both are at work.
            moving_s = np.minimum(self.moving[ranks] - self.moved[ranks], alone_s)
            self.moved[ranks] += moving_s
            self.clock[ranks] = stop = begin + (alone_s + moving_s) * oversubscription[ranks]
            self.computing[ranks] = stop
            sends = _compact(np.zeros_like(ranks))
            self.bars.append(Bars("compute", label, ranks, _compact(begin), _compact(stop), sends, number))

    def _at_work(self, ranks: Numbers) -> Flags:
        """Return who needs a core when some ranks begin something, bool[all ranks]: they and who computes."""
        since = self.cores.earliest(ranks, self.clock[ranks])
        at_work: Flags = self.computing > since
        at_work[ranks] = True
        return at_work

    def start(self, start: Start, number: int) -> None:
        """Play a communication of all groups that meet for it."""
        self.done[start.tag_id], self.due[start.tag_id] = (np.zeros(len(self.clock)) for _ in range(2))
        families, key = self._families(start.group), what_moves(start)
        if key not in self.carried:
            self.carried[key] = [self._carried(start, family, ranks) for family, ranks in families]
        for (_, ranks), carried in zip(families, self.carried[key], strict=True):
            self._communicate(start, number, ranks, carried)

    def _families(self, group: str) -> list[tuple[Family, Numbers]]:
        """Return the alike groups that meet under a name, and their ranks, int64[groups, members]."""
        if group not in self.families:
            groups = self.plan.groups.get(group, ())
            devices = [tuple(self.ranks[member].device for member in members) for members in groups]
            rank_of = np.array([self.rank_at.get(name, -1) for name in self.network.nodes], np.int64)
            families = families_of(self.network, devices, self._traits_of)
            self.families[group] = [(family, rank_of[family.ends]) for family in families]
        return self.families[group]

    def _traits_of(self, device: str) -> Hashable:
        rank = self.ranks[self.rank_at[device]]
        cores = self.cores
        return (
            rank.sites,
            float(cores.oversubscription_of_all[rank.rank]),
            float(cores.threads_per_place[rank.rank]),
        )

    def _communicate(self, start: Start, number: int, ranks: Numbers, carried: PlayedTraffic) -> None:
        """Play a communication of all groups of a family, each of them when it is ready."""
        for flows in carried.flows:
            flows.count(self.network, self.totals)
        oversubscription = self.cores.oversubscription(ranks.ravel(), self._at_work(ranks.ravel()))
        self.clock[ranks] += carried.own_s * oversubscription[ranks]
        ready = self._ready(ranks)
        # Of each lane; those that are occupied for a shorter time than others may begin later than these.
        begins = np.maximum(ready[:, np.newaxis], self.lanes[carried.lanes])
        early_s = carried.occupied_s.max(initial=0.0) - carried.occupied_s
        begin = np.maximum(ready, (begins - early_s).max(axis=1, initial=0.0))
        # Who waits for a place to run is not always awake when messages come.
        crowded = self.cores.threads_per_place[ranks].max(axis=1)
        woken_s = (crowded - 1) * OVERSUBSCRIBED_WAIT_S if ranks.shape[1] > 1 else 0.0
        stop = begin + carried.seconds + woken_s
        self.moving[ranks] += carried.moving_s * self.cores.share_of_movers[ranks]
        self.due[start.tag_id][ranks] = self.moving[ranks]
        self.lanes[carried.lanes] = begins + carried.occupied_s
        self.busy[ranks] = (stop - carried.seconds + carried.busy_s)[:, np.newaxis]
        self.done[start.tag_id][ranks] = stop[:, np.newaxis]
        self.bars.append(
            Bars(
                "communication",
                start.label or start.kind,
                ranks.ravel(),
                _compact(np.repeat(begin, ranks.shape[1])),
                _compact(np.repeat(stop, ranks.shape[1])),
                carried.payload_bytes,
                number,
            )
        )

    def _carried(self, start: Start, family: Family, ranks: Numbers) -> PlayedTraffic:
        first = [self.ranks[rank] for rank in ranks[0].tolist()]
        phases = phases_of(start, first, self.network)
        loads = lane_loads(self.network, phases)
        lanes, occupied_s = self._occupied(family, loads)
        memory = self.network.memory_lane[family.ends[0]]
        sends = [start.payload_bytes if start.senders in rank.sites else 0 for rank in first]
        seconds = seconds_of(self.network, phases)
        return PlayedTraffic(
            tuple(flows for phase in repeated(self.network, family, phases) for flows in phase.flows),
            seconds,
            lanes,
            occupied_s,
            float(occupied_s.max(initial=0.0)) if start.by_levels else seconds,
            loads[memory] / self.network.bytes_per_s[memory],
            own_s(start, first, self.network),
            _compact(np.tile(np.array(sends, np.int64), len(ranks))),
        )

    def _occupied(self, family: Family, loads: Array) -> tuple[Numbers, Array]:
        """Return the lanes in use, int64[groups, lanes], and for how long, float64[lanes]."""
        if len(family.positions) == 1:
            used = np.flatnonzero(loads)
            return used[np.newaxis], loads[used] / self.network.bytes_per_s[used]
        columns = np.flatnonzero(loads[family.lanes[0]])
        first = family.lanes[0, columns]
        return family.lanes[:, columns], loads[first] / self.network.bytes_per_s[first]

    def wait(self, wait: Wait) -> None:
        """Let ranks stand still until a communication is complete."""
        if wait.tag_id not in self.done:
            return
        ranks = self._who_waits_at(wait.site)
        still_s = self.due[wait.tag_id][ranks] - self.moved[ranks]
        idle_s = np.maximum(0.0, np.maximum(self.done[wait.tag_id][ranks] - self.clock[ranks], still_s))
        self.clock[ranks] += idle_s
        self.moved[ranks] = np.minimum(self.moving[ranks], self.moved[ranks] + idle_s)

    def _who_waits_at(self, site: Site | None) -> Numbers:
        if site not in self.waiting:
            waiting = [ranks for kind, ranks in self.kinds if site in (None, *kind.sites)]
            self.waiting[site] = np.concatenate([np.zeros(0, np.int64), *waiting])
        return self.waiting[site]

    def timeline(self) -> Timeline:
        """Return what was played so far."""

        def by_rank(carried: Array) -> dict[int, int]:
            at = self.network.number_of
            return {rank.rank: round(carried[at[rank.device]]) for rank in self.plan.ranks}

        return Timeline(
            bars=tuple(self.bars),
            step_s=float(max(self.clock.max(), self.busy.max())),
            sent_bytes=by_rank(self.totals.sent),
            received_bytes=by_rank(self.totals.received),
            beside_s=dict(enumerate(self.beside.tolist())) if self.measured.beside_s else {},
        )


def _kinds_of(plan: Plan, cluster: Cluster) -> list[tuple[Rank, Numbers]]:
    """Return one rank of every kind that takes as long for the same work, and all ranks of the kind."""
    hosts = {host.name: host for host in cluster.hosts}
    rates = {device.name: device.rates for host in cluster.hosts for device in host.devices}
    kinds: dict[Hashable, list[Rank]] = {}
    for rank in plan.ranks:
        memory = hosts[rank.host].memory_bytes_per_s
        key = (rates.get(rank.device), rank.kind, rank.threads, memory, rank.sites)
        kinds.setdefault(key, []).append(rank)
    return [(alike[0], np.array([rank.rank for rank in alike], np.int64)) for alike in kinds.values()]


def _compact(column: AnyColumn) -> AnyColumn:
    """Keep one element in memory where many are equal."""
    if column.size < COMPACTED or (column != column[0]).any():
        return column
    return np.broadcast_to(column[:1], column.shape)
