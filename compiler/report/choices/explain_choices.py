"""Why a variable went where it went, worked through with this plan's own numbers.

The examples are the largest sparse and the largest dense parameter. Bytes are those of
cost/network/two_level.py, told per host or per worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partc.compiler.planning.check_estimate import EstimateSensitivity
from partc.compiler.report.methods import (
    ALONE,
    NAMES,
    OUTCOMES,
    SPOKEN,
    meaning_of,
)
from partc.compiler.report.units import count, percent, plural, seconds, size, solver_work
from partc.cost.assignment.choose_options import OptionSolution
from partc.cost.assignment.search_strategy import TIE, Tried
from partc.cost.assignment.synchronisation import Choice, StrategyCosts
from partc.cost.cluster.cluster import Cluster
from partc.cost.network.two_level import ID_BYTES, distinct_rows, owner_hosts
from partc.cost.strategy import SyncFacts


@dataclass(frozen=True, slots=True)
class PricedMethod:
    """A method for one variable: what would travel, and the predicted time."""

    method: str
    name: str
    travels: str
    seconds: str
    share: float  # of the slowest alternative, for a bar
    chosen: bool


@dataclass(frozen=True, slots=True)
class Example:
    """One variable's decision."""

    variable: str
    outcome: str  # finishes "why (the variable) ..."
    kind: str
    background: str
    alternatives: tuple[PricedMethod, ...]
    verdict: str
    reason: str


@dataclass(frozen=True, slots=True)
class WholeStrategy:
    """A strategy for all parameters together."""

    name: str
    meaning: str
    seconds: str
    share: float
    chosen: bool


def worked_examples(
    costs: StrategyCosts, facts: Mapping[str, SyncFacts], cluster: Cluster
) -> tuple[Example, ...]:
    """Return the largest sparse and the largest dense parameter's stories, as far as there are any."""
    largest_first = sorted(costs.choices, key=lambda choice: (-choice.bytes, choice.variable))
    largest = [next((c for c in largest_first if c.sparse is sparse), None) for sparse in (True, False)]
    return tuple(_example(choice, facts[choice.variable], cluster) for choice in largest if choice)


def candidates(costs: StrategyCosts, compared: Sequence[Tried], step_s: float) -> tuple[WholeStrategy, ...]:
    """Return the strategies whose whole steps were compared, quickest first.

    `compared`: them, the one taken first; `step_s`: the plan's own, if none was.
    """
    if not costs.choices:
        return ()
    if not compared:
        name = next(iter(costs.totals_s)) if len(costs.totals_s) == 1 else ALONE
        return (WholeStrategy(name, meaning_of(name), seconds(step_s), 1.0 if step_s else 0.0, True),)
    slowest = max(candidate.step_s for candidate in compared)
    return tuple(
        WholeStrategy(
            ", ".join(candidate.names),
            meaning_of(candidate.names[0]),
            seconds(candidate.step_s),
            _share(candidate.step_s, slowest),
            candidate is compared[0],
        )
        for candidate in sorted(compared, key=lambda candidate: candidate.step_s)
    )


@dataclass(frozen=True, slots=True)
class SolverOutcome:
    """What the solver says of the options that it took."""

    status: str
    objective: str
    bound: str
    work: str


def describe_solution(solution: OptionSolution | None) -> SolverOutcome | None:
    """Return the solver's answer as text, None where it gave none."""
    if solution is None:
        return None
    return SolverOutcome(
        solution.status.lower(),
        seconds(solution.objective_s),
        seconds(solution.bound_s),
        solver_work(solution.deterministic_time),
    )


def describe_sensitivity(sensitivity: EstimateSensitivity | None) -> str:
    """Return a sentence where an estimate decided, nothing elsewhere."""
    if sensitivity is None:
        return ""
    sentence = sensitivity.sentence()
    return f"{sentence[0].upper()}{sentence[1:]}."


