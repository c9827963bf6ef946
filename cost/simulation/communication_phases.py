"""What a plan's communications send, and cost their members: phases of each kind, and which are the same."""

from collections.abc import Hashable, Sequence
from math import prod

import numpy as np

from partc.cost.cluster.cluster import ClusterRank
from partc.cost.cluster.profiles import PER_COMMUNICATION_S, PER_ROWS_S
from partc.cost.network import collectives
from partc.cost.network.collectives import COPY_TRAFFIC
from partc.cost.network.sums import all_reduce_of
from partc.cost.network.topology import Network, memory_of
from partc.cost.network.traffic import Phases
from partc.runtime.plan.moves import shape_of
from partc.runtime.plan.program import Exchange, Rank, Start
from partc.runtime.transports.communication import ROW_KINDS


def what_moves(start: Start) -> Hashable:
    """Return what all communications of a plan have in common that move the same between the same ranks."""
    sends = start.kind, start.payload_bytes, start.counts, start.rounds_to, start.by_levels
    return start.group, start.senders, start.receivers, sends, id(start.exchange)


def phases_of(start: Start, members: Sequence[Rank | ClusterRank], network: Network) -> Phases:
    """Return what one group sends for a communication. Members that are no senders send nothing.

    `payload_bytes` is the whole value for dense kinds, and for row kinds one member's part: what it
    sends, or for scatter_rows what it receives.
    """
    ends = [member.device for member in members]
    payload = start.payload_bytes
    sends = [payload if start.senders in member.sites else 0 for member in members]
    takes = [start.receivers in member.sites for member in members]
    match start.kind:
        case "all_reduce":
            way = collectives.rounded_all_reduce if start.rounds_to else collectives.all_reduce
            whole = 2 * payload if start.rounds_to else payload
            return all_reduce_of(network, ends, whole, way, start.by_levels)
        case "reduce":
            return collectives.reduce(network, ends, payload)
        case "broadcast":
            return collectives.broadcast(network, ends, payload)
        case "reduce_scatter":
            scatter = collectives.direct_reduce_scatter if start.rounds_to else collectives.reduce_scatter
            return scatter(network, ends, _regions(start, payload, len(ends)))
        case "all_gather":
            return collectives.all_gather(network, ends, _regions(start, payload, len(ends)))
        case "shift_ahead":
            return collectives.shift(network, ends, payload)
        case "shift_back":
            return collectives.shift(network, ends[::-1], payload)
        case "exchange":
            assert start.exchange is not None, "an exchange tells who has what"
            return collectives.exchange(network, ends, moved_bytes(start.exchange))
        case "gather_rows":
            return collectives.gather(network, ends, sends)
        case "scatter_rows":
            return collectives.scatter(network, ends, [payload * take for take in takes])
        case "all_gather_rows":
            return collectives.all_gather_rows(network, ends, sends)
        case "all_to_all_rows":
            shares = [take / max(1, sum(takes)) for take in takes]
            return collectives.all_to_all_rows(network, ends, sends, shares)


def own_s(start: Start, members: Sequence[Rank | ClusterRank], network: Network) -> float:
    """Return the seconds of its own that a member takes to begin and end a communication."""
    if start.kind in ROW_KINDS:
        return PER_ROWS_S if len(members) > 1 else PER_COMMUNICATION_S
    if len(members) > 1 or start.kind != "all_gather":
        return PER_COMMUNICATION_S
    memory = network.lane_number[memory_of(members[0].host)]
    return PER_COMMUNICATION_S + COPY_TRAFFIC * start.payload_bytes / float(network.bytes_per_s[memory])


def moved_bytes(exchange: Exchange) -> dict[tuple[int, int], int]:
    """Return what an exchange sends: (source, target) -> bytes, members by their positions."""
    itemsize = np.dtype(exchange.dtype).itemsize
    sent: dict[tuple[int, int], int] = {}
    for move in exchange.moves:
        if move.source != move.target:
            pair = move.source, move.target
            sent[pair] = sent.get(pair, 0) + prod(shape_of(move.region)) * itemsize
    return sent


def _regions(start: Start, whole_bytes: float, members: int) -> list[float]:
    """Return each member's region in bytes, in proportion to `counts`."""
    counts = start.counts or (1,) * members
    return [whole_bytes * count / max(1, sum(counts)) for count in counts]
