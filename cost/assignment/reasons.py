"""Say in plain English why a parameter is synchronised as it is."""

from collections.abc import Iterator, Mapping

from partc.cost.strategy import Method, SyncFacts, Synchronisation

WAYS: dict[Method, str] = {
    "all_reduce": "to sum the whole parameter on every worker (AllReduce)",
    "all_gather": "to send every worker's rows to all others (AllGather)",
    "servers": "to fetch and return {rows} through the servers that own {it}",
}


def explain(
    fact: SyncFacts,
    how: Synchronisation,
    seconds: Mapping[Method, float],
    *,
    workers: int,
    asked_for: str | None = None,
) -> str:
    """Return one or two sentences with the predicted times of the choice and its alternatives."""
    if workers == 1:
        return "There is one worker only, so nothing has to be sent."
    background = _sparse_background(fact) if fact.sparse else _dense_background(fact)
    verdict = _verdict(fact, how.method, seconds) + "".join(_mechanisms(fact, how))
    if not fact.servable:
        verdict += " It cannot live on a server."
    return " ".join(([f"{asked_for}."] if asked_for else []) + [background, verdict])


def _mechanisms(fact: SyncFacts, how: Synchronisation) -> Iterator[str]:
    if how.method != "servers":
        return
    if fact.sparse and not how.local_aggregation:
        yield " Each worker's rows cross the network one by one: local aggregation is off."
    if how.post_aggregation == "worker":
        yield " Ops between the summed gradient and the update run on the workers, which fetch the sum."
    if how.on_servers:
        saved = f"{(1 - fact.boundary_share) * 100:.0f} %"
        yield f" The servers run {', '.join(how.on_servers)}, which saves {saved} of what is fetched."


def _sparse_background(fact: SyncFacts) -> str:
    return (
        f"One replica touches about {fact.touched_rows:,.0f} of its {fact.rows:,} rows in a step "
        f"({fact.touched_rows / max(1, fact.rows) * 100:.2f} %), "
        f"{'as measured from sample data' if fact.distinct else 'if all were drawn alike'}."
    )


def _dense_background(fact: SyncFacts) -> str:
    return f"Every step changes all of its {in_bytes(fact.bytes)}, so every worker needs the whole sum."


def _verdict(fact: SyncFacts, method: Method, seconds: Mapping[Method, float]) -> str:
    own = f"It is predicted to take {in_seconds(seconds[method])} {_way(fact, method)}"
    others = [
        f"{in_seconds(other_s)} {_way(fact, other)}" for other, other_s in seconds.items() if other != method
    ]
    if not others:
        return f"{own}."
    is_best = seconds[method] <= min(seconds.values()) * (1 + 1e-6)
    return f"{own}, {'against' if is_best else 'although it would take'} {' and '.join(others)}."


def _way(fact: SyncFacts, method: Method) -> str:
    rows, it = ("just those rows", "them") if fact.sparse else ("it", "it")
    return WAYS[method].format(rows=rows, it=it)


def in_seconds(seconds: float) -> str:
    """Print a time with a unit a person reads: 2.1 ms."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def in_bytes(size: float) -> str:
    """Print a size with a unit a person reads: 1.64 GB."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"
