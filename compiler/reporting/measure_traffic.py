"""Count the bytes that cross the border of every host in a step."""

from partc.cost.cluster import Cluster
from partc.cost.network.collectives import flows_of
from partc.cost.network.topology import Flow, Network
from partc.cost.timeline import phases_of
from partc.runtime.program import Plan, Start


def host_traffic(plan: Plan, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return each host's (received, sent) bytes per step: what other hosts exchange with it."""
    network = Network(cluster)
    ranks = {rank.rank: rank for rank in plan.ranks}
    flows: list[Flow] = []
    for start in plan.instructions:
        if isinstance(start, Start):
            groups = [rank.groups[start.group] for rank in plan.ranks if start.group in rank.groups]
            for members in dict.fromkeys(groups):
                flows += flows_of(phases_of(start, [ranks[member] for member in members], network))
    return network.host_traffic(flows)
