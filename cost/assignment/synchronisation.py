"""Choose how each parameter's gradient is summed: by AllReduce, AllGather of rows, or servers.

    auto       the quickest whole step that is found (search_strategy.py): of the strategies below, of all
               parameters AllReduced, of what one ILP finds best for the busiest link (choose_options.py),
               and of those a few moves away. Never slower than the strategies below, by the price that is
               given; without one, what is communicated is the price. Ties go to the simpler
    hybrid     Parallax's rule: sparse parameters on servers, dense ones AllReduced (section 5.3.1)
    allreduce  Parallax's MPI: dense ones AllReduced, rows of sparse ones AllGathered (section 5.2)
    ps         servers for everything that can live there (section 5.1)

Where a mode settles the method, the ILP still decides which mechanisms of section 5.3.2 are used.
One parameter is priced by the phases of two_level.py, its rows spread evenly over the servers; what a
strategy communicates by the busiest lane under the traffic of all parameters, shards where they really
are, plus all latencies.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from partc.cost.assignment.candidates import BUSIEST_LINK, EVERYTHING_REDUCED, Candidate, Candidates
from partc.cost.assignment.choose_options import OptionSolution
from partc.cost.assignment.reasons import explain
from partc.cost.assignment.search_strategy import StepPrice, Tried, cheapest, search_steps
from partc.cost.assignment.server_assignment import ServerAssignment
from partc.cost.cluster.cluster import Cluster
from partc.cost.strategy import Batch, Mechanism, Method, Mode, Shard, Strategy, SyncFacts, Synchronisation

__all__ = [
    "Choice",
    "ServerAssignment",
    "StrategyCosts",
    "SyncFacts",
    "choose_strategy",
]

# Of equal ones the first is taken: the simplest.
AUTO: tuple[str, ...] = ("allreduce", EVERYTHING_REDUCED, "hybrid", "ps", BUSIEST_LINK)


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
    by_user: bool = False  # the user asked for it, by a mode or in a strategy file


@dataclass(frozen=True, slots=True)
class StrategyCosts:
    """The choices in the order of the facts, where servers keep what, and the whole's prices.

    totals_s  candidate -> what it communicates in a step, seconds
    tried     the candidates whose whole step was priced, the one taken first; empty where none was
    """

    choices: tuple[Choice, ...]
    assignment: ServerAssignment | None
    totals_s: dict[str, float] = field(default_factory=dict)
    solution: OptionSolution | None = None
    tried: tuple[Tried, ...] = ()


class SyncChoice(NamedTuple):
    """A strategy for every parameter, and what leads to it."""

    strategy: Strategy
    costs: StrategyCosts


def choose_strategy(
    facts: Sequence[SyncFacts],
    cluster: Cluster,
    mode: Mode,
    batch: Batch,
    pins: Mapping[str, Synchronisation] = MappingProxyType({}),
    without: Collection[Mechanism] = (),
    partitions: int | None = None,
    price: StepPrice | None = None,
    because: str | None = None,
) -> SyncChoice:
    """Choose for every parameter; `pins` keep theirs. Raises NoPlacement if memory is too small.

    `without`: mechanisms that are switched off. `partitions`: of each large variable on servers.
    `price`: of a whole step, by which `auto` chooses. `because`: why this mode, where no --strategy named it.
    """
    candidates = Candidates(facts, cluster, pins, without, partitions)
    named = candidates.named(AUTO if mode == "auto" else (mode,))
    tried: tuple[Tried, ...] = ()
    if price is None or mode != "auto":
        chosen = cheapest(named, [candidate.total_s for candidate in named])
    else:
        chosen, tried = search_steps(candidates, named, batch, price)
    totals_s = {candidate.name: candidate.total_s for candidate in named}
    choices = _choices(
        candidates, chosen, because or f"--strategy {mode} says so" if mode != "auto" else None
    )
    costs = StrategyCosts(choices, chosen.assignment, totals_s, chosen.solution, tried)
    return SyncChoice(chosen.strategy(batch), costs)


def _choices(candidates: Candidates, chosen: Candidate, because: str | None) -> tuple[Choice, ...]:
    """Return the chosen candidate's decisions with their reasons. `because`: who decided, if the user did."""
    workers = sum(len(host.devices) for host in candidates.cluster.hosts)
    choices: list[Choice] = []
    for fact in candidates.facts:
        how, seconds = chosen.chosen[fact.name], candidates.seconds(fact)
        asked_for = "The strategy file says so" if fact.name in candidates.pins else because
        reason = explain(fact, how, seconds, workers=workers, asked_for=asked_for)
        shards = chosen.shards.get(fact.name, ())
        is_asked = asked_for is not None
        choices.append(
            Choice(fact.name, fact.bytes, fact.sparse, how.method, seconds, reason, shards, is_asked)
        )
    return tuple(choices)
