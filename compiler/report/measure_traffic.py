"""Count the bytes that cross the border of every host in a step, and what every link carries."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from partc.cost.cluster.cluster import Cluster
from partc.cost.network import traffic
from partc.cost.network.families import Family, families_of, in_every
from partc.cost.network.topology import Lane, Network, network_of
from partc.cost.network.traffic import Phase, Phases
from partc.cost.network.ways import Array
from partc.cost.simulation.communication_phases import phases_of, what_moves
from partc.runtime.plan.program import Plan, Rank, Start

MOST_CONTENTS = 6  # of a lane's contents


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """What one direction of a link, or a host's memory, carries in a step, and how long that takes it."""

    lane: Lane
    bytes: float
    seconds: float


def lane_name(lane: Lane) -> str:
    """Return what a lane is called: `hostA -> switch`, `memory of hostA`."""
    one, other = lane
    return f"{other} of {one}" if other == "memory" else f"{one} -> {other}"


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """What a step's communications move: by host (received, sent), by lane, the longest occupied first.

    contents: of each lane what it carries most of, by name, in bytes
    """

    hosts: dict[str, tuple[float, float]]
    lanes: tuple[LaneLoad, ...]
    contents: dict[Lane, tuple[tuple[str, float], ...]]


def step_traffic(plan: Plan, cluster: Cluster, names: Mapping[int, str]) -> StepTraffic:
    """Return all at once: a large plan has many communications.

    `names`: of communications by their place in the plan's instructions; those of one name are added
    """
    network = network_of(cluster)
    totals = traffic.Totals.nothing(network)
    carried: dict[str, Array] = {}
    for number, phases in _by_instruction(plan, network):
        lanes = carried.setdefault(names.get(number, ""), np.zeros(len(network.lanes)))
        for flows in (flows for phase in phases for flows in phase.flows):
            flows.load(network, lanes)
            flows.count(network, totals)
    lane_bytes = np.sum([np.zeros(len(network.lanes)), *carried.values()], axis=0)
    borders = zip(totals.ingress.tolist(), totals.egress.tolist(), strict=True)
    return StepTraffic(
        dict(zip(network.hosts, borders, strict=True)),
        _loads(network, lane_bytes),
        _contents(network, carried),
    )


def _contents(network: Network, carried: Mapping[str, Array]) -> dict[Lane, tuple[tuple[str, float], ...]]:
    if not carried:
        return {}
    names, amounts = list(carried), np.stack(list(carried.values()))
    order = np.argsort(-amounts, axis=0, kind="stable")[:MOST_CONTENTS]
    return {
        lane: tuple((names[at], float(amounts[at, number])) for at in order[:, number] if amounts[at, number])
        for number, lane in enumerate(network.lanes)
    }


def host_traffic(plan: Plan, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return each host's (received, sent) bytes per step: what other hosts exchange with it."""
    network = network_of(cluster)
    return traffic.host_traffic(network, _phases(plan, network))


def lane_loads(plan: Plan, cluster: Cluster) -> tuple[LaneLoad, ...]:
    """Return the lanes that carry anything in a step, the one that is occupied longest first."""
    network = network_of(cluster)
    return _loads(network, traffic.lane_loads(network, _phases(plan, network)))


def _loads(network: Network, lane_bytes: Array) -> tuple[LaneLoad, ...]:
    loads = [
        LaneLoad(lane, amount, amount / rate)
        for lane, amount, rate in zip(
            network.lanes, lane_bytes.tolist(), network.bytes_per_s.tolist(), strict=True
        )
        if amount > 0
    ]
    return tuple(sorted(loads, key=lambda load: (-load.seconds, load.lane)))


def _phases(plan: Plan, network: Network) -> Iterator[Phase]:
    """Yield what all groups of ranks send in each of a step's communications."""
    for _, phases in _by_instruction(plan, network):
        yield from phases


def _by_instruction(plan: Plan, network: Network) -> Iterator[tuple[int, Phases]]:
    """Yield each communication's place in the plan's instructions, and what all of its groups send."""
    ranks = {rank.device: rank for rank in plan.ranks}
    families_of_group: dict[str, tuple[Family, ...]] = {}
    moved: dict[Hashable, Phases] = {}
    for number, start in enumerate(plan.instructions):
        if isinstance(start, Start):
            if start.group not in families_of_group:
                families_of_group[start.group] = _families(start.group, plan, network)
            if (key := what_moves(start)) not in moved:
                collective = partial(_collective, start, ranks, network)
                moved[key] = in_every(network, families_of_group[start.group], collective)
            yield number, moved[key]


def _collective(start: Start, ranks: Mapping[str, Rank], network: Network, members: Sequence[str]) -> Phases:
    return phases_of(start, [ranks[member] for member in members], network)


def _families(group: str, plan: Plan, network: Network) -> tuple[Family, ...]:
    ranks = {rank.rank: rank for rank in plan.ranks}
    groups = plan.groups.get(group, ())
    devices = [tuple(ranks[member].device for member in members) for members in groups]
    sites = {rank.device: rank.sites for rank in plan.ranks}
    return families_of(network, devices, sites.__getitem__)
