"""The cluster as a graph: which way a message goes, and what it occupies on the way.

A *lane* is what messages queue for: one direction of a link, or a host's memory, which its devices
without a link of their own share. A route is the lanes from one end to another.

    h0/cpu0 ══ memory of h0 ══ h0 ──lane──> switch ──lane──> h1 ══ memory of h1 ══ h1/cpu0

Ends (devices, and hosts for processes on their CPU) and switches are nodes. Nodes, lanes and hosts are
numbered, so that what thousands of them carry is one array.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import combinations, pairwise
from typing import Any, TypeVar, TypeVarTuple

import networkx as nx
import numpy as np

from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Host
from partc.cost.cluster.profiles import MEMORY_LATENCY_S, STAGING_LATENCY_S
from partc.cost.network.ways import Array, Numbers, Ways

# Routes are the quickest for a message of this size; any size from 64 KB to 64 MB picks alike on
# networks where the faster link is not the farther one.
ROUTED_MESSAGE_BYTES = 1e6

Asked = TypeVarTuple("Asked")
Remembered = TypeVar("Remembered")

Lane = tuple[str, str]
Pairs = Sequence[tuple[str, str]]
Pattern = Callable[[Sequence[str]], Pairs]  # members of a group -> who sends to whom


@dataclass(frozen=True, slots=True)
class Route:
    """What one message from end to end occupies, in order. A lane may occur twice (memory)."""

    lanes: tuple[Lane, ...]
    latency_s: float
    bytes_per_s: float  # of the narrowest lane; infinite from an end to itself


@dataclass(frozen=True, slots=True, eq=False)
class Hops:
    """Ways of messages between pairs of ends. Message m occupies lane `lanes[i]` where `messages[i]` = m."""

    sources: Numbers  # nodes, by message
    targets: Numbers
    messages: Numbers
    lanes: Numbers
    latency_s: float  # of the slowest


def remembered(find: Callable[["Network", *Asked], Remembered]) -> Callable[["Network", *Asked], Remembered]:
    """Let a network remember, as long as it lives, what a function finds of it for hashable arguments."""

    @wraps(find)
    def answer(network: "Network", *asked: *Asked) -> Remembered:
        key = find, asked
        if key not in network.found:
            network.found[key] = find(network, *asked)
        found: Remembered = network.found[key]
        return found

    return answer


class Network:
    """Answers how long what takes between any two ends of a cluster.

    nodes, lanes, hosts     names by number
    bytes_per_s             float64[lanes]
    host_of, memory_lane    int64[nodes], -1 for switches
    is_gpu, is_host         bool[nodes]
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._graph = _graph_of(cluster)
        self.nodes = list(self._graph)
        self.number_of = {name: number for number, name in enumerate(self.nodes)}
        self.hosts = [host.name for host in cluster.hosts]
        rates = {memory_of(host.name): host.memory_bytes_per_s for host in cluster.hosts}
        for link in cluster.links:
            a, b = link.ends
            rates[a, b] = rates[b, a] = link.bytes_per_s
        self.lanes = list(rates)
        self.lane_number = {lane: number for number, lane in enumerate(self.lanes)}
        self.bytes_per_s: Array = np.array(list(rates.values()), np.float64)
        self._describe_nodes()
        self.ways = Ways(nx.relabel_nodes(self._graph, self.number_of))
        self._lanes_above = self._lanes_of_bridges()
        self._near_memory = self._through_memory()
        self.found: dict[object, Any] = {}  # by functions that are `remembered`

    def _describe_nodes(self) -> None:
        self.host_of = np.full(len(self.nodes), -1)
        self.memory_lane = np.full(len(self.nodes), -1)
        self.is_gpu = np.zeros(len(self.nodes), bool)
        self.is_host = np.zeros(len(self.nodes), bool)
        for number, host in enumerate(self.cluster.hosts):
            ends = [self.number_of[name] for name in (host.name, *(device.name for device in host.devices))]
            self.host_of[ends] = number
            self.memory_lane[ends] = self.lane_number[memory_of(host.name)]
            self.is_host[ends[0]] = True
            self.is_gpu[ends[1:]] = [device.kind == "gpu" for device in host.devices]

    def _lanes_of_bridges(self) -> tuple[Numbers, Numbers]:
        """Return the lane up and the lane down every piece's bridge, int64[pieces]; -1 for roots."""
        up, down = (np.full(len(self.ways.pieces), -1) for _ in range(2))
        for piece in np.flatnonzero(self.ways.port >= 0):
            port, outer = self.nodes[self.ways.port[piece]], self.nodes[self.ways.outer[piece]]
            up[piece], down[piece] = self._lane(port, outer), self._lane(outer, port)
        return up, down

    def _lane(self, source: str, target: str) -> int:
        memory = self._graph.edges[source, target]["memory"]
        return self.lane_number[memory or (source, target)]

    # ------------------------------------------------------------ single messages

    @remembered
    def route(self, source: str, target: str) -> Route:
        """Return the quickest way of a 1 MB message."""
        if source == target:
            return Route((), 0.0, float("inf"))
        numbers = self.ways.path(self.number_of[source], self.number_of[target])
        steps = list(pairwise(self.nodes[number] for number in numbers))
        lanes = [self.lanes[self._lane(*step)] for step in steps]
        # A host's own process reads and writes its memory even where the link is a device's own.
        processes = [end for end in (source, target) if self.is_host[self.number_of[end]]]
        lanes += [memory_of(host) for host in processes if memory_of(host) not in lanes]
        latency_s = sum(self._graph.edges[step]["latency_s"] for step in steps)
        if processes and self.is_gpu[[self.number_of[source], self.number_of[target]]].any():
            latency_s += STAGING_LATENCY_S
        narrowest = min(self.bytes_per_s[self.lane_number[lane]] for lane in lanes)
        return Route(tuple(lanes), latency_s, float(narrowest))

    @remembered
    def hops(self, pattern: Pattern, members: tuple[str, ...]) -> Hops:
        """Return the ways of the messages that a pattern makes of members."""
        return self.hops_between(pattern(members))

    def hops_between(self, pairs: Pairs) -> Hops:
        """Return the ways of one message for every pair of ends that is two."""
        moving = [pair for pair in pairs if pair[0] != pair[1]]
        routes = [self.route(*pair) for pair in moving]
        lanes = [self.lane_number[lane] for route in routes for lane in route.lanes]
        return Hops(
            np.array([self.number_of[source] for source, _ in moving], np.int64),
            np.array([self.number_of[target] for _, target in moving], np.int64),
            np.repeat(np.arange(len(routes)), [len(route.lanes) for route in routes]),
            np.array(lanes, np.int64),
            max((route.latency_s for route in routes), default=0.0),
        )

    def hosts_of(self, members: Sequence[str]) -> list[int]:
        """Return each member's host, by its number."""
        return [int(self.host_of[self.number_of[member]]) for member in members]

    @remembered
    def by_host(self, members: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Return the members of each host, hosts in the order in which they have a first member."""
        hosts: dict[int, list[str]] = {}
        for member, host in zip(members, self.hosts_of(members), strict=True):
            hosts.setdefault(host, []).append(member)
        return tuple(tuple(here) for here in hosts.values())

    # ------------------------------------------------------------ everybody to everybody

    def exchange_loads(self, sent: Array, taken: Array) -> Array:
        """Return what lanes carry, float64[lanes], if node i sends sent[i] * taken[j] bytes to node j."""
        loads = np.zeros(len(self.lanes))
        ways = self.ways
        (sends, below_sends), (takes, below_takes) = ways.below(sent), ways.below(taken)
        all_sent, all_taken = sent.sum(), taken.sum()
        hung = np.flatnonzero(ways.port >= 0)
        up, down = self._lanes_above
        np.add.at(loads, up[hung], sends[hung] * (all_taken - takes[hung]))
        np.add.at(loads, down[hung], (all_sent - sends[hung]) * takes[hung])
        for piece in (number for number, nodes in enumerate(ways.pieces) if len(nodes) > 1):
            port = ways.port[piece]
            if port >= 0:
                below_sends[port] += all_sent - sends[piece]
                below_takes[port] += all_taken - takes[piece]
            self._load_inside(loads, piece, below_sends, below_takes)
        self._load_processes(loads, sent, taken)
        loads[loads < 1e-12 * all_sent * all_taken] = 0.0  # what differences of sums leave of nothing
        return loads

    def _load_inside(self, loads: Array, piece: int, sends: Array, takes: Array) -> None:
        nodes = self.ways.pieces[piece]
        for source in (node for node in nodes if sends[node] > 0):
            for target in (node for node in nodes if takes[node] > 0 and node != source):
                for step in pairwise(self.ways.inner_path(source, target)):
                    loads[self._lane(*(self.nodes[n] for n in step))] += sends[source] * takes[target]

    def _load_processes(self, loads: Array, sent: Array, taken: Array) -> None:
        """Add the memory of hosts whose processes take part, where no message came through it anyway."""
        hosts = np.flatnonzero(self.is_host & ((sent > 0) | (taken > 0)))
        near = self._near_memory
        of_sent, of_taken = (np.bincount(self.host_of[near], v[near], len(self.hosts)) for v in (sent, taken))
        at = self.host_of[hosts]
        elsewhere = taken.sum() - taken[hosts] - of_taken[at]
        from_elsewhere = sent.sum() - sent[hosts] - of_sent[at]
        np.add.at(loads, self.memory_lane[hosts], sent[hosts] * elsewhere + from_elsewhere * taken[hosts])

    def _through_memory(self) -> Numbers:
        """Return the devices that are joined to their host by its memory."""
        memories = nx.get_edge_attributes(self._graph, "memory")
        return np.array(
            [
                self.number_of[b if a == memory[0] else a]
                for (a, b), memory in memories.items()
                if memory is not None
            ],
            np.int64,
        )

    @remembered
    def farthest_s(self, members: tuple[str, ...]) -> float:
        """Return the latency of the slowest route between any two members.

        The longest arm of every kind of end is carried up the tree; two arms that meet make a route.
        """
        search = _Farthest({"host": {"gpu": STAGING_LATENCY_S}, "gpu": {"host": STAGING_LATENCY_S}})
        for name in members:
            number = self.number_of[name]
            kind = "host" if self.is_host[number] else "gpu" if self.is_gpu[number] else "other"
            search.join(number, {kind: 0.0})
        ways = self.ways
        for piece in (piece for pieces in ways.levels for piece in pieces):
            nodes = [node for node in ways.pieces[piece] if node in search.arms]
            for source, target in combinations(nodes, 2):
                search.meet(search.arms[source], search.arms[target], self._inner_s(source, target))
            port, climbed = int(ways.port[piece]), dict[str, float]()
            for node in nodes if port >= 0 else ():
                climb_s = self._inner_s(node, port) + self._edge_s(port, int(ways.outer[piece]))
                for kind, arm_s in search.arms[node].items():
                    climbed[kind] = max(climbed.get(kind, 0.0), arm_s + climb_s)
            search.join(int(ways.outer[piece]), climbed)
        return search.longest_s

    def _inner_s(self, source: int, target: int) -> float:
        return sum(self._edge_s(*step) for step in pairwise(self.ways.inner_path(source, target)))

    def _edge_s(self, source: int, target: int) -> float:
        return float(self._graph.edges[self.nodes[source], self.nodes[target]]["latency_s"])

    # ------------------------------------------------------------ times

    def busiest_s(self, loads: Array) -> float:
        """Return how long the busiest lane is occupied by bytes, float64[lanes]."""
        return float((loads / self.bytes_per_s).max(initial=0.0))


_RECENT: deque[Network] = deque(maxlen=4)


def network_of(cluster: Cluster) -> Network:
    """Return the network of a cluster: of the same object the same one, with all that it found so far."""
    known = next((network for network in tuple(_RECENT) if network.cluster is cluster), None)
    if known is None:
        _RECENT.append(known := Network(cluster))
    return known


class _Farthest:
    """The longest arm from each node down to members, by kind of member, and the longest route so far."""

    def __init__(self, extra_s: dict[str, dict[str, float]]) -> None:
        self.arms: dict[int, dict[str, float]] = {}
        self.longest_s = 0.0
        self._extra_s = extra_s  # that ends of two kinds add

    def join(self, node: int, arms: dict[str, float]) -> None:
        own = self.arms.setdefault(node, {})
        self.meet(own, arms, 0.0)
        for kind, arm_s in arms.items():
            own[kind] = max(own.get(kind, 0.0), arm_s)

    def meet(self, arms: dict[str, float], others: dict[str, float], between_s: float) -> None:
        for kind, arm_s in arms.items():
            for other, other_s in others.items():
                extra_s = self._extra_s.get(kind, {}).get(other, 0.0)
                self.longest_s = max(self.longest_s, arm_s + between_s + other_s + extra_s)


def memory_of(host: str) -> Lane:
    """Return the lane that a host's memory is."""
    return (host, "memory")


def _graph_of(cluster: Cluster) -> nx.Graph:
    graph = nx.Graph()
    linked = {end for link in cluster.links for end in link.ends}
    for host in cluster.hosts:
        graph.add_node(host.name)
        for device in host.devices:
            graph.add_node(device.name)
            if device.name not in linked:
                _join(graph, (device.name, host.name), host.memory_bytes_per_s, MEMORY_LATENCY_S / 2, host)
    for link in cluster.links:
        _join(graph, link.ends, link.bytes_per_s, link.latency_s, None)
    return graph


def _join(
    graph: nx.Graph, ends: tuple[str, str], bytes_per_s: float, latency_s: float, memory: Host | None
) -> None:
    graph.add_edge(
        *ends,
        latency_s=latency_s,
        memory=memory_of(memory.name) if memory else None,
        weight=latency_s + ROUTED_MESSAGE_BYTES / bytes_per_s,
    )
