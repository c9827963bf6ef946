"""Find the quickest step: price candidates whole, then change one thing at a time.

    start    the quickest of the named candidates; of equal ones the first, which is the simplest
    repeat   take the first move (candidates.py) that makes the step shorter
    until    no move does, or the price allows no more
    take     what was found if it is quicker than the best simple way by more than the price may be off; else
             that way: of equal ones the first, which is the simplest

A candidate to start from is left out where its sums alone, at half their bytes (gradients may have 16 bits),
keep a link busy for longer than the quickest step so far.

What a step takes is behind one function, so that any price may stand there. How many strategies are priced
depends on the graph and the cluster alone, never on the clock: compiling twice gives the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import inf
from typing import Protocol

from partc.cost.assignment.candidates import BUSIEST_LINK, Candidate, Candidates
from partc.cost.strategy import Batch, Strategy
from partc.runtime.errors import NoPlacement

TIE = 1e-6  # relative difference below which two predictions are equal
LEAST_SHARE = 0.5  # of the bytes of a sum that a gradient has at least
MOVED = "improved"
DATA_PARALLEL = "data parallelism"  # where there is one candidate, whose step is not priced here


class StepPrice(Protocol):
    """What a step takes under a strategy, and how often that may be asked."""

    @property
    def evaluations(self) -> int:
        """Return how many strategies may be priced; those to start from are, even if they are more."""

    @property
    def doubt(self) -> float:
        """Return the relative difference of two predictions below which nothing is known of the order."""

    def __call__(self, strategy: Strategy) -> float:
        """Return the seconds of a step. Raises NoPlacement where it does not fit."""

    def expect(self, strategy: Strategy) -> None:
        """Hear what will probably be asked after the next."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A strategy whose whole step was priced. `names`: of all candidates that came out as this one."""

    names: tuple[str, ...]
    strategy: Strategy
    step_s: float


def search_steps(
    candidates: Candidates, named: Sequence[Candidate], batch: Batch, price: StepPrice
) -> tuple[Candidate, tuple[Tried, ...]]:
    """Return the quickest candidate found, and what was tried: it first, then those it began from.

    Raises NoPlacement where none of those to begin from fits.
    """
    priced = _PricedSteps(batch, price)
    distinct = priced.distinct(named)
    if len(distinct) == 1 and not any(True for _ in candidates.moves(distinct[0])):
        return distinct[0], ()
    fitting: list[tuple[Candidate, float]] = []
    for place, candidate in enumerate(distinct):
        least_s = min((step_s for _, step_s in fitting), default=inf)
        if candidate.certain_s * LEAST_SHARE > least_s:
            continue
        priced.expect(next((c for c in distinct[place + 1 :] if c.certain_s * LEAST_SHARE <= least_s), None))
        if (step_s := priced.step_s(candidate)) is not None:
            fitting.append((candidate, step_s))
    if not fitting:
        assert priced.failure is not None
        raise priced.failure
    start = _cheapest_of(fitting)
    best = _improve(candidates, start, priced, price.evaluations - priced.count)
    simple = [pair for pair in fitting if pair[0].name != BUSIEST_LINK] or fitting
    if priced.result(best).step_s * (1 + price.doubt) >= min(step_s for _, step_s in simple):
        best = _cheapest_of(simple)
    results = [priced.result(candidate) for candidate, _ in fitting]
    winner = priced.result(best)
    return best, (winner, *(tried for tried in results if tried is not winner))


def _cheapest_of(priced: Sequence[tuple[Candidate, float]]) -> Candidate:
    return cheapest([candidate for candidate, _ in priced], [step_s for _, step_s in priced])


def cheapest(candidates: Sequence[Candidate], seconds: Sequence[float]) -> Candidate:
    """Return the candidate of least seconds; of equal ones the first."""
    limit_s = min(seconds) * (1 + TIE)
    return next(c for c, own_s in zip(candidates, seconds, strict=True) if own_s <= limit_s)


def _improve(candidates: Candidates, start: Candidate, priced: "_PricedSteps", moves: int) -> Candidate:
    best, is_better = start, True
    while is_better:
        is_better = False
        for neighbour, following in pairwise(chain(_neighbours(candidates, best), [None])):
            assert neighbour is not None, "the last of pairs alone"
            if moves <= 0:
                return best
            if priced.knows(neighbour):
                continue
            moves -= 1
            priced.expect(following if moves and following and not priced.knows(following) else None)
            step_s = priced.step_s(neighbour, MOVED)
            if step_s is not None and step_s * (1 + TIE) < priced.result(best).step_s:
                best, is_better = neighbour, True
                break
    return best


def _neighbours(candidates: Candidates, best: Candidate) -> Iterator[Candidate]:
    return (n for move in candidates.moves(best) if (n := candidates.after(best, move)) is not None)


class _PricedSteps:
    """The strategies that were priced, each once."""

    def __init__(self, batch: Batch, price: StepPrice) -> None:
        self._batch = batch
        self._price = price
        self._names: dict[object, tuple[str, ...]] = {}
        self._tried: dict[object, Tried] = {}
        self._refused: set[object] = set()
        self.failure: NoPlacement | None = None

    def distinct(self, named: Sequence[Candidate]) -> list[Candidate]:
        """Return the first of each set of equal candidates."""
        candidates: dict[object, Candidate] = {}
        for candidate in named:
            key = self._key(candidate)
            candidates.setdefault(key, candidate)
            self._names[key] = (*self._names.get(key, ()), candidate.name)
        return list(candidates.values())

    @property
    def count(self) -> int:
        """Return how many were priced."""
        return len(self._tried) + len(self._refused)

    def knows(self, candidate: Candidate) -> bool:
        """Tell whether a candidate was priced, or did not fit."""
        key = self._key(candidate)
        return key in self._tried or key in self._refused

    def expect(self, candidate: Candidate | None) -> None:
        """Tell the price what is probably asked after the next, if anything is."""
        if candidate is not None:
            self._price.expect(candidate.strategy(self._batch))

    def step_s(self, candidate: Candidate, name: str = "") -> float | None:
        """Return what a candidate's step takes, None where it does not fit."""
        key = self._key(candidate)
        strategy = candidate.strategy(self._batch)
        try:
            step_s = self._price(strategy)
        except NoPlacement as error:
            self._refused.add(key)
            self.failure = self.failure or error
            return None
        self._tried[key] = Tried(self._names.get(key, (name,)), strategy, step_s)
        return step_s

    def result(self, candidate: Candidate) -> Tried:
        """Return what is known of a candidate that was priced."""
        return self._tried[self._key(candidate)]

    def _key(self, candidate: Candidate) -> object:
        return tuple(candidate.strategy(self._batch).parameters.items())
