"""Let what others wait for be made, and sent, before what nobody waits for.

    of y = x W on the way back            in the order of the graph     here
    dW = x' dy, which ends in a sum       dW  sum(dW)  dx  send(dx)     dx  send(dx)  dW  sum(dW)
    dx = dy W', which other ranks want

Messages of a rank go one after the other, so that dx would wait for dW's sum.
"""

from collections.abc import Mapping

from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.scheduling.bucket_communications import communications_ahead

SENT, NEVER = -1, 2**62


def lead_first(lowered: LoweredGraph, position_of: Mapping[str, int]) -> dict[str, int]:
    """Return places for nodes that have one in the original graph.

    What at most one more message comes of goes behind what reads the same and leads to several, up to where
    the first of these is sent.
    """
    ahead = communications_ahead(lowered)
    sent_at: dict[str, int] = {}  # value -> the place where the first message that comes of it may be sent
    for node in reversed(lowered.nodes):
        place = min(
            (sent_at[tensor.name] for tensor in node.outputs if tensor.name in sent_at), default=NEVER
        )
        if is_communication(node):
            place = SENT if ahead[node.name] else NEVER
        elif place == SENT:
            place = position_of.get(node.name, NEVER)
        for tensor in node.inputs if place != NEVER else ():
            sent_at[tensor.name] = min(place, sent_at.get(tensor.name, NEVER))
    places = {name: 2 * position for name, position in position_of.items()}
    for node in lowered.nodes:
        if node.name in position_of and ahead[node.name] <= 1:
            behind = max((sent_at.get(tensor.name, SENT) for tensor in node.inputs), default=SENT)
            places[node.name] = max(places[node.name], 2 * behind + 1)
    return places
