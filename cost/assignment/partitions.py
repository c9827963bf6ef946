"""How many partitions, each on a server of its own, a large variable is split into.

    t(P) = latencies + busiest lane under all traffic, large variables in P even partitions

    P = 1          one server carries a variable's whole traffic
    P = servers    the traffic is spread as evenly as it can be, over the slowest link too
    P > servers    a server has several partitions, which lie next to each other

P is one number for all large variables, as for Parallax's partitioner (parallax-manual.txt): large are
those that the assignment to servers would split. Every P is priced up to the number of servers, or the
next multiple of it where the user asks for more (docs/decisions/009-partitions.md); no trial runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from partc.cost.assignment.row_spread import cut
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Host
from partc.cost.network.topology import network_of
from partc.cost.strategy import Shard, SyncFacts
from partc.runtime.errors import BadUsage, NoPlacement

TIE = 1e-6  # relative difference below which two predictions are equal


@dataclass(frozen=True, slots=True)
class PartitionSearch:
    """What every number of partitions was predicted to take, and the one taken."""

    predicted_s: Mapping[int, float]
    chosen: int


def search_partitions(
    price_s: Callable[[int], float], cluster: Cluster, min_partitions: int = 1
) -> PartitionSearch:
    """Return the number of partitions with the smallest price; ties to the greater, which spreads memory.

    `price_s` may raise NoPlacement: then a partition is too large for a server. Raises BadUsage, NoPlacement.
    """
    most = check_partitions(cluster, min_partitions)
    predicted_s: dict[int, float] = {}
    failure: NoPlacement | None = None
    for partitions in range(min_partitions, most + 1):
        try:
            predicted_s[partitions] = price_s(partitions)
        except NoPlacement as error:
            failure = error
    if not predicted_s and failure is not None:
        raise failure
    limit_s = min(predicted_s.values()) * (1 + TIE)
    return PartitionSearch(predicted_s, max(p for p, time_s in predicted_s.items() if time_s <= limit_s))


def check_partitions(cluster: Cluster, partitions: int) -> int:
    """Return the most partitions worth trying, from `partitions` on: as many on every server.

    Raises BadUsage of less than one.
    """
    if partitions < 1:
        raise BadUsage(f"{partitions} partitions", at="min_partitions", fix="ask for at least one")
    servers = max(1, sum(host.server for host in cluster.hosts))
    return servers * -(-partitions // servers)


def partition_evenly(
    facts: Sequence[SyncFacts], cluster: Cluster, partitions: int
) -> dict[str, tuple[Shard, ...]]:
    """Return the servers' shards of `partitions` equal parts of each of `facts`, as far as it has rows.

    Parts go to the servers that would be done first with what they carry so far. Of more parts than servers
    each server has several, as one shard.
    """
    servers = [host for host in cluster.hosts if host.server]
    rates = _rates(servers, cluster)
    busy_s = dict.fromkeys(rates, 0.0)
    shards: dict[str, tuple[Shard, ...]] = {}
    for fact in sorted(facts, key=lambda fact: (-fact.touched_rows * fact.row_bytes, fact.name)):
        count = min(partitions, fact.rows)
        share_bytes = fact.touched_rows * fact.row_bytes / count
        # In host order where several are equally fast: sorting is stable.
        quickest = sorted(rates, key=lambda name: busy_s[name] + share_bytes / rates[name])[:count]
        each, more = divmod(count, len(quickest))
        parts = {name: each + (place < more) for place, name in enumerate(quickest)}
        for name in quickest:
            busy_s[name] += parts[name] * share_bytes / rates[name]
        shards[fact.name] = _shards(
            fact, {host.name: parts[host.name] for host in servers if host.name in parts}
        )
    return shards


def _shards(fact: SyncFacts, parts: Mapping[str, int]) -> tuple[Shard, ...]:
    """Return each host's shard, of so many equal parts."""
    hosts, count = list(parts), sum(parts.values())
    pieces = cut(fact.spread, fact.rows, [number / count for number in parts.values()])
    ends = [0, *accumulate(pieces)]
    return tuple(Shard(host, start, stop) for host, (start, stop) in zip(hosts, pairwise(ends), strict=True))


def _rates(servers: Sequence[Host], cluster: Cluster) -> dict[str, float]:
    """Return how fast each server's narrowest way to its quickest neighbour is."""
    network = network_of(cluster)
    names = [host.name for host in servers]
    return {
        name: max((network.route(name, o).bytes_per_s for o in names if o != name), default=1.0)
        for name in names
    }
