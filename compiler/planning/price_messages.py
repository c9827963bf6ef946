"""What messages take on links: along axes of a mesh, and from mesh to mesh; others, roughly."""

from collections.abc import Sequence
from typing import TypeGuard, get_args

import onnx_graphsurgeon as gs

from partc.compiler.planning.mesh_messages import AlongOp, MeshMessages
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.profiles import CPU_START_S, PER_COMMUNICATION_S, PER_ROWS_S
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Communication, Item


class MessagePrices:
    """Prices of a step's messages; of rows and of what servers have, their bytes over the slowest link."""

    def __init__(self, lowered: LoweredGraph, cluster: Cluster, slowest_bytes_per_s: float) -> None:
        self._lowered = lowered
        self._slowest_bytes_per_s = slowest_bytes_per_s
        self._meshes = {mesh.name for mesh in lowered.meshes.each}
        self._messages = MeshMessages(lowered.meshes, cluster)

    def __call__(self, item: Item) -> float:
        """Return the seconds of a message, from its beginning at a rank to its end, or to begin a segment."""
        if not isinstance(item, Communication):
            return CPU_START_S
        op, attributes, nbytes = item.nodes[0].op, item.nodes[0].attrs, self._nbytes(item)
        site, to = attributes.get("site"), attributes.get("to")
        if site in self._meshes and _is_along(op):
            own_s = PER_ROWS_S if op == "AllGatherRows" else PER_COMMUNICATION_S
            return own_s + self._messages.along_s(op, site, attributes["axes"], nbytes)
        if op == "Exchange":
            return PER_COMMUNICATION_S + self._messages.exchanged_s(item.nodes[0])
        if self._meshes.issuperset((site, to)):
            return PER_COMMUNICATION_S + self._messages.sent_s(site, to, nbytes)
        return PER_COMMUNICATION_S + nbytes / self._slowest_bytes_per_s

    def handed_on_s(self, message: Communication) -> float:
        """Return how long before its end a message's members may begin the next: links alone carry it on."""
        op, attributes = message.nodes[0].op, message.nodes[0].attrs
        if op != "AllReduce" or attributes.get("site") not in self._meshes:
            return 0.0
        return self._messages.handed_on_s(attributes["site"], attributes["axes"], self._nbytes(message))

    def lanes(self, message: Communication) -> tuple[int, ...]:
        """Return the lanes that hold a message up, nothing where wires of its members tell it all."""
        op, attributes = message.nodes[0].op, message.nodes[0].attrs
        site, to = attributes.get("site"), attributes.get("to")
        if len(self._meshes) == 1 or site not in self._meshes:
            return ()
        if _is_along(op):
            return self._messages.lanes_along(op, site, attributes["axes"])
        return self._messages.sent_lanes(site, to) if to in self._meshes else ()

    def _nbytes(self, message: Communication) -> int:
        """Return the bytes of what is sent, as a whole where parts are made or joined."""
        return sum(max(map(self._bytes_of, (node.inputs, node.outputs))) for node in message.nodes)

    def _bytes_of(self, tensors: Sequence[gs.Tensor]) -> int:
        return sum(self._lowered.nbytes.get(tensor.name, 0) for tensor in tensors)


def _is_along(op: str) -> TypeGuard[AlongOp]:
    return op in get_args(AlongOp)
