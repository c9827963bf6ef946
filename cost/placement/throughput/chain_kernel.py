"""Kernels for chains of parts: all ways to extend a downset by one part of a bounded load.

A downset is a set of groups that holds whatever its forward groups read; bits in uint64 words. From a
downset I, `extend` visits every downset J above it once whose part J - I may be below `limit` on some
device, and records

    value(J, accelerators used + 1) = min over I of max(value(I), load(J - I))

and the same for a CPU. *Free* groups (backward, without a forward one of their colour) are no members of
downsets: each device takes or leaves each of them, whichever costs it less, so the values are then lower
bounds.
"""

import numba
import numpy as np

from partc.cost.placement.problems.groups import NEVER

LIMIT = NEVER


@numba.njit
def _find(table, keys, used, words, key):  # type: ignore[no-untyped-def]
    """Slot of this key in an open-addressing table: filled, or the empty one where it belongs."""
    mask = np.uint64(len(table) - 1)
    mixed = np.uint64(1469598103934665603)
    for w in range(words):
        mixed = (mixed ^ key[w]) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed ^ (mixed >> np.uint64(29))
    slot = mixed & mask
    while table[slot] >= 0:
        row = table[slot]
        same = True
        for w in range(words):
            if keys[row, w] != key[w]:
                same = False
                break
        if same:
            return slot
        slot = (slot + np.uint64(1)) & mask
    return slot


@numba.njit(inline="always")
def _begin(  # type: ignore[no-untyped-def]
    key, owed, pred_count, succ_start, succ, fam_start, fam, free_work, free_cost,
    inside, below, waiting, left_out, taken_in, candidates,
):  # fmt: skip
    """Set out from a state; return the work and number of its groups, and how many may come next."""
    inside[:] = 0
    below[:] = 0
    waiting[:] = pred_count
    left_out[:] = 0
    for o in range(len(free_work)):
        taken_in[o] = free_work[o] + free_cost[o]
    done_work = 0
    done_groups = 0
    for g in range(len(owed)):
        if key[g >> 6] >> np.uint64(g & 63) & np.uint64(1):
            done_work += owed[g]
            done_groups += 1
            for e in range(succ_start[g], succ_start[g + 1]):
                waiting[succ[e]] -= 1
            for e in range(fam_start[g], fam_start[g + 1]):
                below[fam[e]] += 1
    length = 0
    for g in range(len(owed)):
        if waiting[g] == 0 and not (key[g >> 6] >> np.uint64(g & 63) & np.uint64(1)):
            candidates[length] = g
            length += 1
    return done_work, done_groups, length


