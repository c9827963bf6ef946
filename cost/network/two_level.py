"""Synchronise one parameter, in two levels but for all_gather: within every host, then among hosts.

    all_reduce   a sum of all workers, in the way that is quicker (sums.py)
    all_gather   rows of all workers, in one collective of all of them
    servers      dense   workers ──reduce──> server ──reduce-scatter──> owners, which update;
                         owners ──all-gather──> servers ──broadcast──> workers
                 sparse  pull  ids to the host's server, distinct ids to owners, rows back
                         push  ids and rows to the host's server, summed per id, to owners
                 without local aggregation rows that several workers want or made cross one by one
                 ops after aggregation on workers: what owners summed goes to all workers, and back

W parameter bytes, alpha the share of rows that one worker touches, N hosts of one worker each: a
worker sends and receives, together, 2 W (dense) or 2 alpha W (sparse) with servers, 4 W (N - 1) / N
with all_reduce and 2 alpha W (N - 1) with all_gather, ids left out: table 3 of Kim et al.,
"Parallax: Automatic Data-Parallel Training of Deep Neural Networks", arXiv:1808.02621. A *host*
carries more with servers, since it is a server too: 4 W (N - 1) / N, as with all_reduce.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partc.cost.cluster.cluster import Cluster, groups_of, ranks_of
from partc.cost.network.collectives import (
    all_gather,
    all_gather_rows,
    all_reduce,
    all_reduce_by_levels,
    all_to_all_rows,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from partc.cost.network.families import Family, families_of, in_every
from partc.cost.network.sums import goes_by_levels
from partc.cost.network.topology import Network, network_of
from partc.cost.network.traffic import Phases
from partc.cost.strategy import SyncFacts, Synchronisation

ID_BYTES = 8  # int64


@dataclass(frozen=True, slots=True)
class NetworkGroups:
    """The network, and the ends that meet on it. Equal hosts are one family."""

    network: Network
    workers: tuple[str, ...]  # of all hosts
    working: frozenset[str]  # the same
    workers_of_hosts: tuple[int, ...]
    host: tuple[Family, ...]  # for each host its server, then its workers
    servers: tuple[str, ...]
    feed: tuple[Family, ...]  # for each host with workers its first, then whom it tells


def network_groups_of(cluster: Cluster) -> NetworkGroups:
    """Return the ends of cluster's ranks by the groups in which they meet."""
    ranks = ranks_of(cluster)
    ends = {rank.rank: rank.device for rank in ranks}
    working = frozenset(rank.device for rank in ranks if rank.replica is not None)
    groups = {
        name: tuple(tuple(ends[rank] for rank in members) for members in instances)
        for name, instances in groups_of(cluster).items()
    }
    network = network_of(cluster)

    def alike(name: str) -> tuple[Family, ...]:
        return families_of(network, groups[name], lambda end: end in working)

    return NetworkGroups(
        network=network,
        workers=groups["workers"][0],
        working=working,
        workers_of_hosts=tuple(len(members) for members in groups["host_workers"]),
        host=alike("host"),
        servers=groups["servers"][0],
        feed=alike("feed"),
    )


def owner_hosts(cluster: Cluster) -> tuple[str, ...]:
    """Return the hosts that may own variables."""
    return tuple(host.name for host in cluster.hosts if host.server)


def even_shares(cluster: Cluster) -> tuple[float, ...]:
    """Return the share of a parameter that each host owns if it is split evenly, in host order."""
    owners = max(1, len(owner_hosts(cluster)))
    return tuple(1 / owners if host.server else 0.0 for host in cluster.hosts)


def synchronise(
    groups: NetworkGroups, facts: SyncFacts, how: Synchronisation, shares: tuple[float, ...]
) -> Phases:
    """Return what is sent for one parameter in a step.

    `shares`: of its rows, by host; they only matter to servers. The shards of `how` do not count.
    """
    if how.method == "all_reduce":
        return _all_reduce(groups, facts.bytes)
    if how.method == "all_gather":
        return _all_gather(groups, facts)
    after = _post_aggregation(groups, facts, shares) if how.post_aggregation == "worker" else ()
    if facts.sparse:
        return _pull(groups, facts, how, shares) + _push(groups, facts, how, shares) + after
    return _serve_dense(groups, facts, how, shares) + after


