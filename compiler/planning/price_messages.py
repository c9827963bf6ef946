"""What messages take on links: sums along axes of a mesh, all groups of ranks at once; others, roughly."""

from functools import cache

from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.cost.cluster.profiles import CPU_START_S, PER_COMMUNICATION_S
from partc.cost.network.collectives import all_reduce
from partc.cost.network.families import Family, families_of, in_every
from partc.cost.network.topology import Network
from partc.cost.network.traffic import seconds_of
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Communication, Item
from partc.runtime.plan.program import Site


class MessagePrices:
    """Prices of a step's messages; of what is no sum, its bytes over the slowest link."""

    def __init__(self, lowered: LoweredGraph, cluster: Cluster, slowest_bytes_per_s: float) -> None:
        self._lowered = lowered
        self._slowest_bytes_per_s = slowest_bytes_per_s
        self._network = Network(cluster)
        self._workers = [rank.device for rank in ranks_of(cluster) if rank.replica is not None]
        self._groups = cache(self._find_groups)
        self._sum_s = cache(self._find_sum_s)

    def __call__(self, item: Item) -> float:
        """Return the seconds of a message, from its beginning at a rank to its end, or to begin a segment."""
        if not isinstance(item, Communication):
            return CPU_START_S
        first = item.nodes[0]
        values = [tensor.name for node in item.nodes for tensor in node.outputs]
        nbytes = sum(self._lowered.nbytes.get(value, 0) for value in values)
        if first.op == "AllReduce" and first.attrs["site"] != "server":
            return PER_COMMUNICATION_S + self._sum_s(first.attrs["site"], first.attrs["axes"], nbytes)
        return PER_COMMUNICATION_S + nbytes / self._slowest_bytes_per_s

    def _find_sum_s(self, site: Site, axes: tuple[int, ...], nbytes: int) -> float:
        phases = in_every(
            self._network,
            self._groups(site, axes),
            lambda members: all_reduce(self._network, members, nbytes),
        )
        return seconds_of(self._network, phases)

    def _find_groups(self, site: Site, axes: tuple[int, ...]) -> tuple[Family, ...]:
        mesh = self._lowered.meshes.of(site)
        lines = [tuple(self._workers[mesh.workers[at]] for at in line) for line in mesh.lines(axes)]
        return families_of(self._network, lines)
