"""Messages of the workers' meshes, all groups of ranks at once: what they take, and by which way sums go."""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Literal, TypeGuard, get_args

import onnx_graphsurgeon as gs

from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.cost.network import collectives
from partc.cost.network.families import in_every, known_families
from partc.cost.network.sums import Lines, all_reduce_along, goes_by_levels
from partc.cost.network.topology import network_of
from partc.cost.network.traffic import Phases, lane_loads, loaded_lanes, seconds_of
from partc.cost.simulation.communication_phases import moved_bytes
from partc.passes.layouts.meshes import Meshes
from partc.passes.lowering.exchange import describe_exchange
from partc.passes.scheduling.levels import HostGrid
from partc.runtime.plan.program import Site
from partc.runtime.transports.communication import LONG_SUM_BYTES

# Messages along axes of a mesh.
AlongOp = Literal["AllReduce", "ReduceScatter", "AllGather", "AllGatherRows", "ShiftAhead", "ShiftBack"]
_WAYS = {  # of those in parts, on one line of workers
    "ReduceScatter": collectives.reduce_scatter,
    "AllGather": collectives.all_gather,
    "AllGatherRows": collectives.all_gather_rows,
}


class MeshMessages:
    """Answers for the meshes of a step on a cluster. What was asked of sizes is remembered."""

    def __init__(self, meshes: Meshes, cluster: Cluster) -> None:
        self._meshes = meshes
        self._network = network_of(cluster)
        workers = [rank for rank in ranks_of(cluster) if rank.replica is not None]
        self._workers, self._hosts = [w.device for w in workers], [w.host for w in workers]
        self._lines = cache(self._find_lines)
        self.along_s = cache(self._find_along_s)
        self.handed_on_s = cache(self._find_handed_on_s)
        self.sent_s = cache(self._find_sent_s)
        self.lanes_along = cache(self._find_lanes_along)
        self.sent_lanes = cache(self._find_sent_lanes)
        self.go_by_levels = cache(self._find_whether_by_levels)
        self.grid = HostGrid(len(cluster.hosts), tuple(self._hosts), self.go_by_levels)

    def _find_lines(self, site: Site, axes: tuple[int, ...]) -> Lines:
        mesh = self._meshes.of(site)
        return tuple(tuple(self._workers[mesh.workers[at]] for at in line) for line in mesh.lines(axes))

    def _find_along_s(self, op: AlongOp, site: Site, axes: tuple[int, ...], nbytes: int) -> float:
        """Return the seconds of a message along axes.

        `nbytes`: of the whole, taken to be in equal parts; of a shift, what each member sends.
        """
        return seconds_of(self._network, self._along(op, site, axes, nbytes))

    def _find_handed_on_s(self, site: Site, axes: tuple[int, ...], nbytes: int) -> float:
        """Return how long before its end a sum's members may begin the next, where it goes by levels."""
        if not self.go_by_levels(site, axes, nbytes, False):
            return 0.0
        phases = self._along("AllReduce", site, axes, nbytes)
        return seconds_of(self._network, phases) - self._network.busiest_s(lane_loads(self._network, phases))

    def _find_sent_s(self, source: Site, target: Site, nbytes: int) -> float:
        """Return what bytes take from each rank of a mesh to the one at its place in another."""
        return seconds_of(self._network, self._sent(source, target, nbytes))

    def exchanged_s(self, node: gs.Node) -> float:
        """Return the seconds of an Exchange among the workers of its meshes."""
        exchange = describe_exchange(node, self._meshes, self._hosts)
        ends = (self._meshes.of(node.attrs[end]).workers for end in ("site", "to"))
        members = [self._workers[worker] for worker in dict.fromkeys(chain(*ends))]
        return seconds_of(self._network, collectives.exchange(self._network, members, moved_bytes(exchange)))

    def _find_lanes_along(self, op: AlongOp, site: Site, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lanes that hold up messages along axes."""
        return loaded_lanes(self._network, self._along(op, site, axes, LONG_SUM_BYTES))

    def _find_sent_lanes(self, source: Site, target: Site) -> tuple[int, ...]:
        return loaded_lanes(self._network, self._sent(source, target, LONG_SUM_BYTES))

    def _along(self, op: AlongOp, site: Site, axes: tuple[int, ...], nbytes: int) -> Phases:
        lines = self._lines(site, axes)
        if op == "AllReduce":
            return all_reduce_along(self._network, lines, nbytes)

        def of_line(line: Sequence[str]) -> Phases:
            if op in ("ShiftAhead", "ShiftBack"):
                return collectives.shift(self._network, line[:: 1 if op == "ShiftAhead" else -1], nbytes)
            return _WAYS[op](self._network, line, [nbytes / len(line)] * len(line))

        return in_every(self._network, known_families(self._network, lines), of_line)

    def _sent(self, source: Site, target: Site, nbytes: int) -> Phases:
        ends = zip(self._meshes.of(source).workers, self._meshes.of(target).workers, strict=False)
        pairs = {(begin, end): float(nbytes) for begin, end in ends if begin != end}
        return collectives.exchange(self._network, self._workers, pairs)

    def _find_whether_by_levels(
        self, site: Site, axes: tuple[int, ...], nbytes: int, is_rounded: bool
    ) -> bool:
        return goes_by_levels(self._network, self._lines(site, axes), nbytes, is_rounded)


def is_along(op: str) -> TypeGuard[AlongOp]:
    """Tell whether messages of an op go along axes of a mesh."""
    return op in get_args(AlongOp)