@numba.njit
def extend_layer(  # type: ignore[no-untyped-def]
    keys_in, value_in, first, last,
    keys, values, parents, on_cpu, table, filled,
    work, owed, cpu, size, pred_count, succ_start, succ, fam_start, fam, fam_size, fam_cost, free_of_family,
    free_work, free_cost, best, devices, memory, remaining_per_cpu, total_work, layer, budget,
):  # fmt: skip
    """Extend the states first..last of a layer; returns (states filled, best, steps, index of best or -1).

    Keys are uint64[state, words + 1]: groups as bits, then CPUs used. Stops early where the tables are full
    (filled = -1) or `budget` steps are used up (steps < 0).

    One function on purpose but for `_begin`. With families, table rows and room for what is left in functions
    of their own, inlined by numba, bert_l-3_training took 1.44 of the processor time, bert_l-3_inference 1.57
    and gnmt_inference 1.07; called, 1.50, 1.66 and 1.11; `_begin` alone 1.00 and (gnmt_inference) 0.97: whole
    searches of the hardest limit, medians of five in alternation (2026-11-24). Inlined by LLVM (forceinline),
    bert_l-3_training took 1.12 (2026-11-25).
    """
    groups = len(work)
    words = keys.shape[1]
    families = len(fam_size)
    accelerators, cpus = devices
    inside = np.zeros(families, np.int64)
    below = np.zeros(families, np.int64)
    waiting = np.zeros(groups, np.int64)
    candidates = np.zeros(groups, np.int64)
    chosen = np.zeros(groups + 1, np.int64)
    lengths = np.zeros(groups + 1, np.int64)
    left_out = np.zeros(len(free_work), np.int64)
    taken_in = np.zeros(len(free_work), np.int64)
    key = np.zeros(words, np.uint64)
    steps = 0
    best_index = -1
    for state in range(first, last):
        if value_in[state] >= best:
            continue
        cpus_used = np.int64(keys_in[state, words - 1])
        accelerators_used = layer - cpus_used
        for w in range(words):
            key[w] = keys_in[state, w]
        done_work, done_groups, length = _begin(
            key, owed, pred_count, succ_start, succ, fam_start, fam, free_work, free_cost,
            inside, below, waiting, left_out, taken_in, candidates,
        )  # fmt: skip
        part_work = 0
        part_owed = 0
        part_cpu = 0
        part_size = 0
        cut = 0
        settled = 0  # what the part pays to devices before it, whatever joins it later
        free_sum = 0
        depth = 0
        at = 0
        while True:
            if at < length:
                g = candidates[at]
                steps += 1
                part_work += work[g]
                part_owed += owed[g]
                part_cpu += cpu[g]
                part_size += size[g]
                done_groups += 1
                key[g >> 6] |= np.uint64(1) << np.uint64(g & 63)
                for e in range(fam_start[g], fam_start[g + 1]):
                    f = fam[e]
                    inside[f] += 1
                    o = free_of_family[f]
                    if o < 0:
                        if inside[f] == 1:
                            cut += fam_cost[f]
                            if below[f] > 0:
                                settled += fam_cost[f]
                        if inside[f] == fam_size[f]:
                            cut -= fam_cost[f]
                    else:
                        free_sum -= min(left_out[o], taken_in[o])
                        if inside[f] == 1:
                            left_out[o] += fam_cost[f]
                        if inside[f] == fam_size[f]:
                            taken_in[o] -= fam_cost[f]
                        free_sum += min(left_out[o], taken_in[o])
                chosen[depth] = at
                lengths[depth] = length
                depth += 1
                for e in range(succ_start[g], succ_start[g + 1]):
                    h = succ[e]
                    waiting[h] -= 1
                    if waiting[h] == 0:
                        candidates[length] = h
                        length += 1
                may_accelerate = (
                    accelerators_used < accelerators and part_work + settled < best and part_size <= memory
                )
                may_cpu = cpus_used < cpus and part_cpu < best
                load = part_work + cut + free_sum
                for kind in range(2):
                    if kind == 0 and not (may_accelerate and load < best):
                        continue
                    if kind == 1 and not may_cpu:
                        continue
                    value = max(value_in[state], load if kind == 0 else part_cpu)
                    left = total_work - done_work - part_owed
                    cpus_left = cpus - cpus_used - kind
                    room = (accelerators - accelerators_used - (1 - kind)) * (best - 1)
                    if cpus_left > 0:
                        room += cpus_left * remaining_per_cpu
                    if left > room:
                        continue
                    key[words - 1] = np.uint64(cpus_used + kind)
                    slot = _find(table, keys, filled, words, key)
                    row = table[slot]
                    if row < 0:
                        if filled == len(values):
                            return -1, best, steps, best_index
                        row = filled
                        table[slot] = row
                        for w in range(words):
                            keys[row, w] = key[w]
                        values[row] = LIMIT
                        filled += 1
                    if value < values[row]:
                        values[row] = value
                        parents[row] = state
                        on_cpu[row] = kind
                        if done_groups == groups:
                            best = value
                            best_index = row
                at += 1
                if may_accelerate or may_cpu:
                    continue
                at = length  # nothing above this part fits either: leave it at once
            if depth == 0:
                break
            depth -= 1
            at = chosen[depth]
            g = candidates[at]
            for e in range(succ_start[g], succ_start[g + 1]):
                waiting[succ[e]] += 1
            length = lengths[depth]
            part_work -= work[g]
            part_owed -= owed[g]
            part_cpu -= cpu[g]
            part_size -= size[g]
            done_groups -= 1
            key[g >> 6] &= ~(np.uint64(1) << np.uint64(g & 63))
            for e in range(fam_start[g], fam_start[g + 1]):
                f = fam[e]
                o = free_of_family[f]
                if o < 0:
                    if inside[f] == 1:
                        cut -= fam_cost[f]
                        if below[f] > 0:
                            settled -= fam_cost[f]
                    if inside[f] == fam_size[f]:
                        cut += fam_cost[f]
                else:
                    free_sum -= min(left_out[o], taken_in[o])
                    if inside[f] == 1:
                        left_out[o] -= fam_cost[f]
                    if inside[f] == fam_size[f]:
                        taken_in[o] += fam_cost[f]
                    free_sum += min(left_out[o], taken_in[o])
                inside[f] -= 1
            at += 1
            if steps > budget:
                return filled, best, -steps, best_index
    return filled, best, steps, best_index
