"""The most valuable set of groups that one accelerator can hold within a load: labels along a frontier.

    maximise  value(S) = sum of y[g], g in S     such that     work(S) + cut(S) <= cap

A label is (state, load, value). Of two labels in one state the one with more load and no more value goes.
A label also goes when its best completion is no more than `floor`: for every multiplier m / 2^SHIFT, with
C the best of value - m load over all completions from its state (a recursion over states alone),

    value + C[m][state] + m (cap - load) <= floor

All numbers are whole, so the result is exact with `width` 1. With a greater width, of the labels of one
state whose loads lie within that width only one stays: the most valuable, with its own load (what is found
then exists, but may not be the best), or, `relaxed`, with the least load of them (nothing better exists
than what is then found, but it may be too heavy). Where labels exceed `most`, the least promising are
dropped and the greatest of their bounds is returned.
"""

import numba
import numpy as np

SHIFT = 12


@numba.njit
def completions(order, first, following, paid, work, value, multipliers):  # type: ignore[no-untyped-def]
    """C of every multiplier and state: int64[multipliers, rows + 1], scaled by 2^SHIFT."""
    n = len(order)
    table = np.zeros((len(multipliers), first[n] + 1), np.int64)
    for m in range(len(multipliers)):
        a = multipliers[m]
        for i in range(n - 1, -1, -1):
            g = order[i]
            gain = (value[g] << SHIFT) - a * work[g]
            for row in range(first[i], first[i + 1]):
                out = table[m, first[i + 1] + following[row, 0]] - a * paid[row, 0]
                taken = table[m, first[i + 1] + following[row, 1]] - a * paid[row, 1] + gain
                table[m, row] = max(out, taken)
    return table


@numba.njit
def price(  # type: ignore[no-untyped-def]
    order, first, following, paid, work, value, multipliers, table, cap, floor, most, columns, width, relaxed
):  # fmt: skip
    """Return (sets bool[found, groups], values int64[found], bound on every set's value, labels made)."""
    n = len(order)
    state, load, worth = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    trace = np.full(1, -1, np.int64)
    parents, taken, labels = np.empty(1 << 16, np.int64), np.empty(1 << 16, np.bool_), 0
    dropped = np.int64(floor)
    for i in range(n):
        g = order[i]
        state, load, worth, bounds, origin = _next_labels(
            state, load, worth, first[i], first[i + 1], following, paid, work[g], value[g],
            multipliers, table, cap, floor,
        )  # fmt: skip
        labels_left, dropped = _keep_best(state, load, worth, bounds, cap, width, relaxed, dropped)
        labels_left, dropped = _keep_promising(labels_left, bounds, most, dropped)
        parents, taken = (
            _with_room(parents, labels + len(labels_left)),
            _with_room(taken, labels + len(labels_left)),
        )
        for r in range(len(labels_left)):
            parents[labels + r] = trace[origin[labels_left[r]] >> 1]
            taken[labels + r] = origin[labels_left[r]] & 1 == 1
        state, load, worth = state[labels_left], load[labels_left], worth[labels_left]
        trace = np.arange(labels, labels + len(labels_left))
        labels += len(labels_left)
        if len(labels_left) == 0:
            break
    count = min(columns, len(state))
    best_first = np.argsort(-worth)[:count] if count > 0 else np.zeros(0, np.int64)
    sets, values = _sets_of(best_first, order, worth, trace, parents, taken)
    for v in values:
        dropped = max(dropped, v)
    return sets, values, dropped, labels


@numba.njit
def _next_labels(  # type: ignore[no-untyped-def]
    state, load, worth, row, next_row, following, paid, work, value, multipliers, table, cap, floor
):  # fmt: skip
    """Leave or take a group of every label; returns (state, load, value, bound, 2 label + is taken) int64."""
    count = 0
    new_state = np.empty(2 * len(state), np.int64)
    new_load = np.empty(2 * len(state), np.int64)
    new_worth = np.empty(2 * len(state), np.int64)
    bounds = np.empty(2 * len(state), np.int64)
    origin = np.empty(2 * len(state), np.int64)
    for label in range(len(state)):
        at = row + state[label]
        for x in range(2):
            total = load[label] + paid[at, x] + (work if x == 1 else 0)
            if total > cap:
                continue
            w = worth[label] + (value if x == 1 else 0)
            s = following[at, x]
            rest = np.int64(1) << np.int64(60)
            for m in range(len(multipliers)):
                rest = min(rest, table[m, next_row + s] + multipliers[m] * (cap - total))
            bound = w + (rest >> SHIFT)
            if bound <= floor:
                continue
            new_state[count] = s
            new_load[count] = total
            new_worth[count] = w
            bounds[count] = bound
            origin[count] = 2 * label + x
            count += 1
    return new_state[:count], new_load[:count], new_worth[:count], bounds[:count], origin[:count]


@numba.njit
def _keep_best(state, load, worth, bounds, cap, width, relaxed, dropped):  # type: ignore[no-untyped-def]
    """Keep the labels of each state that are worth more than all lighter ones; of a width of loads, one.

    Returns (labels kept, by state and load, the greatest bound of what was dropped); may lower `load`.
    """
    rank = np.argsort(state * (cap + 1) + load)
    remaining = np.empty(len(rank), np.int64)
    keep = 0
    last_state = np.int64(-1)
    best_worth = np.int64(0)
    bucket = np.int64(-1)
    for label in rank:
        if state[label] != last_state:
            last_state = state[label]
        elif worth[label] <= best_worth:
            continue
        elif load[label] // width == bucket:
            if relaxed:
                load[label] = load[remaining[keep - 1]]
            else:
                dropped = max(dropped, bounds[remaining[keep - 1]])
            keep -= 1
        bucket = load[label] // width
        best_worth = worth[label]
        remaining[keep] = label
        keep += 1
    return remaining[:keep], dropped


@numba.njit
def _keep_promising(remaining, bounds, most, dropped):  # type: ignore[no-untyped-def]
    """Drop the labels of the least bounds where there are more than `most`; returns as _keep_best."""
    if len(remaining) <= most:
        return remaining, dropped
    line = np.sort(bounds[remaining])[len(remaining) - most]
    return remaining[bounds[remaining] > line], max(dropped, line)


@numba.njit
def _with_room(array, size):  # type: ignore[no-untyped-def]
    """Return an array of this size at least, its entries at its begin."""
    if size <= len(array):
        return array
    grown = np.empty(2 * size, array.dtype)
    grown[: len(array)] = array
    return grown


@numba.njit
def _sets_of(labels, order, worth, trace, parents, taken):  # type: ignore[no-untyped-def]
    """Follow labels back to the groups that they hold; returns (bool[labels, groups], int64[labels])."""
    sets = np.zeros((len(labels), len(order)), np.bool_)
    values = np.zeros(len(labels), np.int64)
    for r in range(len(labels)):
        values[r] = worth[labels[r]]
        at = trace[labels[r]]
        i = len(order) - 1
        while at >= 0:
            sets[r, order[i]] = taken[at]
            at = parents[at]
            i -= 1
    return sets, values
