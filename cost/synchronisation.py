"""Choose how each parameter's gradient is summed: by AllReduce, AllGather of rows, or servers.

    auto       what one ILP finds best for all parameters together (choose_options.py); ties to AllReduce,
               those of sparse parameters to AllGather, which keeps gradient and update sparse. Never
               predicted slower than the strategies below: else that one is taken
    hybrid     Parallax's rule: sparse parameters on servers, dense ones AllReduced (section 5.3.1)
    allreduce  Parallax's MPI: dense ones AllReduced, rows of sparse ones AllGathered (section 5.2)
    ps         servers for everything that can live there (section 5.1)

Where a mode settles the method, the ILP still decides which mechanisms of section 5.3.2 are used.
One parameter is priced by the phases of two_level.py, its rows spread evenly over the servers; a
whole strategy by the busiest lane under the traffic of all parameters, shards where they really
are, plus all latencies. The update's own time is left out: it is short beside the wire's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
from msgspec import structs

from partc.cost.choose_options import OptionSolution, choose_options
from partc.cost.cluster import Cluster
from partc.cost.partitions import partition_evenly
from partc.cost.price_options import Options, Prices, options_of, possible_methods
from partc.cost.reasons import explain
from partc.cost.row_spread import share_of_traffic
from partc.cost.server_assignment import ServerAssignment, assign_to_servers
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

__all__ = [
    "Choice",
    "Mode",
    "ServerAssignment",
    "StrategyCosts",
    "SyncFacts",
    "choose_strategy",
]

Mode = Literal["auto", "hybrid", "allreduce", "ps"]

TIE = 1e-6  # relative difference below which two predictions are equal


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one parameter, what the alternatives would have cost, and why."""

    variable: str
    bytes: int
    sparse: bool
    method: Method
    seconds: dict[Method, float]  # of every possible method
    reason: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class StrategyCosts:
    """The choices in the order of the facts, where servers keep what, and the whole's prices."""

    choices: tuple[Choice, ...]
    assignment: ServerAssignment | None
    totals_s: dict[str, float] = field(default_factory=dict)  # of the candidates: communication of a step
    solution: OptionSolution | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An option for every parameter, with shards and price."""

    name: str
    chosen: dict[str, Synchronisation]
    shards: dict[str, tuple[Shard, ...]]
    assignment: ServerAssignment | None
    total_s: float
    solution: OptionSolution | None


def choose_strategy(
    facts: Sequence[SyncFacts],
    cluster: Cluster,
    mode: Mode,
    batch: Batch,
    pins: Mapping[str, Synchronisation] = MappingProxyType({}),
    without: Collection[Mechanism] = (),
    partitions: int | None = None,
) -> tuple[Strategy, StrategyCosts]:
    """Choose for every parameter; `pins` keep theirs. Raises NoPlacement if servers are too small.

    `without`: mechanisms that are switched off. `partitions`: of each large variable on servers.
    """
    choosing = _Choosing(facts, cluster, pins, without, partitions)
    candidates = choosing.candidates(_candidate_names(mode))
    cheapest = min(candidate.total_s for candidate in candidates)
    chosen = next(c for c in candidates if c.total_s <= cheapest * (1 + TIE))
    strategy = Strategy(
        format=STRATEGY_FORMAT,
        batch=batch,
        parameters={
            name: structs.replace(how, shards=chosen.shards.get(name, ()))
            for name, how in chosen.chosen.items()
        },
    )
    totals_s = {candidate.name: candidate.total_s for candidate in candidates}
    choices = choosing.choices(chosen, mode)
    return strategy, StrategyCosts(choices, chosen.assignment, totals_s, chosen.solution)


def _candidate_names(mode: Mode) -> tuple[str, ...]:
    """Name the candidates, the preferred one first."""
    return ("auto", "everything AllReduced", "allreduce", "ps", "hybrid") if mode == "auto" else (mode,)


class _Choosing:
    """Makes candidates: an option for every parameter, shards for what servers own, and the price."""

    def __init__(
        self,
        facts: Sequence[SyncFacts],
        cluster: Cluster,
        pins: Mapping[str, Synchronisation],
        without: Collection[Mechanism],
        partitions: int | None,
    ) -> None:
        self.facts = facts
        self.cluster = cluster
        self.pins = pins
        self.without = without
        self.partitions = partitions
        self.prices = Prices(cluster)
        self.seconds = {fact.name: self._seconds(fact) for fact in facts}

    def _seconds(self, fact: SyncFacts) -> dict[Method, float]:
        """Return what every possible method takes alone, its mechanisms as its quickest option has them."""
        return {
            method: min(
                self.prices.price(fact, option).seconds
                for option in options_of(fact, (method,), self.without)
            )
            for method in possible_methods(fact, self.cluster)
        }

    def candidates(self, names: Sequence[str]) -> list[_Candidate]:
        """Return the candidates whose variables fit on the servers, at least one."""
        found: list[_Candidate] = []
        failure: NoPlacement | None = None
        for name in names:
            try:
                found.append(self._candidate(name))
            except NoPlacement as error:
                failure = failure or error
        if not found and failure is not None:
            raise failure
        return found

    def _candidate(self, name: str) -> _Candidate:
        options = {fact.name: self._options(fact, name) for fact in self.facts}
        solution = choose_options(self.facts, options, self.cluster, self.prices)
        chosen = solution.chosen if solution else {fact.name: options[fact.name][0] for fact in self.facts}
        chosen = {fact.name: chosen[fact.name] for fact in self.facts}
        shards, assignment = self._assign(chosen)
        return _Candidate(name, chosen, shards, assignment, self._total_s(chosen, shards), solution)

    def _options(self, fact: SyncFacts, candidate: str) -> Options:
        if fact.name in self.pins:
            return (structs.replace(self.pins[fact.name], shards=()),)
        possible = possible_methods(fact, self.cluster)
        return options_of(fact, _allowed(fact, possible, candidate), self.without)

    def _assign(
        self, chosen: Mapping[str, Synchronisation]
    ) -> tuple[dict[str, tuple[Shard, ...]], ServerAssignment | None]:
        served = [fact for fact in self.facts if chosen[fact.name].method == "servers"]
        if not served:
            return {}, None
        pinned = {fact.name: self.pins[fact.name].shards for fact in served if fact.name in self.pins}
        shards, assignment = assign_to_servers(served, self.cluster, pinned)
        if self.partitions is not None:
            even = partition_evenly(served, self.cluster, shards, self.partitions)
            shards, assignment = assign_to_servers(served, self.cluster, even | pinned)
        return shards, assignment

    def _total_s(
        self, chosen: Mapping[str, Synchronisation], shards: Mapping[str, tuple[Shard, ...]]
    ) -> float:
        loads = np.zeros(len(self.prices.meeting.network.lanes))
        latency_s = 0.0
        for fact in self.facts:
            served = chosen[fact.name].method == "servers"
            shares = _shares(shards[fact.name], fact, self.cluster) if served else None
            price = self.prices.price(fact, chosen[fact.name], shares)
            latency_s += price.latency_s
            loads += price.loads
        return latency_s + self.prices.meeting.network.busiest_s(loads)

    def choices(self, chosen: _Candidate, mode: Mode) -> tuple[Choice, ...]:
        """Return the chosen candidate's decisions with their reasons."""
        workers = sum(len(host.devices) for host in self.cluster.hosts)
        return tuple(
            Choice(
                variable=fact.name,
                bytes=fact.bytes,
                sparse=fact.sparse,
                method=chosen.chosen[fact.name].method,
                seconds=self.seconds[fact.name],
                reason=explain(
                    fact,
                    chosen.chosen[fact.name],
                    self.seconds[fact.name],
                    workers=workers,
                    asked_for=_asked_for(fact, chosen, mode, self.pins),
                ),
                shards=chosen.shards.get(fact.name, ()),
            )
            for fact in self.facts
        )


