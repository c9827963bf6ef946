"""Pipelines of a step: how many stages, where each begins, micro-batches, and what a stage's workers divide.

    stages x data x tensor = workers

A stage is a contiguous part of the line of forward nodes (cut_stages.py). With a single stage these are data
and tensor parallelism, `fsdp`, and gradients that are summed over micro-batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


@dataclass(frozen=True, slots=True, order=True)
class Pipeline:
    """A number of stages, each a grid of `data` x `tensor` workers.

    starts        places in the line at which stages behind the first begin, ascending
    microbatches  equal parts of a replica's batch, which pass one after the other
    shares        replicas share the variables, as under `fsdp`
    """

    data: int
    tensor: int = 1
    starts: tuple[int, ...] = ()
    microbatches: int = 1
    shares: bool = False

    @property
    def stages(self) -> int:
        """Return how many stages there are."""
        return len(self.starts) + 1


@dataclass(frozen=True)
class PipelineSpace:
    """The pipelines of a step on some workers, and what is near each.

    places   of the line
    counts   replicas -> into how many parts a replica's batch may be divided, ascending
    cut      a pipeline whose starts are of another number of stages -> those that suit its number
    is_fixed replicas are as many as workers, as a batch of each replica's own wants it
    """

    workers: int
    places: int
    counts: Callable[[int], tuple[int, ...]]
    cut: Callable[[int, Pipeline], tuple[int, ...]]
    is_fixed: bool = False

    def moves(self, here: Pipeline) -> Iterator[Pipeline]:
        """Yield what one change leads to: of a cut, the micro-batches, the grid, or who keeps variables."""
        yield from self._other_cuts(here)
        counts = self.counts(here.data)
        yield from (replace(here, microbatches=n) for n in _neighbours(counts, here.microbatches))
        if here.data > 1:
            yield replace(here, shares=not here.shares)
        for stages, data, tensor in self._grids:
            if _is_step((here.stages, here.data, here.tensor), (stages, data, tensor)):
                yield from self._regrid(here, stages, data, tensor)

    def draw(self, rng: np.random.Generator) -> Pipeline:
        """Return any pipeline, its cuts drawn as well."""
        stages, data, tensor = self._grids[int(rng.integers(len(self._grids)))]
        starts = sorted(
            int(place) for place in rng.choice(np.arange(1, self.places), stages - 1, replace=False)
        )
        shares = data > 1 and bool(rng.random() < 0.5)
        return Pipeline(data, tensor, tuple(starts), int(rng.choice(self.counts(data))), shares)

    @cached_property
    def _grids(self) -> list[tuple[int, int, int]]:
        """Return all (stages, data, tensor)."""
        return [
            (stages, data, self.workers // stages // data)
            for stages in _divisors(self.workers)
            for data in _divisors(self.workers // stages)
            if stages <= max(1, self.places) and (data == self.workers or not self.is_fixed)
        ]

    def _other_cuts(self, here: Pipeline) -> Iterator[Pipeline]:
        """Yield what comes of one cut that is 1, 2, 4, ... places earlier or later, and of balanced ones."""
        bounds = (0, *here.starts, self.places)
        for number, start in enumerate(here.starts):
            for way in (-1, 1):
                step = 1
                while bounds[number] < start + way * step < bounds[number + 2]:
                    moved = (*here.starts[:number], start + way * step, *here.starts[number + 1 :])
                    yield replace(here, starts=moved)
                    step *= 2
        if here.starts and (balanced := self.cut(here.stages, here)) != here.starts:
            yield replace(here, starts=balanced)

    def _regrid(self, here: Pipeline, stages: int, data: int, tensor: int) -> Iterator[Pipeline]:
        """Yield another grid, with as many micro-batches as before, and with as many a stage."""
        counts = self.counts(data)
        for target in dict.fromkeys((here.microbatches, here.microbatches * stages // here.stages)):
            count = max((n for n in counts if n <= target), default=1)
            moved = Pipeline(data, tensor, here.starts, count, here.shares and data > 1)
            yield moved if stages == here.stages else replace(moved, starts=self.cut(stages, moved))


def _neighbours(counts: tuple[int, ...], count: int) -> list[int]:
    """Return the next smaller and larger number."""
    below, above = [n for n in counts if n < count], [n for n in counts if n > count]
    return below[-1:] + above[:1]


def _is_step(here: tuple[int, int, int], there: tuple[int, int, int]) -> bool:
    """Tell whether one prime factor goes from one of the three numbers to another."""
    fewer = [a // b for a, b in zip(here, there, strict=True) if a > b and a % b == 0]
    more = [b // a for a, b in zip(here, there, strict=True) if b > a and b % a == 0]
    return len(fewer) == len(more) == 1 and fewer == more and len(_divisors(fewer[0])) == 2


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
