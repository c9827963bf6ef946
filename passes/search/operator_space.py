"""Configurations of operators, drawn one kind at a time: degrees of their dimensions, and devices.

The space is FlexFlow's (flexflow.txt, section 4): an operator divides its samples and one other dimension of
its output, or of what it sums, into equal parts, each on a device of its own. Of the devices blocks of
neighbours are tried, and as many of every host. Operators that are alike, such as the steps of a recurrence
and repeated layers, are configured alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from partc.cost.strategy import OpConfig
from partc.passes.search.find_groups import OperatorGroup

AS_OPERANDS = 0.15  # how often a kind is left to follow its operands


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """Operators that are configured alike, and what they may split: dimension -> the most parts."""

    operators: tuple[str, ...]
    splits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KindConfig:
    """What a kind of operators splits, and on which devices."""

    split: tuple[tuple[str, int], ...]
    devices: tuple[str, ...]

    def entries(self, kind: OperatorKind) -> Iterable[OpConfig]:
        """Return entries of a strategy's `ops`."""
        for operator in kind.operators:
            yield OpConfig(operator, dict(self.split), devices=self.devices)


def kinds_of(groups: Sequence[OperatorGroup]) -> tuple[OperatorKind, ...]:
    """Return the kinds of operators: alike are those of one op, one shape and the same dimensions."""
    alike: dict[object, list[OperatorGroup]] = {}
    for group in groups:
        alike.setdefault((group.op, group.shape, tuple(group.splits.items())), []).append(group)
    return tuple(
        OperatorKind(tuple(group.node for group in members), members[0].splits) for members in alike.values()
    )


@dataclass(frozen=True)
class OperatorSpace:
    """What may be drawn. `devices`: of the workers, host by host; `samples`: of the graph's batch."""

    kinds: tuple[OperatorKind, ...]
    devices: tuple[str, ...]
    samples: int

    def draw(self, rng: np.random.Generator) -> tuple[int, KindConfig | None]:
        """Return a kind's number and a configuration for it; None: as its operands are."""
        number = int(rng.integers(len(self.kinds)))
        if rng.random() < AS_OPERANDS:
            return number, None
        parts = int(rng.choice(_divisors(len(self.devices))))
        replicas = int(rng.choice([n for n in _divisors(parts) if self.samples % n == 0]))
        splits = self.kinds[number].splits
        rest = parts // replicas
        fitting = [d for d, most in splits.items() if rest > 1 and most % rest == 0 and not _is_samples(d)]
        split = {"batch": replicas}
        if fitting:
            split[str(rng.choice(fitting))] = rest
        return number, KindConfig(tuple(split.items()), self._devices(prod(split.values()), rng))

    def _devices(self, count: int, rng: np.random.Generator) -> tuple[str, ...]:
        stride = len(self.devices) // count
        if rng.random() < 0.5:
            first = count * int(rng.integers(stride))
            return self.devices[first : first + count]
        return self.devices[int(rng.integers(stride)) :: stride]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _is_samples(dimension: str) -> bool:
    """Tell whether a dimension may be that of the samples, which `batch` names."""
    return dimension.partition("/")[0] == "out:0"
