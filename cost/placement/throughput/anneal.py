"""Improve a placement by simulated annealing, with or without an order of the devices to keep.

    energy = sum over devices of max(0, load - target)  +  TOTAL_WEIGHT sum of the accelerators' loads
             + memory that is missing, as a share of an accelerator's, times the target

A move takes a group, or all groups of a family, to another device; a device's load changes through its own
counts of members alone. Where an order of the devices is given, only moves that keep every edge along it
are made.
"""

from collections.abc import Sequence

import numba
import numpy as np

from partc.cost.placement.problems.groups import Groups, Ints, flat

TOTAL_WEIGHT = 0.02


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


@numba.njit
def _shift(  # type: ignore[no-untyped-def]
    g, target_device, device_of, counts, loads, sizes, work, cpu, size, touch_start, touch, fam_size,
    fam_cost, accelerators,
):  # fmt: skip
    """Move one group; a move back is the same call with its old device."""
    old = device_of[g]
    loads[old] -= work[g] if old < accelerators else cpu[g]
    loads[target_device] += work[g] if target_device < accelerators else cpu[g]
    sizes[old] -= size[g]
    sizes[target_device] += size[g]
    for e in range(touch_start[g], touch_start[g + 1]):
        f = touch[e]
        if old < accelerators:
            if counts[f, old] == fam_size[f]:
                loads[old] += fam_cost[f]
            if counts[f, old] == 1:
                loads[old] -= fam_cost[f]
        counts[f, old] -= 1
        if target_device < accelerators:
            if counts[f, target_device] == 0:
                loads[target_device] += fam_cost[f]
            if counts[f, target_device] == fam_size[f] - 1:
                loads[target_device] -= fam_cost[f]
        counts[f, target_device] += 1
    device_of[g] = target_device


@numba.njit
def _energy(loads, sizes, accelerators, memory, target):  # type: ignore[no-untyped-def]
    energy = 0.0
    for d in range(len(loads)):
        energy += max(0.0, loads[d] - target)
        if d < accelerators:
            energy += TOTAL_WEIGHT * loads[d]
            if sizes[d] > memory:
                energy += target * (0.1 + (sizes[d] - memory) / max(memory, 1.0))
    return energy


@numba.njit
def _worst(loads, sizes, accelerators, memory):  # type: ignore[no-untyped-def]
    worst = loads.max()
    for d in range(accelerators):
        if sizes[d] > memory:
            return np.inf
    return worst


@numba.njit
def anneal(  # type: ignore[no-untyped-def]
    start, work, cpu, size, touch_start, touch, member_start, member, fam_cost,
    before_start, before, after_start, after,
    rank_of, accelerators, memory, hot, cold, moves, shrink, seed,
):  # fmt: skip
    """Anneal from `start`; returns (best devices int64[groups], its load). `rank_of[0] < 0`: no order."""
    np.random.seed(seed)
    groups, devices = len(start), len(rank_of)
    fam_size = member_start[1:] - member_start[:-1]
    arrays = (work, cpu, size, touch_start, touch, fam_size, fam_cost, accelerators)
    device_of, counts = np.empty(groups, np.int64), np.zeros((len(fam_size), devices), np.int64)
    # Made here: numba then knows that they do not overlap.
    loads, sizes = np.zeros(devices), np.zeros(devices)
    _put_all(start, device_of, counts, loads, sizes, *arrays)
    best_value = _worst(loads, sizes, accelerators, memory)
    best = device_of.copy()
    target = loads.max() * shrink if best_value == np.inf else best_value * shrink
    energy = _energy(loads, sizes, accelerators, memory, target)
    moved = np.zeros(groups, np.int64)
    origin = np.zeros(groups, np.int64)
    for move in range(moves):
        heat = target * hot * (cold / hot) ** (move / moves)
        g = np.random.randint(groups)  # drawn here: in a function of its own that takes two fifths longer
        count = 1
        moved[0] = g
        new = np.random.randint(devices)
        if touch_start[g + 1] > touch_start[g] and np.random.random() < 0.8:
            f = touch[np.random.randint(touch_start[g], touch_start[g + 1])]
            new = device_of[member[np.random.randint(member_start[f], member_start[f + 1])]]
            if np.random.random() < 0.15:
                count = 0
                for e in range(member_start[f], member_start[f + 1]):
                    moved[count] = member[e]
                    count += 1
                if np.random.random() < 0.5:
                    new = np.random.randint(devices)
        changed = False
        for i in range(count):
            origin[i] = device_of[moved[i]]
            if origin[i] != new:
                changed = True
                _shift(moved[i], new, device_of, counts, loads, sizes, *arrays)
        if not changed:
            continue
        allowed = rank_of[0] < 0 or _keeps_order(
            moved, count, new, device_of, rank_of, before_start, before, after_start, after
        )
        after_energy = _energy(loads, sizes, accelerators, memory, target)
        if allowed and (
            after_energy <= energy or np.random.random() < np.exp((energy - after_energy) / heat)
        ):
            energy = after_energy
            value = _worst(loads, sizes, accelerators, memory)
            if value < best_value:
                best_value = value
                best[:] = device_of
                target = best_value * shrink
                energy = _energy(loads, sizes, accelerators, memory, target)
        else:
            for i in range(count - 1, -1, -1):
                if origin[i] != new:
                    _shift(moved[i], origin[i], device_of, counts, loads, sizes, *arrays)
    return best, best_value


@numba.njit
def _put_all(  # type: ignore[no-untyped-def]
    start, device_of, counts, loads, sizes,
    work, cpu, size, touch_start, touch, fam_size, fam_cost, accelerators,
):  # fmt: skip
    """Put every group on its device: all on the last, and then one by one."""
    last = len(loads) - 1
    device_of[:] = last
    counts[:, last] = fam_size
    for g in range(len(start)):
        loads[last] += work[g] if last < accelerators else cpu[g]
        sizes[last] += size[g]
    for g in range(len(start)):
        if start[g] != last:
            _shift(
                g, start[g], device_of, counts, loads, sizes,
                work, cpu, size, touch_start, touch, fam_size, fam_cost, accelerators,
            )  # fmt: skip


@numba.njit
def _keeps_order(moved, count, new, device_of, rank_of, before_start, before, after_start, after):  # type: ignore[no-untyped-def]
    """Tell whether groups on a device have no input behind it and no reader before it."""
    for g in moved[:count]:
        for e in range(before_start[g], before_start[g + 1]):
            if rank_of[device_of[before[e]]] > rank_of[new]:
                return False
        for e in range(after_start[g], after_start[g + 1]):
            if rank_of[device_of[after[e]]] < rank_of[new]:
                return False
    return True
