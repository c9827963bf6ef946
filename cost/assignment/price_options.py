"""List the ways in which a parameter may be synchronised, and price each on the cluster's network.

An option is a method and, on servers, the mechanisms of the Parallax paper (section 5.3.2), each on or
off. It is priced by the phases of network/two_level.py, its rows spread evenly over the servers.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from partc.cost.cluster.cluster import Cluster
from partc.cost.network.traffic import lane_loads, seconds_of
from partc.cost.network.two_level import even_shares, network_groups_of, owner_hosts, synchronise
from partc.cost.network.ways import Array
from partc.cost.strategy import Mechanism, Method, SyncFacts, Synchronisation

SyncOptions = tuple[Synchronisation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """What one parameter's synchronisation takes alone, and what it adds to the whole's."""

    seconds: float
    latency_s: float
    loads: Array  # bytes, float64[lanes]


def possible_methods(fact: SyncFacts, cluster: Cluster) -> tuple[Method, ...]:
    """Return the methods that can synchronise the parameter, the one that wins ties first."""
    can_be_served = fact.servable and fact.rows >= 1 and bool(owner_hosts(cluster))
    methods: list[Method] = ["all_gather"] if fact.sparse else []
    methods += ["all_reduce"] if fact.reducible else []
    methods += ["servers"] if can_be_served else []
    return tuple(methods)


def options_of(fact: SyncFacts, methods: Iterable[Method], without: Collection[Mechanism]) -> SyncOptions:
    """Return the options of some methods, preferred ones first: mechanisms on, unless switched off."""
    options: list[Synchronisation] = []
    for method in methods:
        if method != "servers":
            options.append(Synchronisation(method))
            continue
        for merged, site, moved in product(*_mechanisms(fact, without)):
            options.append(
                Synchronisation(method, local_aggregation=merged, post_aggregation=site, on_servers=moved)
            )
    return tuple(options)


def _mechanisms(
    fact: SyncFacts, without: Collection[Mechanism]
) -> tuple[tuple[bool, ...], tuple[Literal["worker", "server"], ...], tuple[tuple[str, ...], ...]]:
    merged: tuple[bool, ...] = (True, False) if fact.sparse else (True,)
    sites: tuple[Literal["worker", "server"], ...] = (
        ("server", "worker") if fact.has_post_aggregation else ("server",)
    )
    moved: tuple[tuple[str, ...], ...] = (fact.boundary_ops, ()) if fact.boundary_ops else ((),)
    return (
        merged[-1:] if "local-aggregation" in without else merged,
        sites[-1:] if "post-aggregation" in without else sites,
        moved[-1:] if "boundary-ops" in without else moved,
    )


class Prices:
    """Prices each option of each parameter once."""

    def __init__(self, cluster: Cluster) -> None:
        self.groups = network_groups_of(cluster)
        self.even_shares = even_shares(cluster)
        self._known: dict[tuple[object, ...], Price] = {}

    def price(self, fact: SyncFacts, how: Synchronisation, shares: tuple[float, ...] | None = None) -> Price:
        """Return an option's price; rows are spread evenly if no host's share is given."""
        shares = self.even_shares if shares is None else shares
        # Models repeat shapes: equal facts are priced once.
        key = (*alike(fact), option_key(how), shares)
        if key not in self._known:
            network = self.groups.network
            phases = synchronise(self.groups, fact, how, shares)
            latency_s = sum(phase.latency_s for phase in phases)
            self._known[key] = Price(seconds_of(network, phases), latency_s, lane_loads(network, phases))
        return self._known[key]


OptionKey = tuple[Method, bool, Literal["worker", "server"], bool]


def option_key(how: Synchronisation) -> OptionKey:
    """Return what of an option matters to its price."""
    return how.method, how.local_aggregation, how.post_aggregation, bool(how.on_servers)


def alike(fact: SyncFacts) -> tuple[object, ...]:
    """Return what of a parameter matters to its prices and to the memory that it takes."""
    return (
        fact.rows,
        fact.row_bytes,
        fact.slot_row_bytes,
        fact.sparse,
        fact.touched_rows,
        fact.distinct,
        fact.boundary_share,
    )
