"""One step's makespan: nodes on devices and in time, and the independent checker of such an answer.

Every node runs once, a device runs one node at a time, and a node starts when its inputs are there: at
once on the producer's device and between CPUs, else the producer's output cost later. Memory limits
accelerators, and nodes of one colour share a device. All times are exact.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from partc.cost.placement.problems.load import violations
from partc.cost.placement.problems.problem import NodePlacement, Problem


@dataclass(frozen=True)
class Schedule:
    """A device and a start per node."""

    placement: NodePlacement
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


def run_in_order(problem: Problem, placement: NodePlacement, order: Sequence[int]) -> Schedule:
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
