"""What messages take on links: sums along axes of a mesh, and from mesh to mesh; others, roughly."""

from partc.compiler.planning.mesh_messages import MeshMessages
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.profiles import CPU_START_S, PER_COMMUNICATION_S
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Communication, Item


class MessagePrices:
    """Prices of a step's messages; of what stays in a mesh and is no sum, its bytes over the slowest link."""

    def __init__(self, lowered: LoweredGraph, cluster: Cluster, slowest_bytes_per_s: float) -> None:
        self._lowered = lowered
        self._slowest_bytes_per_s = slowest_bytes_per_s
        self._meshes = {mesh.name for mesh in lowered.meshes.each}
        self._messages = MeshMessages(lowered.meshes, cluster)

    def __call__(self, item: Item) -> float:
        """Return the seconds of a message, from its beginning at a rank to its end, or to begin a segment."""
        if not isinstance(item, Communication):
            return CPU_START_S
        first = item.nodes[0]
        values = [tensor.name for node in item.nodes for tensor in node.outputs]
        nbytes = sum(self._lowered.nbytes.get(value, 0) for value in values)
        site, to = first.attrs.get("site"), first.attrs.get("to")
        if first.op == "AllReduce" and site != "server":
            return PER_COMMUNICATION_S + self._messages.sum_s(site, first.attrs["axes"], nbytes)
        if self._meshes.issuperset((site, to)):
            return PER_COMMUNICATION_S + self._messages.sent_s(site, to, nbytes)
        return PER_COMMUNICATION_S + nbytes / self._slowest_bytes_per_s

    def lanes(self, message: Communication) -> tuple[int, ...]:
        """Return the lanes that hold a message up, nothing where wires of its members tell it all."""
        first = message.nodes[0]
        site, to = first.attrs.get("site"), first.attrs.get("to")
        if len(self._meshes) == 1 or site not in self._meshes:
            return ()
        if first.op == "AllReduce":
            return self._messages.sum_lanes(site, first.attrs["axes"])
        return self._messages.sent_lanes(site, to) if to in self._meshes else ()
