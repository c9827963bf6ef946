"""Contiguous placement: the best chain of parts, completed to an answer, and its proof by enumeration.

The limit below which a chain is sought starts at the bound that work alone gives and rises until there is
one. What the chain leaves open (free groups, and groups that a relaxation left out) goes where annealing
along the chain's order finds it best. Where downsets are too many, the lightest groups are left out of the
enumeration: it bounds the whole problem still.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

import numpy as np

from partc.cost.placement.problems.groups import NEVER, Groups, Ints, group_nodes, without_groups
from partc.cost.placement.problems.problem import NodePlacement, Problem
from partc.cost.placement.throughput.anneal import Annealer
from partc.cost.placement.throughput.chains import Chain, best_chain
from partc.cost.placement.throughput.conflicts import refuse
from partc.cost.placement.throughput.solution import Solution, checked_value, work_bound

STEP = Fraction(21, 20)
LEFT_OUT = (None, Fraction(0), Fraction(1, 2000), Fraction(1, 500), Fraction(1, 100), Fraction(1, 20))
CLOSE = Fraction(1, 1000)
PROMOTED_AT_ONCE = 2
SHARE_PER_TRY = 0.2
MOVES, MOVES_PER_GROUP = 400_000, 4_000


@dataclass
class _Best:
    """The best answer so far, and the bound so far."""

    problem: Problem
    bound: Fraction
    placement: NodePlacement | None = None
    value: Fraction | None = None

    def offer(self, placement: NodePlacement) -> None:
        value = checked_value(self.problem, placement, contiguous=True)
        if value is not None and (self.value is None or value < self.value):
            self.placement, self.value = placement, value

    def is_within(self, share: Fraction) -> bool:
        return self.value is not None and self.value <= self.bound * (1 + share)


def place_contiguously(problem: Problem, *, seconds: float = 60.0, seed: int = 0) -> Solution:
    """Find an answer of contiguous parts, and a bound. Raises NoPlacement where none fits or is found."""
    started = time.monotonic()
    best = _Best(problem, work_bound(problem))
    coarseness, promoted = 0, 0
    while not best.is_within(CLOSE) and coarseness < len(LEFT_OUT):
        left = seconds - (time.monotonic() - started)
        if left < 0.05 * seconds:
            break
        tried = _Relaxation(LEFT_OUT[coarseness], promoted)
        free = _search(best, tried, time.monotonic() + left * SHARE_PER_TRY, started + seconds, seed)
        if free is None:
            coarseness += 1
        elif promoted >= free:
            break
        else:
            promoted += PROMOTED_AT_ONCE
    if best.placement is None or best.value is None:
        raise refuse(problem, contiguous=True)
    seconds_used = time.monotonic() - started
    return Solution(
        best.placement, best.value, best.bound, best.bound, "enumeration of downsets", seconds_used
    )


@dataclass(frozen=True)
class _Relaxation:
    """What an enumeration leaves out: the lightest groups up to a share of work, all but some free groups."""

    left_out: Fraction | None
    promoted: int


def _search(best: _Best, tried: _Relaxation, deadline_s: float, end_s: float, seed: int) -> int | None:
    """Enumerate with rising limits; returns how many groups are free, or None where time did not suffice."""
    limit = best.bound * (1 + CLOSE) if best.bound else Fraction(1)
    most = _most_load(best.problem)
    while True:
        limit = min(limit, best.value) if best.value is not None else limit
        groups = group_nodes(best.problem, contiguous=True, undercut=limit)
        free = [group for group in range(groups.count) if not groups.forward[group]]
        dropped = _lightest(groups, tried.left_out)
        thin = _promote(groups, free, tried.promoted)
        thin = without_groups(thin, dropped) if dropped else thin
        chain = best_chain(thin, groups.ticks(limit, up=True), deadline_s=deadline_s)
        if not chain.complete:
            return None
        proven = groups.ticks(limit) if chain.value is None else chain.value
        best.bound = max(best.bound, groups.time(proven))
        if chain.value is not None:
            _complete(best, groups, thin, chain, end_s, seed)
        if chain.value is not None or limit == best.value or limit > most:
            return len(free)
        limit = limit * STEP


def _promote(groups: Groups, free: list[int], count: int) -> Groups:
    """Make the free groups with the costliest families among themselves members of downsets."""
    costs = dict.fromkeys(free, 0)
    for family, cost in zip(groups.families, groups.costs, strict=True):
        inner = [group for group in family if group in costs]
        for group in inner:
            costs[group] += int(cost) if len(inner) > 1 else 0
    chosen = sorted(free, key=lambda g: (-costs[g], -int(groups.work[g]), g))[:count]
    return replace(groups, forward=tuple(is_in or g in chosen for g, is_in in enumerate(groups.forward)))


def _most_load(problem: Problem) -> Fraction:
    return sum((n.cpu_time + (n.accelerator_time or 0) + n.output_cost for n in problem.nodes), Fraction(1))


def _lightest(groups: Groups, share: Fraction | None) -> frozenset[int]:
    """The lightest forward groups, up to a share of all work (0: those of no work); None: none."""
    if share is None:
        return frozenset()
    weight = np.maximum(np.where(groups.work >= NEVER, NEVER, groups.work), 0)
    order = sorted((g for g in range(groups.count) if groups.forward[g]), key=lambda g: (int(weight[g]), g))
    total = int(weight[weight < NEVER].sum())
    sums = accumulate(int(weight[g]) for g in order)
    return frozenset(g for g, upto in zip(order, sums, strict=True) if upto <= total * share)


def _complete(best: _Best, groups: Groups, thin: Groups, chain: Chain, end_s: float, seed: int) -> None:
    """Turn a chain into answers: give every group a device, then anneal in the chain's order."""
    order = _device_order(best.problem, chain)
    start = _first_devices(groups, thin, chain, order)
    best.offer(groups.placement(start))
    annealer = Annealer(groups)
    for round_ in range(6):
        if best.is_within(Fraction(1, 2000)) or time.monotonic() > end_s:
            return
        moves = min(MOVES, MOVES_PER_GROUP * groups.count)
        devices, value = annealer.run(
            start, moves=moves, seed=seed + round_, order=order, hot=1e-2, cold=1e-5
        )
        if np.isfinite(value):
            best.offer(groups.placement(devices))


