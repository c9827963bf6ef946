"""Improve a placement by simulated annealing, with or without an order of the devices to keep."""

from collections.abc import Sequence

import numpy as np

from partc.cost.placement.anneal_kernel import anneal
from partc.cost.placement.groups import Groups, Ints, flat


class Annealer:
    """The kernel's arrays of one problem; `run` may be called any number of times."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        after: list[list[int]] = [[] for _ in range(groups.count)]
        for group, earlier in enumerate(groups.before):
            for other in earlier:
                after[other].append(group)
        problem = groups.problem
        self._arrays = (
            groups.work.astype(float),
            groups.cpu.astype(float),
            groups.size.astype(float),
            *flat(groups.touching),
            *groups.family_table,
            groups.costs.astype(float),
            *flat(groups.before),
            *flat(tuple(map(tuple, after))),
        )
        self._devices = problem.devices
        self._limits = (problem.accelerators, float(groups.memory))

    def run(
        self,
        start: Ints,
        *,
        moves: int,
        seed: int,
        order: Sequence[int] | None = None,
        hot: float = 3e-2,
        cold: float = 3e-4,
        shrink: float = 0.98,
    ) -> tuple[Ints, float]:
        """Return the best devices of groups found and their greatest load in ticks (inf: memory is exceeded).

        `order`: devices from first to last; temperatures and target are shares of the best load so far.
        """
        rank_of = np.full(self._devices, -1, np.int64)
        if order is not None:
            rank_of[list(order)] = np.arange(len(order))
        best, value = anneal(
            start.astype(np.int64), *self._arrays, rank_of, *self._limits, hot, cold, moves, shrink, seed
        )
        return best, float(value)