def _all_reduce(groups: NetworkGroups, message_bytes: float) -> Phases:
    network, workers = groups.network, groups.workers
    way = all_reduce_by_levels if goes_by_levels(network, (workers,), message_bytes) else all_reduce
    return way(network, workers, message_bytes)


def _all_gather(groups: NetworkGroups, facts: SyncFacts) -> Phases:
    part = facts.touched_rows * (facts.row_bytes + ID_BYTES)
    return all_gather_rows(groups.network, groups.workers, [part] * len(groups.workers))


def _serve_dense(
    groups: NetworkGroups, facts: SyncFacts, how: Synchronisation, shares: tuple[float, ...]
) -> Phases:
    network = groups.network
    fetched = facts.bytes * _fetched_share(facts, how)
    return (
        in_every(network, groups.host, lambda m: reduce(network, m, facts.bytes))
        + reduce_scatter(network, groups.servers, [share * facts.bytes for share in shares])
        + all_gather(network, groups.servers, [share * fetched for share in shares])
        + in_every(network, groups.host, lambda m: broadcast(network, m, fetched))
    )


def _fetched_share(facts: SyncFacts, how: Synchronisation) -> float:
    return facts.boundary_share if how.on_servers else 1.0


def _post_aggregation(groups: NetworkGroups, facts: SyncFacts, shares: tuple[float, ...]) -> Phases:
    """What the owners summed goes to every worker, and from one worker of each host to its server."""
    network = groups.network
    rows = distinct_rows(facts, len(groups.workers)) if facts.sparse else facts.rows
    summed = rows * facts.row_bytes
    return (
        all_gather_rows(network, groups.servers, [share * summed for share in shares])
        + in_every(network, groups.host, lambda m: broadcast(network, m, summed))
        + in_every(network, groups.feed, lambda m: broadcast(network, m, summed))
    )


def _pull(groups: NetworkGroups, facts: SyncFacts, how: Synchronisation, shares: tuple[float, ...]) -> Phases:
    network = groups.network
    row_bytes = facts.row_bytes * _fetched_share(facts, how)
    per_host = _rows_per_host(groups, facts, how)
    requested, rows_back = [rows * ID_BYTES for rows in per_host], [rows * row_bytes for rows in per_host]
    ids, rows = facts.touched_rows * ID_BYTES, facts.touched_rows * row_bytes
    return (
        in_every(network, groups.host, lambda m: gather(network, m, _of_workers(groups, m, ids)))
        + all_to_all_rows(network, groups.servers, requested, shares)
        + all_to_all_rows(network, groups.servers, shares, rows_back)
        + in_every(network, groups.host, lambda m: scatter(network, m, _of_workers(groups, m, rows)))
    )


def _push(groups: NetworkGroups, facts: SyncFacts, how: Synchronisation, shares: tuple[float, ...]) -> Phases:
    network = groups.network
    row = facts.row_bytes + ID_BYTES
    part = facts.touched_rows * row
    sent = [rows * row for rows in _rows_per_host(groups, facts, how)]
    return in_every(
        network, groups.host, lambda m: gather(network, m, _of_workers(groups, m, part))
    ) + all_to_all_rows(network, groups.servers, sent, shares)


def _of_workers(groups: NetworkGroups, members: Sequence[str], part: float) -> list[float]:
    """Return what each member contributes: nothing from a server that is no worker."""
    return [part if member in groups.working else 0.0 for member in members]


def _rows_per_host(groups: NetworkGroups, facts: SyncFacts, how: Synchronisation) -> list[float]:
    counts = groups.workers_of_hosts
    if not how.local_aggregation:
        return [facts.touched_rows * count for count in counts]
    rows = {count: distinct_rows(facts, count) for count in set(counts)}
    return [rows[count] for count in counts]


def distinct_rows(facts: SyncFacts, replicas: int) -> float:
    """Return the distinct rows that several replicas are expected to touch together.

        R (1 - (1 - t / R) ^ k)        R rows, t touched by one replica, k replicas

    Holds for independent and evenly spread ids; skewed ids (words) overlap more, so it is high.
    Rows that were measured for so many replicas count instead.
    """
    measured = dict(facts.distinct)
    if replicas in measured:
        return measured[replicas]
    if facts.touched_rows >= facts.rows:
        return float(facts.rows)
    return facts.rows * (1.0 - (1.0 - facts.touched_rows / facts.rows) ** replicas)
