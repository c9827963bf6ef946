"""Put ranks together that share a row of the timeline.

few ranks          each has its own
equal events       the same instructions at the same times
equal programs     the same instructions: where there would be too many rows, and with how far they are apart
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from partc.cost.network.ways import Array
from partc.cost.simulation.timeline import Timeline
from partc.runtime.plan.program import Plan

FEW_RANKS = 6

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def group_ranks(timeline: Timeline, plan: Plan, most: int) -> list[list[int]]:
    """Return ranks with equal events together, or with equal programs where there are too many of these."""
    if len(plan.ranks) <= FEW_RANKS:
        return [[rank.rank] for rank in plan.ranks]
    groups = _with_equal_events(timeline, plan)
    return groups if len(groups) <= most else _with_equal_programs(timeline, plan)


def _with_equal_programs(timeline: Timeline, plan: Plan) -> list[list[int]]:
    """Return the ranks that issue the same instructions together, whatever their times."""
    kinds = np.zeros(len(plan.ranks), np.uint64)
    for bars in timeline.bars:
        kinds[bars.ranks] = _mix(kinds[bars.ranks] ^ np.uint64(bars.instruction + 1))
    return _together(kinds)


def apart_s_of(timeline: Timeline, groups: Sequence[Sequence[int]], ranks: int) -> Array:
    """Return by how much the members of each group begin the same at different times, at most."""
    group_of = np.zeros(ranks, np.int64)
    for number, members in enumerate(groups):
        group_of[list(members)] = number
    apart_s = np.zeros(len(groups))
    for _, same in groupby(timeline.bars, key=lambda bars: bars.instruction):
        first, last = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
        for bars in same:
            np.minimum.at(first, group_of[bars.ranks], bars.start_s)
            np.maximum.at(last, group_of[bars.ranks], bars.start_s)
        apart_s = np.maximum(apart_s, last - first)
    return apart_s


def _with_equal_events(timeline: Timeline, plan: Plan) -> list[list[int]]:
    kinds = np.zeros(len(plan.ranks), np.uint64)  # a hash of each rank's events so far
    for number, bars in enumerate(timeline.bars):
        # To a billionth of the step: the simulator's sums differ in the last bits from rank to rank.
        times = np.rint(np.stack([bars.start_s, bars.stop_s]) / (timeline.step_s or 1.0) * 1e9)
        event = [np.full(len(bars.ranks), number, np.uint64), *times.astype(np.uint64)]
        for part in event:
            kinds[bars.ranks] = _mix(kinds[bars.ranks] ^ part)
    return _together(kinds)


def _together(kinds: Hashes) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for rank, kind in enumerate(kinds.tolist()):
        groups.setdefault(kind, []).append(rank)
    return list(groups.values())


def _mix(hashes: Hashes) -> Hashes:
    """Scatter every bit of uint64 over all of them (Steele, Lea, Flood 2014, the finaliser of SplitMix64)."""
    hashes = hashes + np.uint64(0x9E3779B97F4A7C15)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
