"""Configurations of operators: degrees of their dimensions, and devices.

The space is FlexFlow's (flexflow.txt, section 4): an operator divides its samples and one other dimension of
its output, or of what it sums, into equal parts, each on a device of its own. Of the devices blocks of
neighbours are tried, and as many of every host.

    kind    operators that are alike and read the same parameters, such as the steps of a recurrence
    family  kinds that are alike, such as repeated layers

The operators of either may be configured together, or, where a search is told so, must be.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from partc.passes.search.operators.find_groups import OperatorGroup

Together = Literal["steps", "layers"]  # which operators have one configuration: kinds, or families

SplitDegrees = tuple[tuple[str, int], ...]  # dimension -> parts, as a strategy's `ops` spell dimensions


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """What a group splits, and who runs it: workers by number, as the places of its mesh in order."""

    split: SplitDegrees
    workers: tuple[int, ...]

    def moved(self, places: Sequence[int]) -> "OperatorConfig":
        """Return the configuration with each worker's part on the one in its place."""
        return OperatorConfig(self.split, tuple(places[worker] for worker in self.workers))


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """Groups of a kind, by number, those of its family, and what they split: dimension -> the most parts."""

    groups: tuple[int, ...]
    family: tuple[int, ...]
    splits: Mapping[str, int]


def kinds_of(groups: Sequence[OperatorGroup], together: Together | None = None) -> tuple[OperatorKind, ...]:
    """Return the kinds, family by family: alike are operators of one op, shape and set of dimensions.

    Where repeated layers are configured together, a family is one kind.
    """
    families: dict[object, list[int]] = {}
    for number, group in enumerate(groups):
        families.setdefault((group.op, group.shape, tuple(group.splits.items())), []).append(number)
    kinds: list[OperatorKind] = []
    for family in families.values():
        reading: dict[tuple[str, ...], list[int]] = {}
        for number in family:
            reads = () if together == "layers" else groups[number].reads
            reading.setdefault(reads, []).append(number)
        splits = groups[family[0]].splits
        kinds += [OperatorKind(tuple(own), tuple(family), splits) for own in reading.values()]
    return tuple(kinds)


def data_parallel_config(workers: int) -> OperatorConfig:
    """Return the configuration that divides the samples among all workers."""
    return OperatorConfig((("batch", workers),), tuple(range(workers)))


@dataclass(frozen=True)
class OperatorSpace:
    """What may be drawn.

    workers   how many, host by host
    samples   of the graph's batch
    is_alike  the groups of a kind have one configuration
    """

    kinds: tuple[OperatorKind, ...]
    workers: int
    samples: int
    is_alike: bool = False

    def draw(
        self, rng: np.random.Generator, workers: tuple[int, ...] | None = None
    ) -> tuple[int, OperatorConfig]:
        """Return a kind's number and a configuration for it, on these workers where some are given."""
        number = int(rng.integers(len(self.kinds)))
        return number, self.draw_config(rng, number, workers)

    def draw_config(
        self, rng: np.random.Generator, number: int, workers: tuple[int, ...] | None = None
    ) -> OperatorConfig:
        """Return a configuration for a kind, on these workers where some are given."""
        parts = int(rng.choice(_divisors(self.workers))) if workers is None else len(workers)
        replicas = int(rng.choice([n for n in _divisors(parts) if self.samples % n == 0]))
        splits = self.kinds[number].splits
        rest = parts // replicas
        fitting = self._fitting(splits, rest) if rest > 1 else []
        split = {"batch": replicas}
        if fitting:
            split[str(rng.choice(fitting))] = rest
        count = prod(split.values())
        if workers is None or count < len(workers):
            sets = self._sets(count)
            workers = sets[int(rng.integers(len(sets)))]
        return OperatorConfig(tuple(split.items()), workers)

    def draw_workers(self, rng: np.random.Generator, count: int) -> tuple[int, ...]:
        """Return a set of so many workers."""
        sets = self._sets(count)
        return sets[int(rng.integers(len(sets)))]

    def resized(self, rng: np.random.Generator, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the same workers, or half or twice as many, some of them the same, if there are."""
        sizes = (len(workers), len(workers) // 2, 2 * len(workers))
        count = sizes[int(rng.integers(len(sizes)))]
        if count == len(workers) or not count or self.workers % count:
            return workers
        sets = [own for own in self._sets(count) if not set(own).isdisjoint(workers)]
        return sets[int(rng.integers(len(sets)))]

    def fitted(self, kind: int, config: OperatorConfig) -> OperatorConfig | None:
        """Return a configuration for a kind on the workers of another kind's: its own, or samples alone."""
        splits, others = self.kinds[kind].splits, config.split[1:]
        if all(parts == 1 or dimension in self._fitting(splits, parts) for dimension, parts in others):
            return config
        workers = len(config.workers)
        return None if self.samples % workers else OperatorConfig((("batch", workers),), config.workers)

    def replicas(self) -> Iterator[OperatorConfig]:
        """Yield configurations of samples alone, on the first neighbours and on the first of every host."""
        for replicas in (n for n in _divisors(self.workers) if self.samples % n == 0):
            for workers in dict.fromkeys((tuple(range(replicas)), self._spread(0, replicas))):
                yield OperatorConfig((("batch", replicas),), workers)

    def disjoint(self) -> Iterator[list[tuple[int, ...]]]:
        """Yield sets of disjoint workers, at least two: blocks of neighbours, or some of each host."""
        for count in (n for n in _divisors(self.workers)[:-1] if self.samples % n == 0):
            stride = self.workers // count
            blocks = [tuple(range(count * n, count * (n + 1))) for n in range(stride)]
            spread = [self._spread(n, count) for n in range(stride)]
            yield blocks
            if spread != blocks:
                yield spread

    def configs(self, kind: int) -> Iterator[OperatorConfig]:
        """Yield everything that may be drawn for a kind; some of it more than once."""
        splits = self.kinds[kind].splits
        for parts in _divisors(self.workers):
            for replicas in (n for n in _divisors(parts) if self.samples % n == 0):
                rest = parts // replicas
                fitting = self._fitting(splits, rest) if rest > 1 else []
                samples: SplitDegrees = (("batch", replicas),)
                for split in [(*samples, (dimension, rest)) for dimension in fitting] or [samples]:
                    for workers in self._sets(prod(degree for _, degree in split)):
                        yield OperatorConfig(split, workers)

    def _fitting(self, splits: Mapping[str, int], parts: int) -> list[str]:
        return [d for d, most in splits.items() if most % parts == 0 and not _is_samples(d)]

    def _sets(self, count: int) -> list[tuple[int, ...]]:
        """Return the blocks of neighbours, and as many workers of every host."""
        stride = self.workers // count
        blocks = [tuple(range(count * n, count * (n + 1))) for n in range(stride)]
        return list(dict.fromkeys((*blocks, *(self._spread(n, count) for n in range(stride)))))

    def _spread(self, first: int, count: int) -> tuple[int, ...]:
        stride = self.workers // count
        return tuple(range(first, first + stride * count, stride))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _is_samples(dimension: str) -> bool:
    """Tell whether a dimension may be that of the samples, which `batch` names."""
    return dimension.partition("/")[0] == "out:0"
