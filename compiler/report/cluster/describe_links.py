"""What every link carries in a step, in each direction, and which share of the step it is busy.

Links that carry the same at the same rate share a line. A host's memory is what its devices without links of
their own share: a link inside the host, and the only one without directions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from partc.compiler.report.measure_traffic import LaneLoad, StepTraffic
from partc.compiler.report.units import count, percent, rate, seconds, size
from partc.cost.cluster.cluster import Cluster
from partc.cost.network.topology import Lane, memory_of

MAX_NAMES = 2000  # of alike links


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Links that carry the same, each in one direction."""

    name: str
    alike: tuple[str, ...]  # names of the others
    number: str
    bytes: str
    rate: str
    latency: str
    busy: str  # time
    share: float  # of the step
    percent: str


@dataclass(frozen=True, slots=True)
class LinkLoads:
    """The busiest, in sentences, and all links: between hosts, and inside them."""

    sentences: tuple[str, ...]
    between: tuple[LinkRow, ...]
    inside: tuple[LinkRow, ...]


@dataclass(frozen=True)
class StepLoads:
    """What each direction of each link carries in a step of `step_s`: lanes without load are there, too."""

    step_s: float
    of_lane: Mapping[Lane, LaneLoad]
    bytes_per_s: Mapping[Lane, float]
    latency_s: Mapping[Lane, float]
    host_inside: Mapping[Lane, str]  # lanes inside a host, and that host

    def share(self, lane: Lane) -> float:
        """Return for which share of the step a lane is busy."""
        return self.of_lane[lane].seconds / self.step_s if self.step_s else 0.0

    def busiest_inside(self, host: str) -> LaneLoad | None:
        """Return the busiest lane inside a host; None where nothing moves."""
        inside = [self.of_lane[lane] for lane, of in self.host_inside.items() if of == host]
        busiest = max(inside, key=lambda load: load.seconds, default=None)
        return busiest if busiest is not None and busiest.bytes else None


def loads_of(traffic: StepTraffic, cluster: Cluster, step_s: float) -> StepLoads:
    """Return what all links carry, those with nothing, too."""
    rates = {memory_of(host.name): host.memory_bytes_per_s for host in cluster.hosts}
    latencies = dict.fromkeys(rates, 0.0)
    for link in cluster.links:
        for lane in (link.ends, link.ends[::-1]):
            rates[lane], latencies[lane] = link.bytes_per_s, link.latency_s
    loads = {lane: LaneLoad(lane, 0.0, 0.0) for lane in rates}
    loads |= {load.lane: load for load in traffic.lanes}
    return StepLoads(step_s, loads, rates, latencies, _lanes_inside(cluster, rates))


def switches_within(cluster: Cluster) -> dict[str, str]:
    """Return the switches that join devices of one host and no other, with that host."""
    host_of = {device.name: host.name for host in cluster.hosts for device in host.devices}
    devices = set(host_of)
    host_of |= {host.name: host.name for host in cluster.hosts}
    switched = nx.Graph()
    switched.add_nodes_from(cluster.switches)
    switched.add_edges_from(link.ends for link in cluster.links if set(link.ends) <= set(cluster.switches))
    within: dict[str, str] = {}
    for group in nx.connected_components(switched):
        ends = {end for link in cluster.links if group & set(link.ends) for end in link.ends} - group
        hosts = {host_of[end] for end in ends}
        if len(hosts) == 1 and ends & devices:
            within |= dict.fromkeys(group, hosts.pop())
    return within


def _lanes_inside(cluster: Cluster, lanes: Mapping[Lane, float]) -> dict[Lane, str]:
    host_of = {host.name: host.name for host in cluster.hosts}
    host_of |= {device.name: host.name for host in cluster.hosts for device in host.devices}
    host_of |= switches_within(cluster)
    inside: dict[Lane, str] = {}
    for lane in lanes:
        source, target = lane
        host = host_of.get(source)
        if host is not None and (lane == memory_of(source) or host_of.get(target) == host):
            inside[lane] = host
    return inside


def describe_links(loads: StepLoads) -> LinkLoads:
    """Return all links as text, the busiest first."""
    inside = [load for lane, load in loads.of_lane.items() if lane in loads.host_inside]
    between = [load for lane, load in loads.of_lane.items() if lane not in loads.host_inside]
    return LinkLoads(
        tuple(
            _busiest(of, where, loads)
            for of, where in ((between, "between hosts"), (inside, "inside hosts"))
            if of
        ),
        _rows(between, loads),
        _rows(inside, loads),
    )


def _busiest(loads: Sequence[LaneLoad], where: str, all_loads: StepLoads) -> str:
    busiest = max(loads, key=lambda load: load.seconds)
    if not busiest.bytes:
        return f"Nothing moves {where}."
    share = percent(all_loads.share(busiest.lane))
    alike = sum(_text(load, all_loads) == _text(busiest, all_loads) for load in loads) - 1
    others = f", as {'is one other' if alike == 1 else f'are {count(alike)} others'}" if alike else ""
    return (
        f"The busiest link {where} is {name_lane(busiest.lane)}: {size(busiest.bytes)} in a step keep it "
        f"busy for {seconds(busiest.seconds)}, {share} of the step{others}."
    )


def name_lane(lane: Lane) -> str:
    """Return what a link in one direction, or a host's memory, is called."""
    source, target = lane
    return f"the memory of {source}" if lane == memory_of(source) else f"{source} → {target}"


def _text(load: LaneLoad, loads: StepLoads) -> tuple[str, ...]:
    """Return a line as it is read, but for the name: what a reader cannot tell apart is not told apart."""
    return (
        size(load.bytes),
        rate(loads.bytes_per_s[load.lane]),
        seconds(loads.latency_s[load.lane]) if loads.latency_s[load.lane] else "",
        seconds(load.seconds),
        percent(loads.share(load.lane)),
    )


def _rows(of: Sequence[LaneLoad], loads: StepLoads) -> tuple[LinkRow, ...]:
    alike: dict[tuple[str, ...], list[LaneLoad]] = {}
    for load in of:
        alike.setdefault(_text(load, loads), []).append(load)
    groups = sorted(alike.items(), key=lambda item: -item[1][0].seconds)
    return tuple(_row(text, same, loads) for text, same in groups)


def _row(text: tuple[str, ...], same: Sequence[LaneLoad], loads: StepLoads) -> LinkRow:
    names = [name_lane(load.lane) for load in same]
    nbytes, speed, latency, busy, share = text
    return LinkRow(
        names[0],
        tuple(names[1:MAX_NAMES]),
        count(len(names)),
        nbytes,
        speed,
        latency,
        busy,
        loads.share(same[0].lane),
        share,
    )
