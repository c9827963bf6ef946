"""What nodes and messages of a pipeline's stages take on a cluster, each by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from partc.cost.cluster.cluster import Cluster, ClusterRank, ranks_of
from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.cost.network import collectives
from partc.cost.network.topology import Network
from partc.cost.network.traffic import seconds_of
from partc.cost.simulation.roofline import node_s, start_s
from partc.passes.search.shared_weights import SentSeconds


@dataclass(frozen=True)
class StagePrices:
    """Prices on a cluster's workers, which are taken to be alike."""

    cluster: Cluster
    _nodes: dict[tuple[int, int], float] = field(default_factory=dict)
    _sums: dict[tuple[float, tuple[int, ...]], float] = field(default_factory=dict)

    @cached_property
    def _ranks(self) -> tuple[ClusterRank, ...]:
        return tuple(rank for rank in ranks_of(self.cluster) if rank.replica is not None)

    @cached_property
    def _workers(self) -> tuple[str, ...]:
        return tuple(rank.device for rank in self._ranks)

    @cached_property
    def _network(self) -> Network:
        return Network(self.cluster)

    def node_s(self, flops: int, nbytes: int) -> float:
        """Return what a node takes on a worker. `nbytes`: that it reads and writes."""
        key = flops, nbytes
        if key not in self._nodes:
            self._nodes[key] = node_s(flops, nbytes, self._ranks[0], self.cluster)
        return self._nodes[key]

    @cached_property
    def start_s(self) -> float:
        """Return what starting a segment takes on a worker."""
        return start_s(self._ranks[0], self.cluster)

    def sent(self, stages: int) -> SentSeconds:
        """Return what bytes take from each worker of a stage to the one at its place in another, at once."""
        size = max(1, len(self._workers) // stages)

        def sent_s(nbytes: float, source: int, target: int) -> float:
            pairs = {(source * size + place, target * size + place): nbytes for place in range(size)}
            exchange = collectives.exchange(self._network, self._workers, pairs)
            return PER_COMMUNICATION_S + seconds_of(self._network, exchange)

        return sent_s

    def sum_s(self, nbytes: float, members: Sequence[int]) -> float:
        """Return what an AllReduce of so many bytes takes among workers, by number."""
        key = nbytes, tuple(members)
        if key not in self._sums:
            names = [self._workers[member] for member in members]
            summed = collectives.all_reduce(self._network, names, nbytes)
            self._sums[key] = PER_COMMUNICATION_S + seconds_of(self._network, summed)
        return self._sums[key]
