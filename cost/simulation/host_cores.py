"""Who runs on a host's cores: the threads of its ranks, and what moves their bytes."""

from math import inf
from typing import Any

import numpy as np

from partc.cost.cluster.cluster import Cluster
from partc.cost.network.ways import Array, Numbers
from partc.runtime.plan.program import Plan

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class HostCores:
    """The hosts' cores, and the threads of the ranks on them; ranks on GPUs need none.

    `oversubscription_of_all`, float64[ranks], is the threads per core if all ranks are at work, at least 1;
    `threads_per_place` those for each that can run at once; `share_of_movers` of the bytes that ranks have
    moving, for which there is no other core than theirs: from 0 to 1.
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        number_of = {host.name: number for number, host in enumerate(cluster.hosts)}
        ranks = sorted(plan.ranks, key=lambda rank: rank.rank)
        self._cores = np.array([inf if host.cores is None else host.cores for host in cluster.hosts])
        self._host_of = np.array([number_of[rank.host] for rank in ranks], np.int64)
        self._threads = np.array([rank.threads if rank.kind == "cpu" else 0 for rank in ranks])
        everybody = np.arange(len(ranks))
        self.oversubscription_of_all = self.oversubscription(everybody, np.ones(len(ranks), bool))
        threads = np.bincount(self._host_of, self._threads, len(self._cores))
        places = np.array([host.places for host in cluster.hosts])
        self.threads_per_place = np.maximum(1.0, threads / places)[self._host_of]
        movers = np.bincount(self._host_of, self._threads > 0, len(self._cores))
        lacking = np.clip((threads + movers - self._cores) / np.maximum(1, movers), 0.0, 1.0)
        self.share_of_movers = np.where(self._threads > 0, lacking[self._host_of], 0.0)

    def oversubscription(self, ranks: Numbers, at_work: Flags) -> Array:
        """Return the threads at work per core of the ranks' hosts, at least 1, float64[all ranks]."""
        on_host = self._per_core(at_work)[self._host_of[ranks]]
        oversubscription = np.ones(len(self._host_of))
        oversubscription[ranks] = np.where(self._threads[ranks] > 0, on_host, 1.0)
        return oversubscription

    def earliest(self, ranks: Numbers, times: Array) -> Array:
        """Return for every rank the first of the times on its host, float64[all ranks]."""
        first = np.full(len(self._cores), inf)
        np.minimum.at(first, self._host_of[ranks], times)
        result: Array = first[self._host_of]
        return result

    def _per_core(self, at_work: Flags) -> Array:
        threads = np.bincount(self._host_of[at_work], self._threads[at_work], len(self._cores))
        result: Array = np.maximum(1.0, threads / self._cores)
        return result
