"""What nodes and messages of a pipeline's stages take on a cluster, each by itself."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from partc.cost.cluster.cluster import Cluster, ClusterRank, ranks_of
from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.cost.network import collectives
from partc.cost.network.sums import all_reduce_along
from partc.cost.network.topology import Network, network_of
from partc.cost.network.traffic import Phases, seconds_of
from partc.cost.simulation.roofline import node_s, start_s
from partc.passes.search.stages.line_work import NodeSeconds
from partc.passes.search.stages.price_cuts import PipelineTraffic, SentSeconds, SumSeconds

MessagePhases = Callable[[Network, Sequence[str], float], Phases]  # of a message's members and bytes


@dataclass(frozen=True)
class StagePrices:
    """Prices on a cluster's workers, which are taken to be as the first.

    order  the workers by number, in the order in which they are asked for; empty: the cluster's
    """

    cluster: Cluster
    order: tuple[int, ...] = ()
    _nodes: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _messages: dict[tuple[MessagePhases, float, tuple[int, ...]], float] = field(default_factory=dict)

    @cached_property
    def _ranks(self) -> tuple[ClusterRank, ...]:
        ranks = tuple(rank for rank in ranks_of(self.cluster) if rank.replica is not None)
        return tuple(ranks[number] for number in self.order) or ranks

    @cached_property
    def _workers(self) -> tuple[str, ...]:
        return tuple(rank.device for rank in self._ranks)

    @cached_property
    def _network(self) -> Network:
        return network_of(self.cluster)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the host of every worker."""
        return tuple(rank.host for rank in self._ranks)

    @cached_property
    def kinds(self) -> tuple[Hashable, ...]:
        """Return of every worker what those have in common that compute alike."""
        host_of = {host.name: host for host in self.cluster.hosts}
        rates_of = {device.name: device.rates for host in self.cluster.hosts for device in host.devices}
        return tuple(
            (rank.kind, rank.threads, *rates_of[rank.device], host_of[rank.host].memory_bytes_per_s)
            for rank in self._ranks
        )

    def node_s_on(self, worker: int) -> NodeSeconds:
        """Return what tells the seconds of a node on a worker, by number."""
        return partial(node_s, rank=self._ranks[worker], cluster=self.cluster)

    def node_s(self, flops: int, nbytes: int, packed_bytes: int = 0) -> float:
        """Return what a node takes on a worker. `nbytes`: that it reads and writes, `packed_bytes` packs."""
        key = flops, nbytes, packed_bytes
        if key not in self._nodes:
            self._nodes[key] = self.node_s_on(0)(flops, nbytes, packed_bytes)
        return self._nodes[key]

    @cached_property
    def start_s(self) -> float:
        """Return what starting a segment takes on a worker."""
        return start_s(self._ranks[0], self.cluster)

    def sent(self, size: int) -> SentSeconds:
        """Return what bytes take from each of a stage's workers to the one at its place in another, at once.

        `size`: how many a stage has.
        """

        def sent_s(nbytes: float, source: int, target: int) -> float:
            pairs = {(source * size + place, target * size + place): nbytes for place in range(size)}
            exchange = collectives.exchange(self._network, self._workers, pairs)
            return PER_COMMUNICATION_S + seconds_of(self._network, exchange)

        return sent_s

    def traffic(self, grid: Mapping[str, int], microbatches: int, per_replica: bool) -> PipelineTraffic:
        """Return what there is of a pipeline whose stages are such grids: mesh axes and their sizes.

        `per_replica`: the graph's batch is one replica's, of which rows of images alone are divided.
        """
        data, parts, tensor = (grid.get(axis, 1) for axis in ("data", "spatial", "tensor"))
        sent, summed = self.sent(data * parts * tensor), self.summed(data * parts, tensor)
        return PipelineTraffic(sent, microbatches, parts if per_replica else data * parts, tensor, summed)

    def replicas(self, data: int, tensor: int, stage: int) -> range:
        """Return the workers of a stage that sum gradients: those that are first along `tensor`."""
        size = data * tensor
        return range(stage * size, (stage + 1) * size, tensor)

    def summed(self, data: int, tensor: int) -> SumSeconds:
        """Return what sums of so many bytes of a rank's gradients take among a stage's replicas."""

        def summed_s(nbytes: float, stage: int) -> float:
            if data == 1:
                return 0.0
            members = self.replicas(data, tensor, stage)
            return self.sum_s(nbytes * self.beside(members, tensor), members)

        return summed_s

    def beside(self, members: Sequence[int], tensor: int) -> int:
        """Return how many groups of replicas sum at once over the links of these: one of each rank along
        `tensor` that is on the first one's host, unless all are on that.
        """
        hosts, first = self.hosts, members[0]
        if all(hosts[member] == hosts[first] for member in members):
            return tensor
        return hosts[first : first + tensor].count(hosts[first])

    def sum_s(self, nbytes: float, members: Sequence[int]) -> float:
        """Return what an AllReduce of so many bytes takes among workers, by number."""
        return self._message_s(_all_reduce, nbytes, members)

    def scatter_s(self, nbytes: float, members: Sequence[int]) -> float:
        """Return what a ReduceScatter of so many bytes takes: each keeps an equal part of the sum."""
        return self._message_s(_reduce_scatter, nbytes, members)

    def gather_s(self, nbytes: float, members: Sequence[int]) -> float:
        """Return what an AllGather of so many bytes takes, of which each has an equal part."""
        return self._message_s(_all_gather, nbytes, members)

    def _message_s(self, phases: MessagePhases, nbytes: float, members: Sequence[int]) -> float:
        key = phases, nbytes, tuple(members)
        if key not in self._messages:
            names = [self._workers[member] for member in members]
            self._messages[key] = PER_COMMUNICATION_S + seconds_of(
                self._network, phases(self._network, names, nbytes)
            )
        return self._messages[key]


def _all_reduce(network: Network, members: Sequence[str], nbytes: float) -> Phases:
    return all_reduce_along(network, (tuple(members),), nbytes)


def _reduce_scatter(network: Network, members: Sequence[str], nbytes: float) -> Phases:
    return collectives.reduce_scatter(network, members, [nbytes / len(members)] * len(members))


def _all_gather(network: Network, members: Sequence[str], nbytes: float) -> Phases:
    return collectives.all_gather(network, members, [nbytes / len(members)] * len(members))
