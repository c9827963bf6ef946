"""Choose how each parameter's gradient is summed: by AllReduce, AllGather of rows, or servers.

    auto       each parameter the method with the smallest predicted time; ties to AllReduce, those of
               sparse parameters to AllGather, which keeps gradient and update sparse. Taken as a
               whole never predicted slower than a pure strategy below: else that one is taken
    hybrid     Parallax's rule: sparse parameters on servers, dense ones AllReduced (section 5.3.1)
    allreduce  Parallax's MPI: dense ones AllReduced, rows of sparse ones AllGathered (section 5.2)
    ps         servers for everything that can live there (section 5.1)

One parameter is priced by the phases of two_level.py, its rows spread evenly over the servers; a
whole strategy by the busiest lane under the traffic of all parameters, shards where they really
are, plus all latencies. The update's own time is left out: it is short beside the wire's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from partc.cost.cluster import Cluster
from partc.cost.network.collectives import seconds_of, total_loads
from partc.cost.network.topology import Lane
from partc.cost.network.two_level import even_shares, meeting_of, owner_hosts, synchronise
from partc.cost.reasons import explain
from partc.cost.server_assignment import ServerAssignment, assign_to_servers
from partc.cost.strategy import STRATEGY_FORMAT, Batch, Method, Shard, Strategy, SyncFacts, Synchronisation
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


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A method for every parameter, with shards and price."""

    name: str
    methods: dict[str, Method]
    shards: dict[str, tuple[Shard, ...]]
    assignment: ServerAssignment | None
    total_s: float


def choose_strategy(
    facts: Sequence[SyncFacts],
    cluster: Cluster,
    mode: Mode,
    batch: Batch,
    pins: Mapping[str, Synchronisation] = MappingProxyType({}),
) -> tuple[Strategy, StrategyCosts]:
    """Choose for every parameter; `pins` keep theirs. Raises NoPlacement if servers are too small."""
    pricing = _Pricing(facts, cluster, pins)
    names = _candidate_names(mode)
    candidates = pricing.candidates(names)
    cheapest = min(candidate.total_s for candidate in candidates)
    chosen = next(c for c in candidates if c.total_s <= cheapest * (1 + TIE))
    strategy = Strategy(
        format=STRATEGY_FORMAT,
        batch=batch,
        parameters={
            fact.name: Synchronisation(chosen.methods[fact.name], chosen.shards.get(fact.name, ()))
            for fact in facts
        },
    )
    totals_s = {candidate.name: candidate.total_s for candidate in candidates}
    return strategy, StrategyCosts(pricing.choices(chosen, mode), chosen.assignment, totals_s)


def _candidate_names(mode: Mode) -> tuple[str, ...]:
    """Name the candidates, the preferred one first."""
    return ("auto", "everything AllReduced", "allreduce", "ps") if mode == "auto" else (mode,)


@dataclass(frozen=True, slots=True)
class _Price:
    """What one parameter's synchronisation takes alone, and what it adds to the whole's."""

    seconds: float
    latency_s: float
    loads: dict[Lane, float]


class _Pricing:
    """Prices every method of every parameter once."""

    def __init__(
        self, facts: Sequence[SyncFacts], cluster: Cluster, pins: Mapping[str, Synchronisation]
    ) -> None:
        self.facts = facts
        self.cluster = cluster
        self.pins = pins
        self.meeting = meeting_of(cluster)
        self._known: dict[tuple[object, ...], _Price] = {}
        self.even_shares = even_shares(cluster)
        self.seconds: dict[str, dict[Method, float]] = {
            fact.name: {
                method: self._price(fact, method, self.even_shares).seconds for method in self.possible(fact)
            }
            for fact in facts
        }

    def possible(self, fact: SyncFacts) -> tuple[Method, ...]:
        """Return the methods that can synchronise the parameter, the one that wins ties first."""
        can_be_served = fact.servable and fact.rows >= 1 and bool(owner_hosts(self.cluster))
        methods: list[Method] = ["all_gather"] if fact.sparse else []
        methods += ["all_reduce"] if fact.reducible else []
        methods += ["servers"] if can_be_served else []
        return tuple(methods)

    def _price(self, fact: SyncFacts, method: Method, shares: tuple[float, ...]) -> _Price:
        # Models repeat shapes: equal facts are priced once.
        key = (method, shares, fact.rows, fact.row_bytes, fact.sparse, fact.touched_rows)
        if key not in self._known:
            network = self.meeting.network
            phases = synchronise(self.meeting, fact, method, shares)
            latency_s = sum(phase.latency_s for phase in phases)
            self._known[key] = _Price(seconds_of(network, phases), latency_s, total_loads(network, phases))
        return self._known[key]

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
        methods = {fact.name: self._method(fact, name) for fact in self.facts}
        served = [fact for fact in self.facts if methods[fact.name] == "servers"]
        shards: dict[str, tuple[Shard, ...]] = {}
        assignment = None
        if served:
            pinned = {fact.name: self.pins[fact.name].shards for fact in served if fact.name in self.pins}
            shards, assignment = assign_to_servers(served, self.cluster, pinned)
        return _Candidate(name, methods, shards, assignment, self._total_s(methods, shards))

    def _method(self, fact: SyncFacts, candidate: str) -> Method:
        if fact.name in self.pins:
            return self.pins[fact.name].method
        possible = self.possible(fact)
        seconds = self.seconds[fact.name]
        if candidate == "auto":
            limit = min(seconds.values()) * (1 + TIE)
            return next(method for method in possible if seconds[method] <= limit)
        if candidate == "everything AllReduced":
            return "all_reduce" if "all_reduce" in possible else "all_gather"
        wants_servers = candidate == "ps" or (candidate == "hybrid" and fact.sparse)
        if wants_servers and "servers" in possible:
            return "servers"
        return "all_gather" if fact.sparse else "all_reduce"

    def _total_s(self, methods: Mapping[str, Method], shards: Mapping[str, tuple[Shard, ...]]) -> float:
        loads: dict[Lane, float] = {}
        latency_s = 0.0
        for fact in self.facts:
            served = methods[fact.name] == "servers"
            shares = _shares(shards[fact.name], fact, self.cluster) if served else self.even_shares
            price = self._price(fact, methods[fact.name], shares)
            latency_s += price.latency_s
            for lane, carried in price.loads.items():
                loads[lane] = loads.get(lane, 0.0) + carried
        return latency_s + self.meeting.network.busiest_s(loads)

    def choices(self, chosen: _Candidate, mode: Mode) -> tuple[Choice, ...]:
        """Return the chosen candidate's decisions with their reasons."""
        workers = sum(len(host.devices) for host in self.cluster.hosts)
        return tuple(
            Choice(
                variable=fact.name,
                bytes=fact.bytes,
                sparse=fact.sparse,
                method=chosen.methods[fact.name],
                seconds=self.seconds[fact.name],
                reason=explain(
                    fact,
                    chosen.methods[fact.name],
                    self.seconds[fact.name],
                    workers=workers,
                    asked_for=_asked_for(fact, chosen, mode, self.pins),
                ),
                shards=chosen.shards.get(fact.name, ()),
            )
            for fact in self.facts
        )


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
    rows = {shard.host: shard.stop - shard.start for shard in shards}
    return tuple(rows.get(host.name, 0) / fact.rows for host in cluster.hosts)
