"""Climb among pipelines: take any quicker change of one, by the simulated steps of whole plans.

Every change of the pipeline so far is tried, what is estimated to be quickest first, and the first that is
quicker is taken, until none is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf

import numpy as np

from partc.passes.search.stages.pipeline_space import Pipeline, PipelineSpace

LEAST_GAIN = 1e-6  # of a step: less is rounding
DRAWN = 50  # new pipelines, of which that is begun at which is estimated to be quickest
MOST_DRAWS = 1_000  # until they are found
MOST_ESTIMATES = 2_000  # to find where climbs are to begin
PROMISING = 3  # of these: where they begin, besides names


PricePipeline = Callable[[Pipeline], float]  # seconds of a step


@dataclass
class PipelineClimb:
    """Climbs among the pipelines of a step.

    price     the simulated seconds of a pipeline's step, inf where it cannot be
    estimate  about what it takes, in no time
    goes_on   whether one more may be priced, after so many
    prices    what is known
    """

    space: PipelineSpace
    price: PricePipeline
    estimate: PricePipeline
    goes_on: Callable[[int], bool]
    prices: dict[Pipeline, float] = field(default_factory=dict)
    optimal: set[Pipeline] = field(default_factory=set)  # no change of them is quicker
    priced: int = 0

    @property
    def in_order(self) -> list[Pipeline]:
        """Return what was priced, from the quickest on."""
        return sorted(self.prices, key=self.prices.__getitem__)

    def run(self, starts: Iterable[Pipeline], rng: np.random.Generator) -> None:
        """Climb from every start, then from drawn ones, until it may not go on or nothing new is drawn."""
        for start in chain(starts, self._draws(rng)):
            if not self._may_price():
                return
            self._climb(start)

    def _draws(self, rng: np.random.Generator) -> Iterator[Pipeline]:
        """Yield the most promising of some drawn pipelines, as long as any is new."""
        while drawn := list(islice(self._new(rng), DRAWN)):
            yield min(drawn, key=self.estimate)

    def _new(self, rng: np.random.Generator) -> Iterator[Pipeline]:
        drawn = (self.space.draw(rng) for _ in range(MOST_DRAWS))
        return (pipeline for pipeline in drawn if pipeline not in self.prices)

    def _climb(self, here: Pipeline) -> None:
        step_s = self._priced_s(here)
        while step_s < inf and here not in self.optimal:
            better = self._find_quicker(here, step_s)
            if better is None:
                return
            here, step_s = better, self.prices[better]

    def _find_quicker(self, here: Pipeline, step_s: float) -> Pipeline | None:
        """Return a change that is quicker; None if there is none, or it may not go on."""
        for move in sorted(dict.fromkeys(self.space.moves(here)), key=self.estimate):
            if move not in self.prices and not self._may_price():
                return None
            if self._priced_s(move) < step_s * (1 - LEAST_GAIN):
                return move
        self.optimal.add(here)
        return None

    def _may_price(self) -> bool:
        return self.goes_on(self.priced)

    def _priced_s(self, pipeline: Pipeline) -> float:
        if pipeline not in self.prices:
            self.priced += 1
            self.prices[pipeline] = self.price(pipeline)
        return self.prices[pipeline]


def climb_pipelines(
    space: PipelineSpace,
    named: Mapping[Pipeline, float],
    price: PricePipeline,
    estimate: PricePipeline,
    goes_on: Callable[[int], bool],
    estimates_on: Callable[[], bool],
    rng: np.random.Generator,
) -> PipelineClimb:
    """Climb from the quickest name, from what estimates climb to, and from other names; then from drawn ones.

    `named`: pipelines that names are, with the seconds of their steps. `estimates_on`: whether estimates may
    still climb.
    """
    guess = PipelineClimb(
        space, estimate, lambda pipeline: 0.0, lambda count: count < MOST_ESTIMATES and estimates_on()
    )
    guess.run(named, rng)
    climb = PipelineClimb(space, price, estimate, goes_on, dict(named))
    names = climb.in_order
    climb.run((*names[:1], *guess.in_order[:PROMISING], *names[1:]), rng)
    return climb
