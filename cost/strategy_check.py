"""Hold a strategy that a person may have edited to the model and the cluster."""

from collections.abc import Iterable, Sequence

from partc.cost.cluster.cluster import Cluster
from partc.cost.strategy import Shard, Strategy, SyncFacts, Synchronisation
from partc.runtime.errors import BadStrategy, some_of


def check_strategy(strategy: Strategy, facts: Iterable[SyncFacts], cluster: Cluster) -> None:
    """Raise BadStrategy where the strategy does not fit.

    A parameter that it leaves out, or on servers without shards, is for partc to decide.
    """
    known = {fact.name: fact for fact in facts}
    hosts = [host.name for host in cluster.hosts if host.server]
    for name, synchronisation in strategy.parameters.items():
        if name not in known:
            raise BadStrategy(
                f"unknown parameter {name!r}",
                at=f"parameters: {name}",
                fix=f"use one of {some_of(known)}, or remove the entry",
            )
        _check_method(synchronisation, known[name], hosts)
        _check_mechanisms(synchronisation, known[name])
        if synchronisation.shards:
            _check_shards(synchronisation.shards, known[name], hosts)


def _check_method(synchronisation: Synchronisation, fact: SyncFacts, hosts: Sequence[str]) -> None:
    at = f"parameters: {fact.name}: method"
    if synchronisation.method == "all_gather" and not fact.sparse:
        raise BadStrategy(
            "all_gather for a parameter with a dense gradient", at=at, fix='write "all_reduce" or "servers"'
        )
    if synchronisation.method == "all_reduce" and not fact.reducible:
        raise BadStrategy(
            "all_reduce for a parameter whose update moves the rows that were read, and no others",
            at=at,
            fix='write "all_gather" or "servers", or choose an optimizer that is not lazy',
        )
    if synchronisation.method != "servers":
        if synchronisation.shards:
            raise BadStrategy(
                f"shards under the method {synchronisation.method!r}",
                at=f"parameters: {fact.name}: shards",
                fix='remove the shards, or write the method "servers"',
            )
        return
    if not hosts:
        raise BadStrategy(
            "servers, on a cluster whose hosts all say `server: false`",
            at=at,
            fix='write "all_reduce", or let a host of the cluster be a server',
        )
    if not fact.servable or fact.rows < 1:
        raise BadStrategy("servers for a parameter that cannot live there", at=at, fix='write "all_reduce"')


def _check_mechanisms(synchronisation: Synchronisation, fact: SyncFacts) -> None:
    at = f"parameters: {fact.name}"
    alone = Synchronisation(synchronisation.method, synchronisation.shards)
    if synchronisation.method != "servers" and synchronisation != alone:
        raise BadStrategy(
            f"a mechanism of servers under the method {synchronisation.method!r}",
            at=at,
            fix='write the method "servers", or remove local_aggregation, post_aggregation and on_servers',
        )
    if unknown := set(synchronisation.on_servers) - set(fact.boundary_ops):
        some = some_of(fact.boundary_ops) if fact.boundary_ops else "no node of this parameter"
        raise BadStrategy(
            f"servers cannot run node {min(unknown)!r} for this parameter",
            at=f"{at}: on_servers",
            fix=f"servers may run {some}",
        )


def _check_shards(shards: Sequence[Shard], fact: SyncFacts, hosts: Sequence[str]) -> None:
    next_row, next_host = 0, 0
    for i, shard in enumerate(shards):
        at = f"parameters: {fact.name}: shards[{i}]"
        if shard.host not in hosts:
            raise BadStrategy(
                f"unknown server {shard.host!r}", at=f"{at}.host", fix=f"use one of {some_of(hosts)}"
            )
        position = hosts.index(shard.host)
        if position < next_host:
            raise BadStrategy(
                f"{shard.host!r} is out of the cluster's order of hosts, or owns two shards",
                at=f"{at}.host",
                fix=f"give each host one shard, in the order {some_of(hosts)}",
            )
        if shard.start != next_row:
            raise BadStrategy(
                f"rows [{min(next_row, shard.start)}, {max(next_row, shard.start)}) "
                f"{'belong to nobody' if shard.start > next_row else 'belong to two shards'}",
                at=f"{at}.start",
                fix=f"write {next_row}",
            )
        if not shard.start < shard.stop <= fact.rows:
            raise BadStrategy(
                f"stop {shard.stop} of a shard that starts at {shard.start}, of {fact.rows} rows",
                at=f"{at}.stop",
                fix=f"write a row from {shard.start + 1} to {fact.rows}",
            )
        next_row, next_host = shard.stop, position + 1
    if next_row != fact.rows:
        raise BadStrategy(
            f"rows [{next_row}, {fact.rows}) belong to nobody",
            at=f"parameters: {fact.name}: shards",
            fix=f"let the last shard stop at {fact.rows}",
        )