def _device_order(problem: Problem, chain: Chain) -> list[int]:
    accelerators = iter(range(problem.accelerators))
    cpus = iter(range(problem.accelerators, problem.devices))
    used = [next(cpus) if on_cpu else next(accelerators) for on_cpu, _ in chain.parts]
    return used + [device for device in range(problem.devices) if device not in used]


def _first_devices(groups: Groups, thin: Groups, chain: Chain, order: list[int]) -> Ints:
    """Place what the chain leaves open: forward groups as early as they may, others by their families."""
    of_node: dict[int, int] = {}
    for rank, (_, members) in enumerate(chain.parts):
        for group in members:
            of_node.update(dict.fromkeys(thin.members[group], rank))
    ranks = [of_node.get(members[0], -1) for members in groups.members]
    for group in _topological(groups):
        if ranks[group] < 0 and groups.forward[group]:
            ranks[group] = max((ranks[b] for b in groups.before[group]), default=0)
    for group in range(groups.count):
        if ranks[group] < 0:
            ranks[group] = _dearest_neighbour(groups, group, ranks)
    return np.array([order[rank] for rank in ranks], np.int64)


def _dearest_neighbour(groups: Groups, group: int, ranks: list[int]) -> int:
    costs: dict[int, int] = {0: 0}
    for family in groups.touching[group]:
        for other in groups.families[family]:
            if ranks[other] >= 0:
                costs[ranks[other]] = costs.get(ranks[other], 0) + int(groups.costs[family])
    return max(costs, key=lambda rank: (costs[rank], -rank))


def _topological(groups: Groups) -> Iterator[int]:
    done: set[int] = set()
    waiting = list(range(groups.count))
    while waiting:
        ready = [g for g in waiting if done.issuperset(groups.before[g])]
        yield from ready
        done.update(ready)
        waiting = [g for g in waiting if g not in done]