def _example(choice: Choice, fact: SyncFacts, cluster: Cluster) -> Example:
    slowest = max(choice.seconds.values())
    traffic = _sparse_travel(fact, cluster) if fact.sparse else _dense_travel(fact, cluster)
    alternatives = tuple(
        PricedMethod(
            method,
            NAMES[method],
            traffic[method],
            seconds(time_s),
            _share(time_s, slowest),
            method == choice.method,
        )
        for method, time_s in sorted(choice.seconds.items(), key=lambda item: item[1])
    )
    kind = "sparse" if fact.sparse else "dense"
    return Example(
        variable=fact.name,
        outcome=OUTCOMES[choice.method],
        kind=f"the largest {kind} parameter",
        background=_sparse_background(fact) if fact.sparse else _dense_background(fact),
        alternatives=alternatives,
        verdict=_verdict(choice),
        reason=choice.reason,
    )


def _sparse_background(fact: SyncFacts) -> str:
    touched = fact.touched_rows
    return (
        f"It has {count(fact.rows)} rows of {size(fact.row_bytes)}: {size(fact.bytes)}. In a step one "
        f"replica looks up about {count(touched)} different rows, {percent(touched / max(1, fact.rows))} of "
        f"them ({size(touched * fact.row_bytes)}), "
        f"{'as measured from sample data' if fact.distinct else 'if all were drawn alike'}. "
        "Every other row has a gradient of zero."
    )


def _dense_background(fact: SyncFacts) -> str:
    return (
        f"Every sample uses all of its {size(fact.bytes)}, so every step gives every element a gradient, "
        "and every worker needs the whole sum."
    )


def _sparse_travel(fact: SyncFacts, cluster: Cluster) -> dict[str, str]:
    workers = [len(host.devices) for host in cluster.hosts]
    total, most = sum(workers), max(workers)
    rows = distinct_rows(fact, most)
    part = fact.touched_rows * (fact.row_bytes + ID_BYTES)
    return {
        "all_reduce": (
            f"The whole {size(fact.bytes)}, zeros of untouched rows included, into and out of every worker."
        ),
        "all_gather": (
            f"{size(part)} from each worker, received by each of the {count(total)}: "
            f"{size(part * total)} arrive at every worker."
        ),
        "servers": (
            f"A host’s {plural(most, 'worker')} together need about {count(rows)} different rows "
            f"({size(rows * fact.row_bytes)}): fetched once from the "
            f"{plural(len(owner_hosts(cluster)), 'server')}, and as many summed gradients sent back."
        ),
    }


def _dense_travel(fact: SyncFacts, cluster: Cluster) -> dict[str, str]:
    hosts = len(cluster.hosts)
    each = 2 * fact.bytes * (hosts - 1) / hosts
    crossing = f"{size(each)} out of every host and as much in" if hosts > 1 else "nothing leaves the host"
    return {
        "all_reduce": f"The sum goes around among the workers: {crossing}.",
        "all_gather": "Does not apply to a dense gradient.",
        "servers": (
            "Gradients go through each host’s server to their owners, and the new values come back: "
            f"{crossing}."
        ),
    }


def _verdict(choice: Choice) -> str:
    own_s = choice.seconds[choice.method]
    name = SPOKEN[choice.method]
    name = name[0].upper() + name[1:]
    others = {method: time_s for method, time_s in choice.seconds.items() if method != choice.method}
    if not others:
        return f"{name} is the only way open to it."
    quickest = min(others, key=lambda method: others[method])
    rival = SPOKEN[quickest]
    if others[quickest] < own_s * (1 - TIE):
        saved = seconds(own_s - others[quickest])
        if choice.by_user:
            return f"{name} was asked for; {rival} alone would be quicker by {saved}."
        return (
            f"Alone {rival} would be quicker by {saved}; the whole step, computing and all other parameters "
            f"included, is predicted to be shorter with {SPOKEN[choice.method]}."
        )
    if others[quickest] <= own_s * (1 + TIE):
        return f"{name} and {rival} are predicted to be equally quick; ties go to AllReduce."
    if own_s == 0.0:
        return f"{name} costs nothing here."
    return f"{name} is predicted to be {_times(others[quickest] / own_s)} the next best, {rival}."


def _times(factor: float) -> str:
    return f"{factor:.1f} times as quick as" if factor >= 1.1 else f"{percent(factor - 1)} quicker than"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
