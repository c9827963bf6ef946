"""Annealing of schedules: a device per group and an order of the nodes, run as early as possible.

Moves: a group to another device, or a node to another place of the order between its inputs and readers. The
energy is the makespan, and a thousandth of the mean end, which tells apart schedules of equal makespan.
"""

import numba
import numpy as np

MEAN_WEIGHT = 1e-3


@numba.njit
def run_order(order, device_of, times, cost, input_start, inputs, accelerators, ends):  # type: ignore[no-untyped-def]
    """Fill `ends` and return (makespan, mean end). times float64[2, nodes]: on an accelerator, on a CPU."""
    free = np.zeros(device_of.max() + 1)
    total = 0.0
    latest = 0.0
    for node in order:
        device = device_of[node]
        took = times[0 if device < accelerators else 1, node]
        start = free[device] if took > 0 else 0.0
        for e in range(input_start[node], input_start[node + 1]):
            source = inputs[e]
            arrival = ends[source]
            other = device_of[source]
            if other != device and (other < accelerators or device < accelerators):
                arrival += cost[source]
            start = max(start, arrival)
        ends[node] = start + took
        if took > 0:
            free[device] = ends[node]
        total += ends[node]
        latest = max(latest, ends[node])
    return latest, total / max(1, len(order))


@numba.njit
def anneal_schedule(  # type: ignore[no-untyped-def]
    order, device_of, group_of, member_start, member, times, cost, sizes, input_start, inputs,
    reader_start, readers, accelerators, devices, memory, hot, cold, moves, seed,
):  # fmt: skip
    """Return (order, devices int64[nodes], makespan) of the best schedule; the start must be allowed."""
    np.random.seed(seed)
    nodes = len(order)
    order, device_of = order.copy(), device_of.copy()
    place = np.empty(nodes, np.int64)
    for i in range(nodes):
        place[order[i]] = i
    used = np.zeros(devices)
    for node in range(nodes):
        used[device_of[node]] += sizes[node]
    ends = np.zeros(nodes)
    best, mean = run_order(order, device_of, times, cost, input_start, inputs, accelerators, ends)
    energy = best + MEAN_WEIGHT * mean
    best_order, best_devices = order.copy(), device_of.copy()
    for move in range(moves):
        heat = best * hot * (cold / hot) ** (move / moves)
        node = np.random.randint(nodes)
        moves_group = np.random.random() < 0.6
        members = member[member_start[group_of[node]] : member_start[group_of[node] + 1]]
        old, source = device_of[node], place[node]
        if moves_group:
            new = _draw_device(node, device_of, devices, input_start, inputs)
            if new == old or not _fits(members, new, times, sizes, used, accelerators, memory):
                continue
            _move_members(members, old, new, device_of, sizes, used)
        else:
            target = _draw_place(node, place, input_start, inputs, reader_start, readers)
            if target == source:
                continue
            _shift(order, place, source, target)
        value, mean = run_order(order, device_of, times, cost, input_start, inputs, accelerators, ends)
        after = value + MEAN_WEIGHT * mean
        if after <= energy or np.random.random() < np.exp((energy - after) / heat):
            energy = after
            if value < best:
                best = value
                best_order[:] = order
                best_devices[:] = device_of
        elif moves_group:
            _move_members(members, device_of[node], old, device_of, sizes, used)
        else:
            _shift(order, place, place[node], source)
    return best_order, best_devices, best


@numba.njit
def _draw_device(node, device_of, devices, input_start, inputs):  # type: ignore[no-untyped-def]
    """Draw a device: often that of an input."""
    new = np.random.randint(devices)
    near = input_start[node + 1] - input_start[node]
    if near > 0 and np.random.random() < 0.7:
        new = device_of[inputs[input_start[node] + np.random.randint(near)]]
    return new


@numba.njit
def _fits(members, device, times, sizes, used, accelerators, memory):  # type: ignore[no-untyped-def]
    """Tell whether a device can run a group, and has the memory for it."""
    if device >= accelerators:
        return True
    size = 0.0
    for node in members:
        size += sizes[node]
        if times[0, node] == np.inf:
            return False
    return used[device] + size <= memory[device]


@numba.njit
def _move_members(members, old, new, device_of, sizes, used):  # type: ignore[no-untyped-def]
    for node in members:
        device_of[node] = new
        used[old] -= sizes[node]
        used[new] += sizes[node]


@numba.njit
def _draw_place(node, place, input_start, inputs, reader_start, readers):  # type: ignore[no-untyped-def]
    """Draw a place in the order between a node's inputs and its readers."""
    low, high = 0, len(place) - 1
    for e in range(input_start[node], input_start[node + 1]):
        low = max(low, place[inputs[e]] + 1)
    for e in range(reader_start[node], reader_start[node + 1]):
        high = min(high, place[readers[e]] - 1)
    return low + np.random.randint(high - low + 1)


@numba.njit
def _shift(order, place, source, target):  # type: ignore[no-untyped-def]
    node = order[source]
    step = 1 if target > source else -1
    for i in range(source, target, step):
        order[i] = order[i + step]
        place[order[i]] = i
    order[target] = node
    place[node] = target
