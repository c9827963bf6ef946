"""Lower bounds by column generation: can k sets of a load below T cover everything?

    minimise   sum of l[S]                               sets of groups of a load below T
    sum of l[S] over S with g  +  x[g]  =  1             every group is on one device
    sum of cpu[g] x[g]  <=  T CPUs                       x[g]: the share of g on CPUs

If the optimum exceeds the number of accelerators, no placement is below T. GLOP solves the program over
the sets known so far; `pricing_kernel` finds the sets that its multipliers undervalue. The multipliers
become a `Certificate`, checked without GLOP.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from ortools.linear_solver import pywraplp

from partc.cost.placement.bounds.certificate import ONE, Certificate, Enumeration, proves
from partc.cost.placement.problems.groups import Groups, Ints
from partc.cost.placement.problems.problem import Problem

UNCOVERED = 2.0
OVERCOVERED = 1.0
TRUST = 0.8
WEAKER = (Fraction(985, 1000), Fraction(97, 100), Fraction(94, 100), Fraction(90, 100), Fraction(85, 100))
BUCKETS, MOST_BUCKETS, MOST_LABELS = 64, 4096, 1_000_000


@dataclass(frozen=True)
class Attempt:
    """What became of one load T: `proven` None where time ended. `sets`: node sets that the program used."""

    proven: bool | None
    certificate: Certificate | None
    sets: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...] = ()
    guess: "Guess | None" = None


@dataclass(frozen=True)
class Guess:
    """Multipliers to start from: a group's on its first node, and the CPUs' rate per unit of time."""

    values: tuple[float, ...]
    rate: float


def try_load(
    problem: Problem,
    load: Fraction,
    sets: Iterable[tuple[int, ...]],
    *,
    deadline_s: float,
    guess: Guess | None = None,
) -> Attempt:
    """Try to prove that no placement has a load below `load`; `sets` of nodes start the column generation."""
    enumeration = Enumeration.below(problem, load) if problem.accelerators else None
    if enumeration is None:
        return Attempt(None, None, ())
    program = _Program(enumeration)
    for nodes in sets:
        program.add_nodes(nodes)
    for column in _intervals(enumeration):
        program.add(column)
    search = _Search(enumeration, program, _at_groups(enumeration.groups, guess) if guess else None)
    proven, certificate = None, None
    while proven is None and time.monotonic() < deadline_s:
        proven = search.round()
        if proven:
            certificate = Certificate(load, tuple(map(int, search.values)), search.rate)
    return Attempt(proven, certificate, *program.used(), _guess(enumeration.groups, search.centre))


def weaker_certificate(problem: Problem, guess: Guess, load: Fraction, least: Fraction) -> Certificate | None:
    """Find a load below `load` that multipliers which fell short of it prove: above `least`, if any."""
    for share in WEAKER:
        lower = load * share
        enumeration = Enumeration.below(problem, lower) if lower > least else None
        if enumeration is None:
            return None
        values, rate = _Program(enumeration).whole(*_at_groups(enumeration.groups, guess))
        if proves(enumeration, tuple(map(int, values)), rate, most_labels=MOST_LABELS):
            return Certificate(lower, tuple(map(int, values)), rate)
    return None


class _Search:
    """Rounds of column generation, with multipliers held near the best ones so far (Wentges 1997)."""

    def __init__(
        self, enumeration: Enumeration, program: "_Program", centre: tuple[np.ndarray, float] | None
    ) -> None:
        self.enumeration, self.program, self.centre = enumeration, program, centre
        self.values, self.rate = np.zeros(enumeration.groups.count, np.int64), Fraction(0)
        self._trust, self._buckets, self._reached, self._refused = TRUST, BUCKETS, 0.0, 0.0

    def round(self) -> bool | None:
        """Do one round: True: proven by `values` and `rate`; False: no such proof exists; None: go on."""
        problem = self.enumeration.groups.problem
        least, values, rate = self.program.solve()
        if least <= problem.accelerators + 1e-7:
            return False
        self.values, self.rate = self.program.whole(*self._between(values, rate))
        columns, best = _disjoint_sets(self.enumeration, self.values, self._buckets)
        spare = sum(map(int, self.values)) - self.rate * self.enumeration.cap_ticks * problem.cpus
        reached = float(spare) / best
        if reached > self._reached:
            self._reached = reached
            self.centre = (self.values * (ONE / best), float(self.rate) * (ONE / best))
        if reached > max(problem.accelerators, self._refused):
            if proves(self.enumeration, tuple(map(int, self.values)), self.rate, most_labels=MOST_LABELS):
                return True
            self._refused = reached + 0.01
            self._refine()
        return self._add(columns, values)

    def _between(self, values: Ints, rate: Fraction) -> tuple[np.ndarray, float]:
        if self.centre is None:
            return values.astype(float), float(rate)
        trust, (central, central_rate) = self._trust, self.centre
        return trust * central + (1 - trust) * values, trust * central_rate + (1 - trust) * float(rate)

    def _add(self, columns: list[np.ndarray], values: Ints) -> bool | None:
        """Add sets to the program; without one that its own multipliers undervalue, trust the centre less."""
        added = [column for column in columns if self.program.add(column)]
        if any(int(values[column].sum()) > ONE + ONE // 10_000 for column in added):
            self._trust = TRUST
        elif self._trust > 0:
            self._trust = self._trust - 0.2 if self._trust > 0.3 else 0.0
        elif not added:
            if self._buckets >= MOST_BUCKETS:
                return False
            self._refine()
        return None

    def _refine(self) -> None:
        # What coarser loads told of the centre's worth no longer counts.
        self._buckets, self._reached = min(4 * self._buckets, MOST_BUCKETS), 0.0


def _disjoint_sets(enumeration: Enumeration, values: Ints, buckets: int) -> tuple[list[np.ndarray], int]:
    """Find the most valuable set, then that of what is left, ...: (sets, value of the first, or 1)."""
    left, sets, best = values.copy(), [], ONE
    for number in range(2 * enumeration.groups.problem.accelerators):
        floor = ONE + ONE // 100_000 if number == 0 else ONE // 4
        coarse = buckets if number == 0 else max(16, buckets // 4)
        disjoint, worths, *_ = enumeration.best_sets(
            left, floor=floor, most=MOST_LABELS, columns=3, buckets=coarse
        )
        if len(worths) == 0:
            break
        best = max(best, int(worths[0]))
        sets += list(disjoint)
        left[disjoint[0]] = np.minimum(left[disjoint[0]], 0)
    return sets, best


def _guess(groups: Groups, centre: tuple[np.ndarray, float] | None) -> Guess | None:
    if centre is None:
        return None
    values = [0.0] * len(groups.problem.nodes)
    for members, value in zip(groups.members, centre[0], strict=True):
        values[members[0]] = float(value)
    return Guess(tuple(values), centre[1] * float(groups.ticks_per_unit))


def _at_groups(groups: Groups, guess: Guess) -> tuple[np.ndarray, float]:
    values = np.array([sum(guess.values[node] for node in members) for members in groups.members])
    return values, guess.rate / float(groups.ticks_per_unit)


class _Program:
    """The linear program over the sets known so far."""

    def __init__(self, enumeration: Enumeration) -> None:
        self._e, groups = enumeration, enumeration.groups
        self._solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = solver.infinity()
        self._rows = [solver.Constraint(1.0, 1.0) for _ in range(groups.count)]
        self._scale = float(max(enumeration.cap_ticks, 1))
        self._cpu_row = solver.Constraint(-infinity, float(groups.problem.cpus))
        self._objective = solver.Objective()
        self._objective.SetMinimization()
        for group, row in enumerate(self._rows):
            for sign, cost in ((1.0, UNCOVERED), (-1.0, OVERCOVERED)):
                variable = solver.NumVar(0.0, infinity, "")
                row.SetCoefficient(variable, sign)
                self._objective.SetCoefficient(variable, cost)
            if enumeration.may_be_on_cpu[group]:
                variable = solver.NumVar(0.0, infinity, "")
                row.SetCoefficient(variable, 1.0)
                self._cpu_row.SetCoefficient(variable, float(groups.cpu[group]) / self._scale)
        self._sets: dict[bytes, pywraplp.Variable] = {}
        self._chosen: dict[bytes, float] = {}

    @property
    def columns(self) -> int:
        """How many sets are known."""
        return len(self._sets)

    def add_nodes(self, nodes: tuple[int, ...]) -> bool:
        """Add a set of nodes, where it is whole groups."""
        inside = set(nodes)
        members = self._e.groups.members
        column = np.array([inside.issuperset(ns) for ns in members], np.bool_)
        if sum(len(ns) for ns, taken in zip(members, column, strict=True) if taken) != len(inside):
            return False
        return self.add(column)

    def add(self, column: np.ndarray) -> bool:
        """Add a set, if it is new and light enough."""
        key = np.packbits(column).tobytes()
        if (
            key in self._sets
            or not column.any()
            or set_load(self._e.groups, column) > self._e.cap_ticks + self._slack()
        ):
            return False
        self._sets[key] = variable = self._solver.NumVar(0.0, self._solver.infinity(), "")
        self._objective.SetCoefficient(variable, 1.0)
        for group in np.flatnonzero(column):
            self._rows[int(group)].SetCoefficient(variable, 1.0)
        return True

    def _slack(self) -> int:
        # Sets come from coarser ticks, so they may be heavier by what rounding lost.
        return (self._e.cap_ticks >> 21) * (len(self._rows) + len(self._e.groups.families))

    def solve(self) -> tuple[float, Ints, Fraction]:
        """Return (optimum, values int64[groups], rate of the CPUs per tick), the last two times 2^26."""
        if self._solver.Solve() != pywraplp.Solver.OPTIMAL:
            return 0.0, np.zeros(len(self._rows), np.int64), Fraction(0)
        rate = max(0.0, -self._cpu_row.dual_value()) / self._scale * ONE
        values = np.array([row.dual_value() * ONE for row in self._rows])
        used = ((key, variable.solution_value()) for key, variable in self._sets.items())
        self._chosen = {key: weight for key, weight in used if weight > 1e-6}
        return self._objective.Value(), *self.whole(values, rate)

    def whole(self, values: np.ndarray, rate: float) -> tuple[Ints, Fraction]:
        """Round multipliers so that those of the groups that a CPU could run respect its rate exactly."""
        exact = Fraction(rate)
        limits = [int(exact * int(cpu)) for cpu in self._e.groups.cpu]
        triples = zip(values, limits, self._e.may_be_on_cpu, strict=True)
        return np.array([min(int(v), limit) if on else int(v) for v, limit, on in triples], np.int64), exact

    def used(self) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
        """Return the node sets that the last optimum uses, and how much of each."""
        count = len(self._rows)
        columns = [np.unpackbits(np.frombuffer(key, np.uint8), count=count) for key in self._chosen]
        members = self._e.groups.members
        sets = [tuple(n for g in np.flatnonzero(column) for n in members[int(g)]) for column in columns]
        return tuple(sets), tuple(self._chosen.values())


def set_load(groups: Groups, column: np.ndarray) -> int:
    """The load of an accelerator that holds these groups, in ticks."""
    starts, entries = groups.family_table
    if not len(groups.costs):
        return int(groups.work[column].sum())
    inside = np.add.reduceat(column[entries].astype(np.int64), starts[:-1])
    cut = (inside > 0) & (inside < starts[1:] - starts[:-1])
    return int(groups.work[column].sum() + groups.costs[cut].sum())


def _intervals(enumeration: Enumeration) -> Iterable[np.ndarray]:
    """For every start along the frontier's order, the longest run of groups that is light enough."""
    groups, order = enumeration.groups, enumeration.frontier.order
    for start in range(len(order)):
        column = np.zeros(groups.count, np.bool_)
        best = None
        for group in order[start:]:
            column[group] = True
            if int(groups.work[column].sum()) > enumeration.cap_ticks:
                break
            if set_load(groups, column) <= enumeration.cap_ticks:
                best = column.copy()
        if best is not None:
            yield best
