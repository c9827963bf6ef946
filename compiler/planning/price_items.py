"""What items of a step take by which orders are compared: messages on links, segments on a rank.

The first worker stands for all of every mesh, the first server for all servers.
"""

from collections import Counter

from partc.compiler.planning.price_messages import MessagePrices
from partc.cost.cluster.cluster import Cluster, ClusterRank, ranks_of
from partc.cost.simulation.roofline import start_s, work_s
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from partc.passes.scheduling.segment_work import WorkCounter


class ItemSeconds:
    """What items take as the simulator prices them: on the first worker, or on links.

    Who reads what is as the graph has it when this is made: once nodes are added, it is to be made anew.
    """

    def __init__(self, lowered: LoweredGraph, cluster: Cluster, message_s: MessagePrices) -> None:
        self._cluster, self._message_s = cluster, message_s
        self._worker, self._server = first_worker(cluster), _first_server(cluster)
        self._counter = WorkCounter(lowered, len(cluster.hosts), names_kernels=False)
        self._reads = Counter(tensor.name for node in lowered.nodes for tensor in node.inputs)
        self._reads.update(value for _, value, _ in lowered.outputs)
        self._reads.update(state.next for state in lowered.states)
        self._known: dict[tuple[int, ...], float] = {}  # by nodes, which items of several orders may have

    def within(self, item: Item) -> float:
        """Return the seconds of an item that is a message, or a part of a segment."""
        nodes = tuple(map(id, item.nodes))
        if nodes not in self._known:
            if isinstance(item, Communication):
                self._known[nodes] = self._message_s(item)
            else:
                self._known[nodes] = self._work_s(item)
        return self._known[nodes]

    def whole(self, item: Item) -> float:
        """Return the seconds of an item that is a message, or a whole segment."""
        begin_s = start_s(self._rank_of(item), self._cluster) if isinstance(item, Chunk) else 0.0
        return self.within(item) + begin_s

    def _rank_of(self, chunk: Chunk) -> ClusterRank:
        return self._server if chunk.site == "server" else self._worker

    def _work_s(self, chunk: Chunk) -> float:
        nodes = chunk.nodes
        made = {tensor.name for node in nodes for tensor in node.outputs}
        own = Counter(tensor.name for node in nodes for tensor in node.inputs if tensor.name in made)
        work = self._counter.count(nodes, {name for name in made if self._reads[name] > own[name]})
        return work_s(work, self._rank_of(chunk), self._cluster)


def first_worker(cluster: Cluster) -> ClusterRank:
    """Return the worker that stands for all of a mesh."""
    return next(placed for placed in ranks_of(cluster) if placed.replica is not None)


def _first_server(cluster: Cluster) -> ClusterRank:
    return next(placed for placed in ranks_of(cluster) if "server" in placed.sites)
