"""Count the bytes that cross the border of every host in a step, and what every link carries."""

from collections.abc import Iterator
from dataclasses import dataclass

from partc.cost.cluster import Cluster
from partc.cost.network.collectives import Phases, flows_of, total_loads
from partc.cost.network.topology import Flow, Lane, Network
from partc.cost.timeline import phases_of
from partc.runtime.program import Plan, Start


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """What one direction of a link, or a host's memory, carries in a step, and how long that takes it."""

    lane: Lane
    bytes: float
    seconds: float


def host_traffic(plan: Plan, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return each host's (received, sent) bytes per step: what other hosts exchange with it."""
    network = Network(cluster)
    flows: list[Flow] = []
    for phases in _communications(plan, network):
        flows += flows_of(phases)
    return network.host_traffic(flows)


def lane_loads(plan: Plan, cluster: Cluster) -> tuple[LaneLoad, ...]:
    """Return the lanes that carry anything in a step, the one that is occupied longest first."""
    network = Network(cluster)
    carried: dict[Lane, float] = {}
    for phases in _communications(plan, network):
        for lane, amount in total_loads(network, phases).items():
            carried[lane] = carried.get(lane, 0.0) + amount
    loads = [LaneLoad(lane, amount, amount / network.bytes_per_s[lane]) for lane, amount in carried.items()]
    return tuple(sorted(loads, key=lambda load: (-load.seconds, load.lane)))


def _communications(plan: Plan, network: Network) -> Iterator[Phases]:
    """Yield what each group of ranks sends in each of a step's communications."""
    ranks = {rank.rank: rank for rank in plan.ranks}
    for start in plan.instructions:
        if isinstance(start, Start):
            groups = [rank.groups[start.group] for rank in plan.ranks if start.group in rank.groups]
            for members in dict.fromkeys(groups):
                yield phases_of(start, [ranks[member] for member in members], network)
