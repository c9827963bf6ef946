"""What servers and workers tell each other, level by level, as the simulator prices it."""

from dataclasses import replace

from partc.cost.cluster.cluster import Cluster, groups_of, ranks_of
from partc.cost.network.families import in_every, known_families
from partc.cost.network.topology import network_of
from partc.cost.network.traffic import loaded_lanes, seconds_of
from partc.cost.simulation.communication_phases import own_s, phases_of
from partc.passes.layouts.layouts import WORKER
from partc.passes.scheduling.levels import BETWEEN_LEVELS, ROWS, Collective
from partc.passes.scheduling.resources import MessageLevel
from partc.runtime.plan.program import Site, Start

SERVER_OPS = frozenset(
    op
    for op, levels in (BETWEEN_LEVELS | {op: (level,) for op, level in ROWS.items()}).items()
    if any("server" in level for level in levels)
)


class ServerMessages:
    """Prices collectives among a cluster's servers, and between each and its host's workers."""

    def __init__(self, cluster: Cluster) -> None:
        self._network = network_of(cluster)
        self._rank_on = {rank.device: rank for rank in ranks_of(cluster)}
        ranks = ranks_of(cluster)
        self._groups = {
            name: tuple(tuple(ranks[member].device for member in members) for members in groups if members)
            for name, groups in groups_of(cluster).items()
        }
        self._levels: dict[Start, MessageLevel] = {}

    def level(self, collective: Collective) -> MessageLevel:
        """Return what a collective takes in all of its groups at once; alike ones are priced once."""
        start = replace(collective, reads=(), writes=(), label="").start(0)
        if start not in self._levels:
            self._levels[start] = self._find_level(start)
        return self._levels[start]

    def _find_level(self, start: Start) -> MessageLevel:
        groups = self._groups[start.group]
        phases = in_every(
            self._network,
            known_families(self._network, groups),
            lambda line: phases_of(start, [self._rank_on[device] for device in line], self._network),
        )
        largest = [self._rank_on[device] for device in max(groups, key=len)]
        begun_s = own_s(start, largest, self._network)
        sites: tuple[Site, ...] = ("server",) if start.group == "servers" else (WORKER, "server")
        return MessageLevel(
            sites, loaded_lanes(self._network, phases), begun_s + seconds_of(self._network, phases)
        )
