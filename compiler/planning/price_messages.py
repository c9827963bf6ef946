"""What messages take on links, level by level: along axes of a mesh, between meshes, to and from servers."""

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from partc.compiler.planning.mesh_messages import MeshMessages, is_along
from partc.compiler.planning.server_messages import SERVER_OPS, ServerMessages
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.profiles import CPU_START_S, PER_COMMUNICATION_S, PER_ROWS_S
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.levels import levels_of
from partc.passes.scheduling.resources import MessageLevel
from partc.passes.scheduling.schedule import Communication, Item
from partc.runtime.plan.program import Site


class MessagePrices:
    """Prices of a step's messages, as the simulator has them."""

    def __init__(self, lowered: LoweredGraph, cluster: Cluster) -> None:
        self._lowered = lowered
        self._messages = MeshMessages(lowered.meshes, cluster)
        self._to_servers = ServerMessages(cluster)
        # Else wires of a message's members tell all that holds it up.
        self._may_share_lanes = len(lowered.meshes.each) > 1 or "server" in lowered.site_of.values()

    def __call__(self, item: Item) -> float:
        """Return the seconds of a message, from its beginning at a rank to its end, or to begin a segment."""
        if not isinstance(item, Communication):
            return CPU_START_S
        return sum(level.seconds for level in self.levels(item))

    def levels(self, message: Communication) -> tuple[MessageLevel, ...]:
        """Return what a message takes, one level behind the other."""
        node = message.nodes[0]
        site, to = node.attrs.get("site"), node.attrs.get("to")
        if node.op in SERVER_OPS or site == "server":
            levels = levels_of(message, self._messages.grid, self._lowered)
            return tuple(map(self._to_servers.level, levels))
        return (self._along(message, site) if is_along(node.op) else self._between(message, site, to),)

    def handed_on_s(self, node: gs.Node) -> float:
        """Return how long before its end others may follow what would be sent alone: a sum by levels."""
        if node.op != "AllReduce" or node.attrs["site"] == "server":
            return 0.0
        return self._along(Communication((node,), None), node.attrs["site"]).handed_on_s

    def _along(self, message: Communication, site: Site) -> MessageLevel:
        op, axes, nbytes = message.nodes[0].op, message.nodes[0].attrs["axes"], self._nbytes(message)
        assert is_along(op)
        own_s = PER_ROWS_S if op == "AllGatherRows" else PER_COMMUNICATION_S
        lanes = self._messages.lanes_along(op, site, axes) if self._may_share_lanes else ()
        handed_on_s = self._messages.handed_on_s(site, axes, nbytes) if op == "AllReduce" else 0.0
        return MessageLevel(
            (site,), lanes, own_s + self._messages.along_s(op, site, axes, nbytes), handed_on_s
        )

    def _between(self, message: Communication, site: Site, to: Site) -> MessageLevel:
        node = message.nodes[0]
        if node.op == "Exchange":
            seconds = self._messages.exchanged_s(node)
        else:
            seconds = self._messages.sent_s(site, to, self._nbytes(message))
        lanes = self._messages.sent_lanes(site, to) if self._may_share_lanes else ()
        return MessageLevel((site, to), lanes, PER_COMMUNICATION_S + seconds)

    def _nbytes(self, message: Communication) -> int:
        """Return the bytes of what is sent, as a whole where parts are made or joined."""
        return sum(max(map(self._bytes_of, (node.inputs, node.outputs))) for node in message.nodes)

    def _bytes_of(self, tensors: Sequence[gs.Tensor]) -> int:
        return sum(self._lowered.nbytes.get(tensor.name, 0) for tensor in tensors)
