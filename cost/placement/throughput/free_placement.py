"""Placement that need not be contiguous: annealing from the contiguous answer, CP-SAT, and bounds by
covering.

The time is divided: a contiguous answer first, annealing, CP-SAT on what annealing found, then loads T
that are tried as bounds (`covering.try_load`), by bisection between what is proven and what is reached.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from partc.cost.placement.bounds.certificate import Certificate
from partc.cost.placement.bounds.covering import Attempt, Guess, try_load, weaker_certificate
from partc.cost.placement.problems.groups import Groups, Ints, group_nodes
from partc.cost.placement.problems.problem import NodePlacement, Problem
from partc.cost.placement.throughput.anneal import Annealer
from partc.cost.placement.throughput.assignment_program import solve_assignment
from partc.cost.placement.throughput.conflicts import refuse
from partc.cost.placement.throughput.contiguous import place_contiguously
from partc.cost.placement.throughput.solution import Solution, checked_value, work_bound
from partc.runtime.errors import NoPlacement

CONTIGUOUS_SHARE, ANNEAL_SHARE, SAT_SHARE = 0.15, 0.15, 0.1
MOVES, MOVES_PER_GROUP, STALE_ROUNDS = 1_000_000, 20_000, 36
RECIPES = ((3e-2, 0.9), (1e-1, 0.9), (1e-2, 0.97), (3e-2, 0.98), (3e-3, 0.99), (2e-1, 0.95))
ROUNDINGS = 16
CLOSE = Fraction(1, 1000)
CLOSER = Fraction(1, 100)
NEAR = Fraction(94, 100)


@dataclass
class _State:
    problem: Problem
    bound: Fraction
    solver_bound: Fraction
    placement: NodePlacement | None = None
    value: Fraction | None = None
    certificate: Certificate | None = None

    def offer(self, placement: NodePlacement) -> bool:
        value = checked_value(self.problem, placement, contiguous=False)
        if value is None or (self.value is not None and value >= self.value):
            return False
        self.placement, self.value = placement, value
        return True

    def is_within(self, share: Fraction) -> bool:
        best = max(self.bound, self.solver_bound)
        return self.value is not None and self.value <= best * (1 + share)


def place_freely(problem: Problem, *, seconds: float = 60.0, seed: int = 0) -> Solution:
    """Find an answer, contiguous or not, and bounds. Raises NoPlacement where none fits or is found."""
    started = time.monotonic()
    bound = work_bound(problem)
    state = _State(problem, bound, bound)
    with suppress(NoPlacement):  # what has no contiguous answer may have another
        state.offer(place_contiguously(problem, seconds=CONTIGUOUS_SHARE * seconds, seed=seed).placement)
    _anneal(state, time.monotonic() + ANNEAL_SHARE * seconds, seed)
    if state.placement is None or state.value is None:
        raise refuse(problem, contiguous=False)
    if not state.is_within(CLOSE):
        _solve_sat(state, SAT_SHARE * seconds, seed)
    _raise_bound(state, started + seconds, seed)
    _anneal(state, started + seconds, seed + 1_000)
    how = "multipliers of a covering program" if state.certificate is not None else "sum of work"
    used = time.monotonic() - started
    solver_bound = max(state.solver_bound, bound)
    return Solution(state.placement, state.value, solver_bound, state.bound, how, used, state.certificate)


def _anneal(state: _State, deadline_s: float, seed: int) -> None:
    groups, annealer, limit = None, None, None
    random = np.random.default_rng(seed)
    round_ = stale = 0
    while time.monotonic() < deadline_s and stale < STALE_ROUNDS and not state.is_within(CLOSE):
        if groups is None or state.value != limit:
            limit = state.value
            groups = group_nodes(state.problem, contiguous=False, undercut=limit)
            annealer = Annealer(groups)
        assert annealer is not None
        hot, shrink = RECIPES[round_ % len(RECIPES)]
        start = _start(state, groups, random if round_ % 3 == 2 else None)
        moves = min(MOVES, MOVES_PER_GROUP * groups.count)
        devices, value = annealer.run(
            start, moves=moves, seed=seed + round_, hot=hot, cold=1e-4, shrink=shrink
        )
        better = np.isfinite(value) and state.offer(groups.placement(devices))
        stale = 0 if better else stale + 1
        round_ += 1


def _start(state: _State, groups: Groups, random: "np.random.Generator | None") -> Ints:
    if random is None and state.placement is not None:
        return groups.devices(state.placement)
    random = random or np.random.default_rng(0)
    return random.integers(0, state.problem.devices, groups.count)


def _solve_sat(state: _State, seconds: float, seed: int) -> None:
    assert state.placement is not None and state.value is not None
    groups = group_nodes(state.problem, contiguous=False, undercut=state.value)
    start = groups.devices(state.placement)
    limit = groups.ticks(state.value, up=True)
    answer = solve_assignment(groups, start, limit, seconds=seconds, seed=seed)
    state.solver_bound = max(state.solver_bound, min(groups.time(answer.bound), state.value))
    if answer.devices is not None:
        state.offer(groups.placement(answer.devices))


def _raise_bound(state: _State, end_s: float, seed: int) -> None:
    """Try loads as bounds until time ends: 1 % below the answer, then closer, or by bisection below.

    The sets of a program whose bound was not enough are nearly a placement: they are rounded to one.
    """
    assert state.value is not None
    failed = state.value
    sets: tuple[tuple[int, ...], ...] = ()
    guess: Guess | None = None
    while time.monotonic() < end_s - 0.5 and state.bound < state.value * (1 - CLOSE):
        load = _next_load(state.bound, failed, state.value, state.certificate is not None)
        if load is None:
            return
        deadline_s = time.monotonic() + (end_s - time.monotonic()) * 0.45
        attempt = try_load(state.problem, load, sets, deadline_s=deadline_s, guess=guess)
        sets = tuple(dict.fromkeys(sets + attempt.sets))
        guess = attempt.guess or guess
        if attempt.certificate is not None:
            state.bound, state.certificate = load, attempt.certificate
        else:
            failed = load
            if attempt.proven is None and guess is not None:
                weaker = weaker_certificate(state.problem, guess, load, state.bound)
                if weaker is not None:
                    state.bound, state.certificate = weaker.load, weaker
            _round(state, attempt, end_s, seed)
            failed = min(failed, state.value)


def _round(state: _State, attempt: Attempt, end_s: float, seed: int) -> None:
    """Choose a set per accelerator by the weights in the program, and anneal from there."""
    groups = group_nodes(state.problem, contiguous=False, undercut=state.value)
    annealer, random = Annealer(groups), np.random.default_rng(seed)
    accelerators = state.problem.accelerators
    for round_ in range(ROUNDINGS):
        if time.monotonic() > end_s or not attempt.sets:
            return
        taken: dict[int, int] = {}
        for device in range(accelerators):
            new = [len([n for n in nodes if n not in taken]) / len(nodes) for nodes in attempt.sets]
            chances = np.array(attempt.weights) * np.array(new) ** 4
            if chances.sum() > 0:
                number = random.choice(len(new), p=chances / chances.sum())
                taken.update((node, device) for node in attempt.sets[number] if node not in taken)
        others = random.integers(0, state.problem.devices, groups.count)
        start = np.array(
            [taken.get(m[0], int(o)) for m, o in zip(groups.members, others, strict=True)], np.int64
        )
        moves = min(MOVES, MOVES_PER_GROUP * groups.count)
        devices, value = annealer.run(
            start, moves=moves, seed=seed + round_, hot=1e-2, cold=1e-4, shrink=0.97
        )
        if np.isfinite(value):
            state.offer(groups.placement(devices))


def _next_load(proven: Fraction, failed: Fraction, value: Fraction, certified: bool) -> Fraction | None:
    """The load to try: a third, then half of the way while far, then 1 % below the answer, then closer."""
    if failed - proven < value / 2000:
        return None
    nearest = value / (1 + CLOSER * Fraction(9, 10))
    if not certified and proven < nearest * NEAR:
        # A load that is proven quickly: its sets and multipliers make the next ones quicker.
        return (2 * proven + min(failed, nearest)) / 3
    if failed < value or proven < nearest * NEAR:
        return (proven + min(failed, nearest if proven < nearest else failed)) / 2
    return nearest if proven < nearest else value * (1 - CLOSE)
