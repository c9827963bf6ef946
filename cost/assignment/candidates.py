"""Whole strategies that are worth a price: a mode's, the integer program's, and those one move away.

    named      an option for every parameter, as a mode or the ILP (choose_options.py) takes it
    moves      the same but for parameters that are alike: another method, other mechanisms, other shards

A candidate has shards for what servers own, within the servers' memory. What it would communicate is priced
here, by the busiest lane; the whole step by whoever simulates it (search_strategy.py).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from msgspec import structs

from partc.cost.assignment.choose_options import OptionSolution, choose_options
from partc.cost.assignment.partitions import partition_evenly
from partc.cost.assignment.price_options import (
    Prices,
    SyncOptions,
    alike,
    option_key,
    options_of,
    possible_methods,
)
from partc.cost.assignment.row_spread import share_of_traffic
from partc.cost.assignment.server_assignment import ServerAssignment, assign_to_servers
from partc.cost.cluster.cluster import Cluster
from partc.cost.strategy import (
    STRATEGY_FORMAT,
    Batch,
    Mechanism,
    Method,
    Shard,
    Strategy,
    SyncFacts,
    Synchronisation,
)
from partc.runtime.errors import NoPlacement

EVERYTHING_REDUCED = "everything AllReduced"
BUSIEST_LINK = "busiest link"  # what the ILP makes the best of


@dataclass(frozen=True, slots=True)
class Candidate:
    """An option for every parameter, with shards and the price of what it communicates.

    `certain_s` is the busiest lane's time of what is summed whole, whose bytes no estimate enters.
    `partitions`: of parameters whose number of shards a move has settled.
    """

    name: str
    chosen: Mapping[str, Synchronisation]
    shards: Mapping[str, tuple[Shard, ...]]
    assignment: ServerAssignment | None
    total_s: float
    certain_s: float
    solution: OptionSolution | None
    partitions: Mapping[str, int] = field(default_factory=dict)

    def strategy(self, batch: Batch) -> Strategy:
        """Return the candidate as a strategy."""
        parameters = {
            name: structs.replace(how, shards=self.shards.get(name, ())) for name, how in self.chosen.items()
        }
        return Strategy(format=STRATEGY_FORMAT, batch=batch, parameters=parameters)


@dataclass(frozen=True, slots=True)
class AssignmentMove:
    """A change of parameters that are alike: to an option, or to a number of shards."""

    names: tuple[str, ...]
    option: Synchronisation | None = None
    partitions: int | None = None


class Candidates:
    """Makes candidates for one model on one cluster. `pins`: the user's own decisions."""

    def __init__(
        self,
        facts: Sequence[SyncFacts],
        cluster: Cluster,
        pins: Mapping[str, Synchronisation] = MappingProxyType({}),
        without: Collection[Mechanism] = (),
        partitions: int | None = None,
    ) -> None:
        self.facts = facts
        self.cluster = cluster
        self.pins = pins
        self.without = without
        self.partitions = partitions
        self.prices = Prices(cluster)

    def seconds(self, fact: SyncFacts) -> dict[Method, float]:
        """Return what every possible method takes alone, its mechanisms as its quickest option has them."""
        return {
            method: min(
                self.prices.price(fact, option).seconds
                for option in options_of(fact, (method,), self.without)
            )
            for method in possible_methods(fact, self.cluster)
        }

    def named(self, names: Sequence[str]) -> list[Candidate]:
        """Return the candidates whose variables fit on the servers, at least one. Raises NoPlacement."""
        candidates: list[Candidate] = []
        failure: NoPlacement | None = None
        for name in names:
            try:
                candidates.append(self._named(name))
            except NoPlacement as error:
                failure = failure or error
        if not candidates and failure is not None:
            raise failure
        return candidates

    def _named(self, name: str) -> Candidate:
        options = {fact.name: self._options(fact, name) for fact in self.facts}
        solution = choose_options(self.facts, options, self.cluster, self.prices)
        chosen = solution.chosen if solution else {fact.name: options[fact.name][0] for fact in self.facts}
        return self._candidate(name, chosen, {}, solution)

    def _candidate(
        self,
        name: str,
        chosen: Mapping[str, Synchronisation],
        partitions: Mapping[str, int],
        solution: OptionSolution | None = None,
    ) -> Candidate:
        chosen = {fact.name: chosen[fact.name] for fact in self.facts}
        shards, assignment = self._assign(chosen, partitions)
        total_s, certain_s = self._communication_s(chosen, shards)
        return Candidate(name, chosen, shards, assignment, total_s, certain_s, solution, partitions)

    def _options(self, fact: SyncFacts, candidate: str) -> SyncOptions:
        if fact.name in self.pins:
            return (structs.replace(self.pins[fact.name], shards=()),)
        possible = possible_methods(fact, self.cluster)
        return options_of(fact, _allowed(fact, possible, candidate), self.without)

    def _assign(
        self, chosen: Mapping[str, Synchronisation], partitions: Mapping[str, int]
    ) -> tuple[dict[str, tuple[Shard, ...]], ServerAssignment | None]:
        served = [fact for fact in self.facts if chosen[fact.name].method == "servers"]
        if not served:
            return {}, None
        pinned = {fact.name: self.pins[fact.name].shards for fact in served if fact.name in self.pins}
        for count in sorted(set(partitions.values())):
            own = [fact for fact in served if partitions.get(fact.name) == count]
            pinned = partition_evenly(own, self.cluster, count) | pinned
        shards, assignment = assign_to_servers(served, self.cluster, pinned)
        if self.partitions is not None:
            large = [fact for fact in served if len(shards[fact.name]) > 1]
            even = partition_evenly(large, self.cluster, self.partitions)
            shards, assignment = assign_to_servers(served, self.cluster, even | pinned)
        return shards, assignment

    def _communication_s(
        self, chosen: Mapping[str, Synchronisation], shards: Mapping[str, tuple[Shard, ...]]
    ) -> tuple[float, float]:
        """Return what a step communicates, and the busiest lane's time of what is summed whole."""
        network = self.prices.groups.network
        loads, certain = np.zeros(len(network.lanes)), np.zeros(len(network.lanes))
        latency_s = 0.0
        for fact in self.facts:
            method = chosen[fact.name].method
            shares = _shares(shards[fact.name], fact, self.cluster) if method == "servers" else None
            price = self.prices.price(fact, chosen[fact.name], shares)
            latency_s += price.latency_s
            loads += price.loads
            if method == "all_reduce" or not fact.sparse:
                certain += price.loads
        return latency_s + network.busiest_s(loads), network.busiest_s(certain)

    # ------------------------------------------------------------ one move away

    def after(self, base: Candidate, move: AssignmentMove) -> Candidate | None:
        """Return what a move makes of a candidate, None where that does not fit on the servers."""
        moved = dict.fromkeys(move.names)
        chosen = {
            name: move.option if move.option and name in moved else how for name, how in base.chosen.items()
        }
        partitions = {name: count for name, count in base.partitions.items() if name not in moved}
        if move.partitions is not None:
            partitions |= dict.fromkeys(move.names, move.partitions)
        try:
            return self._candidate(base.name, chosen, partitions)
        except NoPlacement:
            return None

    def moves(self, base: Candidate) -> Iterator[AssignmentMove]:
        """Yield the moves from a candidate, those that promise most first.

        Sparse parameters come before dense ones, since their ways differ more; among these, what saves most
        (or loses least) if each is priced alone.
        """
        moves: list[tuple[bool, float, int, AssignmentMove]] = []
        for group in self._groups():
            fact, how = group[0], base.chosen[group[0].name]
            names = tuple(alike_one.name for alike_one in group)
            now_s = sum(self.prices.price(fact, base.chosen[name]).seconds for name in names)
            for option in options_of(fact, possible_methods(fact, self.cluster), self.without):
                if any(base.chosen[name] != option for name in names):
                    saved_s = now_s - len(names) * self.prices.price(fact, option).seconds
                    moves.append((not fact.sparse, -saved_s, len(moves), AssignmentMove(names, option)))
            if how.method == "servers":
                moves += [
                    (not fact.sparse, 0.0, len(moves), AssignmentMove(names, partitions=count))
                    for count in self._other_counts(len(base.shards[fact.name]), fact)
                ]
        yield from (move for *_, move in sorted(moves, key=lambda entry: entry[:3]))

    def _groups(self) -> list[list[SyncFacts]]:
        """Return parameters that are alike in all that matters to their price; not the user's own."""
        groups: dict[tuple[object, ...], list[SyncFacts]] = {}
        for fact in self.facts:
            if fact.name not in self.pins:
                options = options_of(fact, possible_methods(fact, self.cluster), self.without)
                groups.setdefault((*alike(fact), *map(option_key, options)), []).append(fact)
        return list(groups.values())

    def _other_counts(self, now: int, fact: SyncFacts) -> list[int]:
        """Return other numbers of shards: one, all servers, and all but one, which leaves a slow one out."""
        servers = sum(host.server for host in self.cluster.hosts)
        if self.partitions is not None:
            return []
        return [count for count in (servers, servers - 1, 1) if 1 <= count <= fact.rows and count != now]


def _allowed(fact: SyncFacts, possible: tuple[Method, ...], candidate: str) -> tuple[Method, ...]:
    """Return the methods that a candidate lets a parameter take."""
    if candidate == BUSIEST_LINK:
        return possible
    if candidate == EVERYTHING_REDUCED:
        return ("all_reduce",) if "all_reduce" in possible else ("all_gather",)
    wants_servers = candidate == "ps" or (candidate == "hybrid" and fact.sparse)
    if wants_servers and "servers" in possible:
        return ("servers",)
    return ("all_gather",) if fact.sparse else ("all_reduce",)


def _shares(shards: Sequence[Shard], fact: SyncFacts, cluster: Cluster) -> tuple[float, ...]:
    carried = {s.host: share_of_traffic(fact.spread, fact.rows, s.start, s.stop) for s in shards}
    return tuple(carried.get(host.name, 0.0) for host in cluster.hosts)
