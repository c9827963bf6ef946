"""What items of a step take by which orders are compared: segments on the first worker, messages on links."""

from collections import Counter
from collections.abc import Sequence

import onnx_graphsurgeon as gs

from partc.compiler.planning.price_messages import MessagePrices
from partc.cost.cluster.cluster import Cluster, ClusterRank, ranks_of
from partc.cost.simulation.roofline import start_s, work_s
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Communication, Item
from partc.passes.scheduling.segment_work import WorkCounter


class ItemSeconds:
    """What items take as the simulator prices them: on the first worker, or on links.

    Who reads what is as the graph has it when this is made: once nodes are added, it is to be made anew.
    """

    def __init__(self, lowered: LoweredGraph, cluster: Cluster, message_s: MessagePrices) -> None:
        self._cluster, self._worker, self._message_s = cluster, first_worker(cluster), message_s
        self._counter = WorkCounter(lowered, len(cluster.hosts), names_kernels=False)
        self._reads = Counter(tensor.name for node in lowered.nodes for tensor in node.inputs)
        self._reads.update(value for _, value, _ in lowered.outputs)
        self._reads.update(state.next for state in lowered.states)
        self._start_s = start_s(self._worker, cluster)
        self._known: dict[tuple[int, ...], float] = {}  # by nodes, which items of several orders may have

    def within(self, item: Item) -> float:
        """Return the seconds of an item that is a message, or a part of a segment."""
        nodes = tuple(map(id, item.nodes))
        if nodes not in self._known:
            is_message = isinstance(item, Communication)
            self._known[nodes] = self._message_s(item) if is_message else self._work_s(item.nodes)
        return self._known[nodes]

    def whole(self, item: Item) -> float:
        """Return the seconds of an item that is a message, or a whole segment."""
        return self.within(item) + (0.0 if isinstance(item, Communication) else self._start_s)

    def _work_s(self, nodes: Sequence[gs.Node]) -> float:
        made = {tensor.name for node in nodes for tensor in node.outputs}
        own = Counter(tensor.name for node in nodes for tensor in node.inputs if tensor.name in made)
        work = self._counter.count(nodes, {name for name in made if self._reads[name] > own[name]})
        return work_s(work, self._worker, self._cluster)


def first_worker(cluster: Cluster) -> ClusterRank:
    """Return the worker that stands for all of a mesh."""
    return next(placed for placed in ranks_of(cluster) if placed.replica is not None)
