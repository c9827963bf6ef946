"""One step's makespan: nodes on devices and in time, and the independent checker of such an answer.

Every node runs once, a device runs one node at a time, and a node starts when its inputs are there: at
once on the producer's device and between CPUs, else the producer's output cost later. Memory limits
accelerators, and nodes of one colour share a device. All times are exact.

Annealing of schedules: a device per group and an order of the nodes, run as early as possible. Moves: a group
to another device, or a node to another place of the order between its inputs and readers. The energy is the
makespan, and a thousandth of the mean end, which tells apart schedules of equal makespan.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numba
import numpy as np

from partc.cost.placement.problems.load import violations
from partc.cost.placement.problems.problem import Placement, Problem


@dataclass(frozen=True)
class Schedule:
    """A device and a start per node."""

    placement: Placement
    starts: tuple[Fraction, ...]


def duration(problem: Problem, node: int, device: int) -> Fraction:
    """How long a node runs on a device; 0 for what the device cannot run, which is refused elsewhere."""
    record = problem.nodes[node]
    return (record.accelerator_time or Fraction(0)) if problem.is_accelerator(device) else record.cpu_time


def delay(problem: Problem, source: int, devices: tuple[int, int]) -> Fraction:
    """How long an output takes from one device to another."""
    if devices[0] == devices[1] or not (
        problem.is_accelerator(devices[0]) or problem.is_accelerator(devices[1])
    ):
        return Fraction(0)
    return problem.nodes[source].output_cost


def makespan(problem: Problem, schedule: Schedule) -> Fraction:
    """When the last node ends."""
    devices = schedule.placement.device_of
    ends = (start + duration(problem, i, devices[i]) for i, start in enumerate(schedule.starts))
    return max(ends, default=Fraction(0))


def schedule_violations(problem: Problem, schedule: Schedule) -> tuple[str, ...]:
    """Say what is wrong with a schedule: empty where it is allowed."""
    violated = list(violations(problem, schedule.placement, contiguous=False))
    if violated or len(schedule.starts) != len(problem.nodes):
        return tuple(violated) or ("not every node has a start",)
    devices, starts = schedule.placement.device_of, schedule.starts
    ends = [start + duration(problem, i, devices[i]) for i, start in enumerate(starts)]
    violated += [
        f"node '{problem.nodes[i].name}' starts before 0" for i, start in enumerate(starts) if start < 0
    ]
    for source, target in problem.edges:
        if starts[target] < ends[source] + delay(problem, source, (devices[source], devices[target])):
            names = problem.nodes[target].name, problem.nodes[source].name
            violated.append(f"node '{names[0]}' starts before its input from '{names[1]}' is there")
    by_device: dict[int, list[tuple[Fraction, Fraction, int]]] = defaultdict(list)
    for i, device in enumerate(devices):
        if ends[i] > starts[i]:
            by_device[device].append((starts[i], ends[i], i))
    for device, runs in by_device.items():
        runs.sort()
        for before, after in pairwise(runs):
            if after[0] < before[1]:
                violated.append(
                    f"device {device} runs '{problem.nodes[after[2]].name}' before another has ended"
                )
    return tuple(violated)


def run_in_order(problem: Problem, placement: Placement, order: Sequence[int]) -> Schedule:
    """Start every node, in this order, as early as its inputs and the nodes before it on its device allow."""
    devices = placement.device_of
    inputs: list[list[int]] = [[] for _ in problem.nodes]
    for source, target in problem.edges:
        inputs[target].append(source)
    free = [Fraction(0)] * problem.devices
    starts, ends = [Fraction(0)] * len(order), [Fraction(0)] * len(order)
    for node in order:
        device = devices[node]
        arrivals = [ends[s] + delay(problem, s, (devices[s], device)) for s in inputs[node]]
        took = duration(problem, node, device)
        # A node of no time waits for its inputs alone.
        starts[node] = max([*arrivals, free[device] if took else Fraction(0)], default=Fraction(0))
        ends[node] = starts[node] + took
        free[device] = max(free[device], ends[node]) if took else free[device]
    return Schedule(placement, tuple(starts))


def path_bound(problem: Problem) -> Fraction:
    """Bound every makespan from below: the longest path, nodes on their quickest devices, transfers free."""
    order = topological_order(problem)
    quickest = [
        min([record.cpu_time] * (problem.cpus > 0) + _accelerated(problem, i), default=Fraction(0))
        for i, record in enumerate(problem.nodes)
    ]
    ends = list(quickest)
    readers: list[list[int]] = [[] for _ in problem.nodes]
    for source, target in problem.edges:
        readers[source].append(target)
    for node in order:
        for reader in readers[node]:
            ends[reader] = max(ends[reader], ends[node] + quickest[reader])
    return max(ends, default=Fraction(0))


def _accelerated(problem: Problem, node: int) -> list[Fraction]:
    time = problem.nodes[node].accelerator_time
    return [] if time is None or not problem.accelerators else [time]


def topological_order(problem: Problem) -> list[int]:
    """Order nodes so that every edge leads forward, earlier nodes first."""
    waiting = [0] * len(problem.nodes)
    readers: list[list[int]] = [[] for _ in problem.nodes]
    for source, target in problem.edges:
        waiting[target] += 1
        readers[source].append(target)
    ready = [i for i, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        node = ready.pop(0)
        order.append(node)
        for reader in readers[node]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    return order


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
    return used[device] + size <= memory


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
