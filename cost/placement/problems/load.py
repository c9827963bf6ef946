"""The independent checker: every device's load, memory, colours and order, from the problem and the answer
alone.

All sums are exact (`fractions.Fraction`); nothing that a solver computed is read.
"""

from collections import defaultdict
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter

from partc.cost.placement.problems.problem import NodePlacement, Problem


def device_loads(problem: Problem, placement: NodePlacement) -> tuple[Fraction, ...]:
    """Compute the load of every device: accelerators first. A node that a device cannot run is no load."""
    loads = [Fraction(0)] * problem.devices
    for node, device in zip(problem.nodes, placement.device_of, strict=True):
        on_accelerator = problem.is_accelerator(device)
        loads[device] += (node.accelerator_time or 0) if on_accelerator else node.cpu_time
    for node, family in zip(problem.nodes, problem.families, strict=True):
        devices = {placement.device_of[member] for member in family}
        if len(devices) > 1:
            for device in devices:
                loads[device] += node.output_cost if problem.is_accelerator(device) else 0
    return tuple(loads)


def greatest_load(problem: Problem, placement: NodePlacement) -> Fraction:
    """The load of the busiest device: the time between two results of a pipeline."""
    return max(device_loads(problem, placement))


def violations(problem: Problem, placement: NodePlacement, *, contiguous: bool) -> tuple[str, ...]:
    """Say what is wrong with an answer: empty where it is allowed."""
    if len(placement.device_of) != len(problem.nodes):
        return (f"{len(placement.device_of)} devices are given for {len(problem.nodes)} nodes",)
    complaints = [
        f"node '{node.name}' is on device {device}, of {problem.devices}"
        for node, device in zip(problem.nodes, placement.device_of, strict=True)
        if not 0 <= device < problem.devices
    ]
    if complaints:
        return tuple(complaints)
    complaints += _unsupported(problem, placement) + _divided_colours(problem, placement)
    complaints += _overfull(problem, placement)
    if contiguous and not is_contiguous(problem, placement):
        complaints.append("forward nodes of two devices read from each other: their parts have no order")
    return tuple(complaints)


def is_contiguous(problem: Problem, placement: NodePlacement) -> bool:
    """Whether the devices' forward nodes have an order in which every edge leads forward, or stays."""
    earlier: dict[int, set[int]] = defaultdict(set)
    for source, target in problem.edges:
        ends = placement.device_of[source], placement.device_of[target]
        if ends[0] != ends[1] and not (problem.nodes[source].backward or problem.nodes[target].backward):
            earlier[ends[1]].add(ends[0])
    try:
        TopologicalSorter(earlier).prepare()
    except CycleError:
        return False
    return True


def _unsupported(problem: Problem, placement: NodePlacement) -> list[str]:
    return [
        f"node '{node.name}' is on accelerator {device}, which cannot run it"
        for node, device in zip(problem.nodes, placement.device_of, strict=True)
        if node.accelerator_time is None and problem.is_accelerator(device)
    ]


def _divided_colours(problem: Problem, placement: NodePlacement) -> list[str]:
    devices: dict[int, set[int]] = defaultdict(set)
    for node, device in zip(problem.nodes, placement.device_of, strict=True):
        if node.colour is not None:
            devices[node.colour].add(device)
    return [
        f"colour {colour} is on devices {sorted(on)}, not on one"
        for colour, on in sorted(devices.items())
        if len(on) > 1
    ]


def _overfull(problem: Problem, placement: NodePlacement) -> list[str]:
    used = [Fraction(0)] * problem.devices
    for node, device in zip(problem.nodes, placement.device_of, strict=True):
        used[device] += node.size
    return [
        f"accelerator {device} holds {float(used[device]):g}, and has memory for {float(limit):g}"
        for device, limit in enumerate(problem.memories)
        if used[device] > limit
    ]
