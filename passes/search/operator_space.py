"""Configurations of operators: degrees of their dimensions, and devices.

The space is FlexFlow's (flexflow.txt, section 4): an operator divides its samples and one other dimension of
its output, or of what it sums, into equal parts, each on a device of its own. Of the devices blocks of
neighbours are tried, and as many of every host. Operators that are alike, such as the steps of a recurrence
and repeated layers, are a kind, and may be configured together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from partc.passes.search.find_groups import OperatorGroup

SplitDegrees = tuple[tuple[str, int], ...]  # dimension -> parts, as a strategy's `ops` spell dimensions


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """What a group splits, and who runs it: workers by number, as the places of its mesh in order."""

    split: SplitDegrees
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """Groups that are alike, by number, and what they may split: dimension -> the most parts."""

    groups: tuple[int, ...]
    splits: Mapping[str, int]


def kinds_of(groups: Sequence[OperatorGroup]) -> tuple[OperatorKind, ...]:
    """Return the kinds of operators: alike are those of one op, one shape and the same dimensions."""
    alike: dict[object, list[int]] = {}
    for number, group in enumerate(groups):
        alike.setdefault((group.op, group.shape, tuple(group.splits.items())), []).append(number)
    return tuple(OperatorKind(tuple(members), groups[members[0]].splits) for members in alike.values())


def data_parallel_config(workers: int) -> OperatorConfig:
    """Return the configuration that divides the samples among all workers."""
    return OperatorConfig((("batch", workers),), tuple(range(workers)))


@dataclass(frozen=True)
class OperatorSpace:
    """What may be drawn. `workers`: how many, host by host; `samples`: of the graph's batch."""

    kinds: tuple[OperatorKind, ...]
    workers: int
    samples: int

    def draw(self, rng: np.random.Generator) -> tuple[int, OperatorConfig]:
        """Return a kind's number and a configuration for it."""
        number = int(rng.integers(len(self.kinds)))
        parts = int(rng.choice(_divisors(self.workers)))
        replicas = int(rng.choice([n for n in _divisors(parts) if self.samples % n == 0]))
        splits = self.kinds[number].splits
        rest = parts // replicas
        fitting = [d for d, most in splits.items() if rest > 1 and most % rest == 0 and not _is_samples(d)]
        split = {"batch": replicas}
        if fitting:
            split[str(rng.choice(fitting))] = rest
        return number, OperatorConfig(tuple(split.items()), self._workers(prod(split.values()), rng))

    def _workers(self, count: int, rng: np.random.Generator) -> tuple[int, ...]:
        stride = self.workers // count
        everybody = range(self.workers)
        if rng.random() < 0.5:
            first = count * int(rng.integers(stride))
            return tuple(everybody[first : first + count])
        return tuple(everybody[int(rng.integers(stride)) :: stride])


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _is_samples(dimension: str) -> bool:
    """Tell whether a dimension may be that of the samples, which `batch` names."""
    return dimension.partition("/")[0] == "out:0"
