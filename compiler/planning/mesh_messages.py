"""Messages of the workers' meshes, all groups of ranks at once: what they take, and by which way sums go."""

from functools import cache

import numpy as np

from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.cost.network import collectives
from partc.cost.network.sums import Lines, all_reduce_along, goes_by_levels
from partc.cost.network.topology import network_of
from partc.cost.network.traffic import Phases, lane_loads, seconds_of
from partc.passes.layouts.meshes import Meshes
from partc.runtime.plan.program import Site
from partc.runtime.transports.communication import LONG_SUM_BYTES


class MeshMessages:
    """Answers for the meshes of a step on a cluster. What was asked before is remembered."""

    def __init__(self, meshes: Meshes, cluster: Cluster) -> None:
        self._meshes = meshes
        self._network = network_of(cluster)
        self._workers = [rank.device for rank in ranks_of(cluster) if rank.replica is not None]
        self._lines = cache(self._find_lines)
        self.sum_s = cache(self._find_sum_s)
        self.sent_s = cache(self._find_sent_s)
        self.sum_lanes = cache(self._find_sum_lanes)
        self.sent_lanes = cache(self._find_sent_lanes)
        self.go_by_levels = cache(self._find_whether_by_levels)

    def _find_lines(self, site: Site, axes: tuple[int, ...]) -> Lines:
        mesh = self._meshes.of(site)
        return tuple(tuple(self._workers[mesh.workers[at]] for at in line) for line in mesh.lines(axes))

    def _find_sum_s(self, site: Site, axes: tuple[int, ...], nbytes: int) -> float:
        return seconds_of(self._network, self._sum(site, axes, nbytes))

    def _find_sent_s(self, source: Site, target: Site, nbytes: int) -> float:
        """Return what bytes take from each rank of a mesh to the one at its place in another."""
        return seconds_of(self._network, self._sent(source, target, nbytes))

    def _find_sum_lanes(self, site: Site, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lanes that hold up sums along axes."""
        return self._loaded(self._sum(site, axes, LONG_SUM_BYTES))

    def _find_sent_lanes(self, source: Site, target: Site) -> tuple[int, ...]:
        return self._loaded(self._sent(source, target, LONG_SUM_BYTES))

    def _sum(self, site: Site, axes: tuple[int, ...], nbytes: int) -> Phases:
        return all_reduce_along(self._network, self._lines(site, axes), nbytes)

    def _sent(self, source: Site, target: Site, nbytes: int) -> Phases:
        ends = zip(self._meshes.of(source).workers, self._meshes.of(target).workers, strict=False)
        pairs = {(begin, end): float(nbytes) for begin, end in ends if begin != end}
        return collectives.exchange(self._network, self._workers, pairs)

    def _loaded(self, phases: Phases) -> tuple[int, ...]:
        seconds = lane_loads(self._network, phases) / self._network.bytes_per_s
        return tuple(np.flatnonzero(seconds > seconds.max() / 2).tolist())

    def _find_whether_by_levels(
        self, site: Site, axes: tuple[int, ...], nbytes: int, is_rounded: bool
    ) -> bool:
        return goes_by_levels(self._network, self._lines(site, axes), nbytes, is_rounded)
