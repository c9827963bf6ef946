"""Groups of ends that are alike: what they do takes all of them as long, each on lanes of its own.

h0: server, worker, worker  ┐
h1: server, worker, worker  ├─ one family       computed for h0, and counted for all
h2: server, worker, worker  ┘
h3: server, worker            another
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from partc.cost.network.topology import Network, remembered
from partc.cost.network.traffic import Phase, Phases, Totals, totals_of
from partc.cost.network.ways import Array, Numbers

LARGEST = 64  # ends of a group that is compared: larger ones are few, and are families of their own


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Alike groups: `ends` int64[groups, members] are nodes, `lanes` int64[groups, lanes of one],
    `hosts` int64[groups, hosts of one]. Columns correspond.
    """

    first: tuple[str, ...]
    positions: Numbers  # of the groups, in the order in which they were given
    ends: Numbers
    lanes: Numbers
    hosts: Numbers


def families_of(
    network: Network,
    groups: Sequence[tuple[str, ...]],
    kind_of: Callable[[str], Hashable] = lambda end: None,
) -> tuple[Family, ...]:
    """Put alike groups together; where two groups share a lane or an end every group is alone.

    `kind_of` tells apart ends that the network does not.
    """
    is_lone = len(groups) == 1  # nothing is counted for another
    described: list[tuple[Hashable, list[int], list[int]]] = (
        [(None, [], [])] if is_lone else [_describe(network, group, kind_of) for group in groups]
    )
    used = [lane for _, lanes, _ in described for lane in lanes]
    ends = [end for group in groups for end in group]
    alone = len(set(used)) < len(used) or len(set(ends)) < len(ends)
    together: dict[Hashable, list[int]] = {}
    for position, (key, _, _) in enumerate(described):
        together.setdefault((key, position) if alone else key, []).append(position)
    return tuple(
        Family(
            tuple(groups[positions[0]]),
            np.array(positions, np.int64),
            np.array([[network.number_of[end] for end in groups[p]] for p in positions], np.int64),
            np.array([described[p][1] for p in positions], np.int64),
            np.array([described[p][2] for p in positions], np.int64),
        )
        for positions in together.values()
    )


@remembered
def known_families(network: Network, groups: tuple[tuple[str, ...], ...]) -> tuple[Family, ...]:
    """Put alike groups together, as `families_of` does, and remember them."""
    return families_of(network, groups)


def families_by_host(network: Network, members: Sequence[str]) -> tuple[Family, ...]:
    """Return the members of each host, alike hosts together."""
    return known_families(network, network.by_host(tuple(members)))


def _describe(
    network: Network, group: Sequence[str], kind_of: Callable[[str], Hashable]
) -> tuple[Hashable, list[int], list[int]]:
    """Return what alike groups have in common, and the lanes and hosts of this one in order of appearance."""
    if len(group) > LARGEST:
        return tuple(group), [], []
    lanes: dict[int, int] = {}
    hosts: dict[int, int] = {}
    ends = []
    for end in group:
        node = network.number_of[end]
        host = hosts.setdefault(int(network.host_of[node]), len(hosts))
        memory = lanes.setdefault(int(network.memory_lane[node]), len(lanes))
        ends.append((host, memory, bool(network.is_gpu[node]), bool(network.is_host[node]), kind_of(end)))
    ways = []
    for source in group:
        for target in group:
            route = network.route(source, target)
            passed = (network.lane_number[lane] for lane in route.lanes)
            ways.append((route.latency_s, *(lanes.setdefault(lane, len(lanes)) for lane in passed)))
    rates = network.bytes_per_s[list(lanes)].tolist()
    return (tuple(ends), tuple(ways), tuple(rates)), list(lanes), list(hosts)


@dataclass(frozen=True, slots=True, eq=False)
class FamilyTraffic:
    """What moves in every group of a family, computed for its first."""

    family: Family
    totals: Totals  # of the first group

    def load(self, network: Network, lanes: Array) -> None:
        """Add what each lane carries."""
        lanes[self.family.lanes] += self.totals.lanes[self.family.lanes[0]]

    def count(self, network: Network, totals: Totals) -> None:
        """Add what each end and each host sends and receives."""
        ends, hosts = self.family.ends, self.family.hosts
        totals.sent[ends] += self.totals.sent[ends[0]]
        totals.received[ends] += self.totals.received[ends[0]]
        totals.ingress[hosts] += self.totals.ingress[hosts[0]]
        totals.egress[hosts] += self.totals.egress[hosts[0]]


def in_every(
    network: Network, families: Iterable[Family], collective: Callable[[Sequence[str]], Phases]
) -> Phases:
    """Overlay what all groups do at the same time."""
    return overlaid([repeated(network, family, collective(family.first)) for family in families])


def overlaid(every: Sequence[Phases]) -> Phases:
    """Return the phases of what is done at the same time: first ones beside first ones, and so on."""
    steps = max((len(phases) for phases in every), default=0)
    padded = [phases + (Phase((), 0.0),) * (steps - len(phases)) for phases in every]
    return tuple(
        Phase(
            flows=tuple(flows for phase in step for flows in phase.flows),
            latency_s=max(phase.latency_s for phase in step),
        )
        for step in zip(*padded, strict=True)
    )


def repeated(network: Network, family: Family, phases: Phases) -> Phases:
    """Return what all groups of a family do, where its first does the phases."""
    if len(family.positions) == 1:
        return phases
    return tuple(
        Phase((FamilyTraffic(family, totals_of(network, (phase,))),), phase.latency_s) for phase in phases
    )