def _allowed(fact: SyncFacts, possible: tuple[Method, ...], candidate: str) -> tuple[Method, ...]:
    """Return the methods that a candidate lets a parameter take."""
    if candidate == "auto":
        return possible
    if candidate == "everything AllReduced":
        return ("all_reduce",) if "all_reduce" in possible else ("all_gather",)
    wants_servers = candidate == "ps" or (candidate == "hybrid" and fact.sparse)
    if wants_servers and "servers" in possible:
        return ("servers",)
    return ("all_gather",) if fact.sparse else ("all_reduce",)


def _asked_for(
    fact: SyncFacts, chosen: _Candidate, mode: Mode, pins: Mapping[str, Synchronisation]
) -> str | None:
    """Say who decided, where it was not this parameter's own predicted time."""
    if fact.name in pins:
        return "The strategy file says so"
    if mode != "auto":
        return f"--strategy {mode} says so"
    if chosen.name != "auto":
        return f"For all parameters together the fastest is predicted to be {chosen.name!r}"
    return None


def _shares(shards: Sequence[Shard], fact: SyncFacts, cluster: Cluster) -> tuple[float, ...]:
    carried = {s.host: share_of_traffic(fact.spread, fact.rows, s.start, s.stop) for s in shards}
    return tuple(carried.get(host.name, 0.0) for host in cluster.hosts)
