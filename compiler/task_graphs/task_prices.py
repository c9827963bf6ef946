"""What tasks take on a cluster's workers and links: prices of the simulator, remembered."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from partc.cost.cluster.cluster import Cluster, ClusterRank, ranks_of, threads_per_core
from partc.cost.network import collectives
from partc.cost.network.sums import all_reduce_along, goes_by_levels
from partc.cost.network.topology import Network, network_of
from partc.cost.network.traffic import Phases, lane_loads, seconds_of, totals_of
from partc.cost.simulation.measured_kernels import NO_TIMES, KernelTimes
from partc.cost.simulation.memory import limit_bytes
from partc.cost.simulation.roofline import apart_s, start_s
from partc.cost.simulation.task_arrays import Floats, Ints, Longs
from partc.passes.scheduling.segment_work import Work
from partc.passes.search.operators.group_collectives import CollectiveKind


@dataclass(frozen=True, slots=True, eq=False)
class PricedCommunication:
    """What a communication takes.

    seconds              from its beginning to its end
    lanes, occupied_s    of links, and for how long it occupies each
    nbytes               that are sent
    handed_on_s          of the seconds: when its members may begin the next one already
    """

    seconds: float
    lanes: Ints
    occupied_s: Floats
    nbytes: float
    handed_on_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ComputePrice:
    """What work takes on each worker, float64[workers]: of the host, to launch it, and of the device."""

    launching_s: Floats
    computing_s: Floats

    @property
    def seconds(self) -> Floats:
        """Return what it takes where nothing was launched ahead."""
        return np.maximum(self.launching_s, self.computing_s)


@dataclass
class TaskPrices:
    """Prices by the numbers of workers. What was asked before is remembered."""

    cluster: Cluster
    times: KernelTimes = NO_TIMES
    _work: dict[tuple[Work, int], ComputePrice] = field(default_factory=dict)
    _collectives: dict[tuple[CollectiveKind, int, tuple[int, ...]], PricedCommunication] = field(
        default_factory=dict
    )
    _lines: dict[
        tuple[CollectiveKind, int, int], tuple[tuple[tuple[int, ...], ...], Sequence[PricedCommunication]]
    ] = field(default_factory=dict)
    _exchanges: dict[tuple[bytes, bytes, bytes], PricedCommunication] = field(default_factory=dict)
    _routes: dict[tuple[int, int], tuple[Ints, float]] = field(default_factory=dict)

    @cached_property
    def network(self) -> Network:
        """Return the cluster's links."""
        return network_of(self.cluster)

    @cached_property
    def workers(self) -> tuple[ClusterRank, ...]:
        """Return the workers in their order."""
        return tuple(rank for rank in ranks_of(self.cluster) if rank.replica is not None)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Return the workers' hosts."""
        return tuple(worker.host for worker in self.workers)

    @cached_property
    def host_numbers(self) -> Ints:
        """Return the number of each worker's host, int32[workers]."""
        numbers = {host: number for number, host in enumerate(dict.fromkeys(self.hosts))}
        return np.array([numbers[host] for host in self.hosts], np.int32)

    @cached_property
    def resources(self) -> int:
        """Return how many there are: what workers compute, send, and hand on, lanes, what hosts launch."""
        return 4 * len(self.workers) + len(self.network.lanes)

    def communicating(self, worker: int) -> int:
        """Return the resource that a worker's communications take; computing takes that of its number."""
        return len(self.workers) + worker

    def lane(self, lane: int) -> int:
        """Return the resource that a lane of the network is."""
        return 2 * len(self.workers) + lane

    def handing_on(self, worker: int) -> int:
        """Return the resource with which a group, by its first worker, hands sums on within hosts."""
        return 2 * len(self.workers) + len(self.network.lanes) + worker

    def launching(self, worker: int) -> int:
        """Return the resource that launches what a worker computes, and begins its communications."""
        return 3 * len(self.workers) + len(self.network.lanes) + worker

    @cached_property
    def limits_bytes(self) -> Floats:
        """Return what memory each worker has, float64[workers]."""
        hosts = {host.name: host for host in self.cluster.hosts}
        return np.array([limit_bytes(worker, hosts[worker.host]) for worker in self.workers], np.float64)

    @cached_property
    def _kinds(self) -> tuple[Ints, tuple[ClusterRank, ...]]:
        """Return which workers are alike, int32[workers], and one of each kind."""
        rates = {device.name: device.rates for host in self.cluster.hosts for device in host.devices}
        memory = {host.name: host.memory_bytes_per_s for host in self.cluster.hosts}
        kinds: dict[object, int] = {}
        ones: list[ClusterRank] = []
        numbers = []
        for worker in self.workers:
            key = rates[worker.device], worker.kind, worker.threads, memory[worker.host]
            if key not in kinds:
                kinds[key] = len(ones)
                ones.append(worker)
            numbers.append(kinds[key])
        return np.array(numbers, np.int32), tuple(ones)

    @cached_property
    def _crowding(self) -> Floats:
        """Return the threads per core if all are at work, float64[workers]."""
        each = threads_per_core(self.cluster)
        return np.array([each[w.host] if w.kind == "cpu" else 1.0 for w in self.workers])

    @cached_property
    def _start_s(self) -> Floats:
        """Return what each worker takes to begin a segment, float64[workers]."""
        numbers, ones = self._kinds
        return np.array([start_s(one, self.cluster) for one in ones])[numbers] * self._crowding

    def work(self, work: Work, segments: int) -> ComputePrice:
        """Return how long work takes that is cut into some segments."""
        if (work, segments) not in self._work:
            numbers, ones = self._kinds
            each = np.array([apart_s(work, one, self.cluster, self.times) for one in ones])
            price = ComputePrice(*each[numbers].T * self._crowding)
            self._work[work, segments] = self.begun(price, segments)
        return self._work[work, segments]

    def begun(self, price: ComputePrice, segments: int) -> ComputePrice:
        """Return a price with what beginning some segments takes who has any of its work."""
        begin_s = segments * self._start_s
        return ComputePrice(*(own + begin_s * (own > 0) for own in (price.launching_s, price.computing_s)))

    def collective(self, kind: CollectiveKind, nbytes: int, members: tuple[int, ...]) -> PricedCommunication:
        """Return what a collective takes. `nbytes`: as in Collective."""
        key = kind, nbytes, members
        if key not in self._collectives:
            names = [self.workers[member].device for member in members]
            moved = self._moved(_phases(self.network, kind, nbytes, names))
            if kind == "all_reduce" and goes_by_levels(self.network, (tuple(names),), nbytes):
                moved = replace(moved, handed_on_s=moved.seconds - float(moved.occupied_s.max(initial=0.0)))
            self._collectives[key] = moved
        return self._collectives[key]

    def collectives(
        self, kind: CollectiveKind, nbytes: int, lines: tuple[tuple[int, ...], ...]
    ) -> Sequence[PricedCommunication]:
        """Return what each of several collectives of different members takes. `lines`: equal ones are one."""
        key = kind, nbytes, id(lines)
        if key not in self._lines:
            self._lines[key] = lines, [self.collective(kind, nbytes, members) for members in lines]
        return self._lines[key][1]

    def exchange(self, sources: Ints, targets: Ints, nbytes: Longs) -> PricedCommunication:
        """Return what messages among workers take that are sent at once, as collectives.exchange has it.

        They are in the order of (source, target), one for each pair.
        """
        key = sources.tobytes(), targets.tobytes(), nbytes.tobytes()
        if key not in self._exchanges:
            routes = [self._route(pair) for pair in zip(sources.tolist(), targets.tolist(), strict=True)]
            lanes = np.concatenate([lanes for lanes, _ in routes])
            counts = [len(lanes) for lanes, _ in routes]
            carried = np.bincount(lanes, np.repeat(nbytes, counts), len(self.network.lanes)).astype(
                np.float64
            )
            messages = np.bincount(np.concatenate((sources, targets)))
            latency_s = max(latency_s for _, latency_s in routes)
            seconds = float(messages.max()) * latency_s + self.network.busiest_s(carried)
            self._exchanges[key] = self._occupied(seconds, carried, float(nbytes.sum()))
        return self._exchanges[key]

    def _route(self, pair: tuple[int, int]) -> tuple[Ints, float]:
        """Return the lanes from a worker to another, and the latency of a message."""
        if pair not in self._routes:
            route = self.network.route(*(self.workers[worker].device for worker in pair))
            lanes = np.array([self.network.lane_number[lane] for lane in route.lanes], np.int32)
            self._routes[pair] = lanes, route.latency_s
        return self._routes[pair]

    def _moved(self, phases: Phases) -> PricedCommunication:
        nbytes = float(totals_of(self.network, phases).sent.sum())
        return self._occupied(seconds_of(self.network, phases), lane_loads(self.network, phases), nbytes)

    def _occupied(self, seconds: float, carried: Floats, nbytes: float) -> PricedCommunication:
        used = np.flatnonzero(carried)
        return PricedCommunication(
            seconds, used.astype(np.int32), carried[used] / self.network.bytes_per_s[used], nbytes
        )


def _phases(network: Network, kind: CollectiveKind, nbytes: int, names: Sequence[str]) -> Phases:
    count = len(names)
    match kind:
        case "all_reduce":
            return all_reduce_along(network, (tuple(names),), nbytes)
        case "reduce_scatter":
            return collectives.reduce_scatter(network, names, [nbytes / count] * count)
        case "all_gather":
            return collectives.all_gather(network, names, [nbytes / count] * count)
        case "all_to_all":
            return collectives.all_to_all_rows(network, names, [nbytes] * count, [1 / count] * count)
        case "shift":
            return collectives.shift(network, names, nbytes)
