"""What the runtime draws in a step: numbers addressed by (seed, step, sample), whatever the number of ranks.

    seed      the node's own; of a node without one, the run's seed and the node's place
    step      from 0
    sample    its place in the total batch: a rank draws the rows of its own samples and no others

So replicas draw different numbers, N ranks draw what one device draws, and a run that goes on at step s
draws what it would have drawn had it never stopped.
"""

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from partc.runtime.data.batches import sizes_of
from partc.runtime.data.draws import normal_rows, uniform_rows
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import IDLE, Plan, Rank
from partc.runtime.plan.variables import DrawnInput, Normal

Array = np.ndarray[Any, np.dtype[Any]]


def draws_of(plan: Plan, rank: Rank) -> tuple[DrawnInput, ...]:
    """Return what a rank draws: servers only what is not split, and the idle nothing."""
    if IDLE in rank.sites:
        return ()
    return tuple(
        drawn for drawn in plan.drawn_inputs if rank.replica is not None or drawn.sample_axis is None
    )


def draw_share(plan: Plan, rank: Rank, share: Mapping[str, Array], step: int, seed: int) -> dict[str, Array]:
    """Draw what one rank reads in a step (from 0), given what it is fed."""
    sizes = plan.sizes | _sizes_of_share(plan, share)
    return {
        drawn.name: _draw(plan, drawn, sizes, rank.replica or 0, plan.replicas, step, seed)
        for drawn in draws_of(plan, rank)
    }


def draw_total(plan: Plan, batch: Mapping[str, Array], step: int, seed: int) -> dict[str, Array]:
    """Draw for a total batch what all replicas read in a step (from 0)."""
    sizes = plan.sizes | sizes_of(plan, batch)
    return {drawn.name: _draw(plan, drawn, sizes, 0, 1, step, seed) for drawn in plan.drawn_inputs}


def evaluate_size(size: int | str, sizes: Mapping[str, int]) -> int:
    """Return a size under values of the symbols: "20*batch" is a product."""
    if isinstance(size, int):
        return size
    return prod(int(factor) if factor.isdigit() else sizes[factor] for factor in size.split("*"))


def _sizes_of_share(plan: Plan, share: Mapping[str, Array]) -> dict[str, int]:
    """Return the graph's symbolic sizes that one rank's share shows."""
    parts = plan.replicas if plan.batch == "global" else 1
    return {
        size: share[entry.name].shape[axis] * (parts if axis == entry.sample_axis else 1)
        for entry in plan.data_inputs
        if entry.name in share
        for axis, size in enumerate(entry.shape)
        if isinstance(size, str)
    }


def _draw(
    plan: Plan, drawn: DrawnInput, sizes: Mapping[str, int], part: int, parts: int, step: int, seed: int
) -> Array:
    """Draw part `part` of `parts` of the samples: rows of a tensor whose first axis is the samples'."""
    key = _key(drawn, step, seed)
    shape = tuple(evaluate_size(size, sizes) for size in drawn.shape)
    axis = drawn.sample_axis
    if axis is None:
        return _rows(drawn, key, (1, *shape), 0, 1).reshape(shape)
    samples = shape[axis] // drawn.outer * (plan.replicas if plan.batch == "per-replica" else 1)
    before, behind = shape[:axis], shape[axis + 1 :]
    first, stop = part_range(samples, parts, part)
    rows = _rows(drawn, key, (samples, *before, drawn.outer, *behind), first, stop)
    merged = (*before, drawn.outer * (stop - first), *behind)
    return np.ascontiguousarray(np.moveaxis(rows, 0, axis + 1)).reshape(merged)


def _key(drawn: DrawnInput, step: int, seed: int) -> int:
    run = seed if drawn.follows_run else "own"
    digest = hashlib.sha256(f"draw/{run}/{drawn.distribution.seed}/{step}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


def _rows(drawn: DrawnInput, key: int, shape: tuple[int, ...], start: int, stop: int) -> Array:
    how, dtype = drawn.distribution, np.dtype(drawn.dtype)
    if isinstance(how, Normal):
        return normal_rows(key, shape, start, stop, dtype, mean=how.mean, scale=how.scale)
    return uniform_rows(key, shape, start, stop, dtype, low=how.low, high=how.high)
