"""The cluster as a graph: which way a message goes, and what it occupies on the way.

A *lane* is what messages queue for: one direction of a link, or a host's memory, which its devices
without a link of their own share. A route is the lanes from one end to another.

    h0/cpu0 ══ memory of h0 ══ h0 ──lane──> switch ──lane──> h1 ══ memory of h1 ══ h1/cpu0
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from partc.cost.cluster import Cluster, Host
from partc.cost.profiles import MEMORY_LATENCY_S, STAGING_LATENCY_S

# Routes are the quickest for a message of this size; any size from 64 KB to 64 MB picks alike on
# networks where the faster link is not the farther one.
ROUTED_MESSAGE_BYTES = 1e6

Lane = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Route:
    """What one message from end to end occupies, in order. A lane may occur twice (memory)."""

    lanes: tuple[Lane, ...]
    latency_s: float
    bytes_per_s: float  # of the narrowest lane; infinite from an end to itself


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that go from one device or host to another."""

    source: str
    target: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """Memory traffic at one end, such as that of adding what arrived to what is there."""

    end: str
    bytes: float


class Network:
    """Answers how long what takes between any two ends of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.graph = _graph_of(cluster)
        self.bytes_per_s: dict[Lane, float] = {}
        self._gpus: set[str] = set()
        self._host_of = {host.name: host.name for host in cluster.hosts}
        for host in cluster.hosts:
            self.bytes_per_s[memory_of(host.name)] = host.memory_bytes_per_s
            self._host_of.update((device.name, host.name) for device in host.devices)
            self._gpus.update(device.name for device in host.devices if device.kind == "gpu")
        for link in cluster.links:
            a, b = link.ends
            self.bytes_per_s[a, b] = self.bytes_per_s[b, a] = link.bytes_per_s
        self._routes: dict[Lane, Route] = {}

    def route(self, source: str, target: str) -> Route:
        """Return the quickest way of a 1 MB message."""
        key = (source, target)
        if key not in self._routes:
            self._routes[key] = self._find_route(source, target)
        return self._routes[key]

    def _find_route(self, source: str, target: str) -> Route:
        if source == target:
            return Route((), 0.0, float("inf"))
        path = nx.shortest_path(self.graph, source, target, weight="message_s")
        steps = list(pairwise(path))
        lanes = [self.graph.edges[step]["memory"] or step for step in steps]
        # A host's own process reads and writes its memory even where the link is a device's own.
        processes = [end for end in (source, target) if end == self._host_of[end]]
        lanes += [memory_of(host) for host in processes if memory_of(host) not in lanes]
        latency_s = sum(self.graph.edges[step]["latency_s"] for step in steps)
        if processes and (source in self._gpus or target in self._gpus):
            latency_s += STAGING_LATENCY_S
        return Route(tuple(lanes), latency_s, min(self.bytes_per_s[lane] for lane in lanes))

    def loads(self, flows: Iterable[Flow], work: Iterable[Work] = ()) -> dict[Lane, float]:
        """Return the bytes that each lane carries. Work on a GPU's own memory loads no lane."""
        carried: dict[Lane, float] = {}
        for item in work:
            if item.end not in self._gpus:
                memory = memory_of(self._host_of[item.end])
                carried[memory] = carried.get(memory, 0.0) + item.bytes
        for flow in flows:
            for lane in self.route(flow.source, flow.target).lanes:
                carried[lane] = carried.get(lane, 0.0) + flow.bytes
        return carried

    def busiest_s(self, loads: dict[Lane, float]) -> float:
        """Return how long the busiest lane is occupied."""
        return max((carried / self.bytes_per_s[lane] for lane, carried in loads.items()), default=0.0)

    def host_traffic(self, flows: Iterable[Flow]) -> dict[str, tuple[float, float]]:
        """Return each host's (ingress, egress) bytes: what crosses its border, servers' included."""
        ingress = {host.name: 0.0 for host in self.cluster.hosts}
        egress = dict(ingress)
        for flow in flows:
            source, target = self._host_of[flow.source], self._host_of[flow.target]
            if source != target:
                egress[source] += flow.bytes
                ingress[target] += flow.bytes
        return {name: (ingress[name], egress[name]) for name in ingress}


def memory_of(host: str) -> Lane:
    """Return the lane that a host's memory is."""
    return (host, "memory")


def _graph_of(cluster: Cluster) -> nx.Graph:
    graph = nx.Graph()
    linked = {end for link in cluster.links for end in link.ends}
    for host in cluster.hosts:
        graph.add_node(host.name)
        for device in host.devices:
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
        message_s=latency_s + ROUTED_MESSAGE_BYTES / bytes_per_s,
    )
