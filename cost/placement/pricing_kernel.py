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
    state = np.zeros(1, np.int64)
    load = np.zeros(1, np.int64)
    worth = np.zeros(1, np.int64)
    trace = np.full(1, -1, np.int64)
    pool_parent = np.empty(1 << 16, np.int64)
    pool_taken = np.empty(1 << 16, np.bool_)
    pool = 0
    dropped = np.int64(floor)
    for i in range(n):
        g = order[i]
        count = len(state)
        new_state = np.empty(2 * count, np.int64)
        new_load = np.empty(2 * count, np.int64)
        new_worth = np.empty(2 * count, np.int64)
        new_bound = np.empty(2 * count, np.int64)
        new_from = np.empty(2 * count, np.int64)
        made = 0
        for label in range(count):
            row = first[i] + state[label]
            for x in range(2):
                held = load[label] + paid[row, x] + (work[g] if x == 1 else 0)
                if held > cap:
                    continue
                w = worth[label] + (value[g] if x == 1 else 0)
                s = following[row, x]
                bound = np.int64(1) << np.int64(60)
                for m in range(len(multipliers)):
                    here = table[m, first[i + 1] + s] + multipliers[m] * (cap - held)
                    if here < bound:
                        bound = here
                bound = w + (bound >> SHIFT)
                if bound <= floor:
                    continue
                new_state[made] = s
                new_load[made] = held
                new_worth[made] = w
                new_bound[made] = bound
                new_from[made] = 2 * label + x
                made += 1
        key = new_state[:made] * (cap + 1) + new_load[:made]
        rank = np.argsort(key)
        kept = np.empty(made, np.int64)
        keep = 0
        last_state = np.int64(-1)
        best_worth = np.int64(0)
        bucket = np.int64(-1)
        for r in range(made):
            label = rank[r]
            if new_state[label] != last_state:
                last_state = new_state[label]
            elif new_worth[label] <= best_worth:
                continue
            elif new_load[label] // width == bucket:
                if relaxed:
                    new_load[label] = new_load[kept[keep - 1]]
                else:
                    dropped = max(dropped, new_bound[kept[keep - 1]])
                keep -= 1
            bucket = new_load[label] // width
            best_worth = new_worth[label]
            kept[keep] = label
            keep += 1
        if keep > most:
            bounds = new_bound[kept[:keep]]
            line = np.sort(bounds)[keep - most]
            dropped = max(dropped, line)
            fewer = 0
            for r in range(keep):
                if new_bound[kept[r]] > line:
                    kept[fewer] = kept[r]
                    fewer += 1
            keep = fewer
        if pool + keep > len(pool_parent):
            size = 2 * (pool + keep)
            grown_parent = np.empty(size, np.int64)
            grown_parent[:pool] = pool_parent[:pool]
            grown_taken = np.empty(size, np.bool_)
            grown_taken[:pool] = pool_taken[:pool]
            pool_parent, pool_taken = grown_parent, grown_taken
        next_state = np.empty(keep, np.int64)
        next_load = np.empty(keep, np.int64)
        next_worth = np.empty(keep, np.int64)
        next_trace = np.empty(keep, np.int64)
        for r in range(keep):
            label = kept[r]
            next_state[r] = new_state[label]
            next_load[r] = new_load[label]
            next_worth[r] = new_worth[label]
            pool_parent[pool] = trace[new_from[label] >> 1]
            pool_taken[pool] = new_from[label] & 1 == 1
            next_trace[r] = pool
            pool += 1
        state, load, worth, trace = next_state, next_load, next_worth, next_trace
        if keep == 0:
            break
    found = min(columns, len(state))
    best_first = np.argsort(-worth)[:found] if found > 0 else np.zeros(0, np.int64)
    sets = np.zeros((found, n), np.bool_)
    values = np.zeros(found, np.int64)
    bound = dropped
    for r in range(found):
        label = best_first[r]
        values[r] = worth[label]
        bound = max(bound, worth[label])
        at = trace[label]
        i = n - 1
        while at >= 0:
            sets[r, order[i]] = pool_taken[at]
            at = pool_parent[at]
            i -= 1
    return sets, values, bound, pool
