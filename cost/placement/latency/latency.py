"""Placement for the makespan of one step: a list scheduler, annealing from its answer, CP-SAT, and bounds.

The list scheduler is HEFT (Topcuoglu, Hariri and Wu 2002) with memory and colours: nodes by their longest
way to the end, each on the device where it ends first among those that its colour and the memory leave.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from ortools.sat.python import cp_model

from partc.cost.new_solver import new_solver
from partc.cost.placement.latency.anneal_schedule import anneal_schedule
from partc.cost.placement.latency.schedule import (
    Schedule,
    makespan,
    path_bound,
    run_in_order,
    schedule_violations,
    topological_order,
)
from partc.cost.placement.problems.groups import Ints, flat, group_nodes
from partc.cost.placement.problems.problem import NodePlacement, Problem
from partc.cost.placement.throughput.conflicts import pack, refuse
from partc.cost.placement.throughput.contiguous import place_contiguously
from partc.cost.placement.throughput.solution import work_bound
from partc.runtime.errors import NoPlacement

CHAIN_SHARE, SAT_SHARE, MOST_SAT_NODES = 0.15, 0.3, 450
MOVES = 300_000
TICKS = 1 << 24


@dataclass(frozen=True)
class LatencySolution:
    """`value`: the makespan as the checker computes it; `list_value`: the list scheduler's."""

    schedule: Schedule
    value: Fraction
    list_value: Fraction
    solver_bound: Fraction
    certified_bound: Fraction
    certificate: str
    seconds: float


def place_for_latency(
    problem: Problem, *, seconds: float = 120.0, seed: int = 0, annealed: bool = True
) -> LatencySolution:
    """Find a schedule of a small makespan, and bounds. Raises NoPlacement where none fits or is found.

    `annealed`: by kernels too, which take half a minute to compile; else by list scheduler and CP-SAT alone.
    """
    started = time.monotonic()
    listed = list_schedule(problem) or _packed_schedule(problem, seconds)
    if listed is None:
        raise refuse(problem, contiguous=False)
    path, work = path_bound(problem), work_bound(problem)
    bound = max(path, work)
    chained = _chained(problem, CHAIN_SHARE * seconds, seed) if annealed else []
    best = min([listed, *chained], key=lambda s: makespan(problem, s))
    value = makespan(problem, best)
    sat_seconds = (SAT_SHARE if annealed else 1.0) * seconds if len(problem.nodes) <= MOST_SAT_NODES else 0.0
    annealed_until_s = started + seconds - sat_seconds if annealed else started
    for candidate in _annealed(problem, best, annealed_until_s, seed, bound):
        if not schedule_violations(problem, candidate) and makespan(problem, candidate) < value:
            best, value = candidate, makespan(problem, candidate)
    solver_bound = bound
    if sat_seconds and value > bound:
        schedule, solver_bound = _solve_sat(problem, best, value, sat_seconds, seed)
        solver_bound = max(bound, min(solver_bound, value))
        if (
            schedule is not None
            and not schedule_violations(problem, schedule)
            and makespan(problem, schedule) < value
        ):
            best, value = schedule, makespan(problem, schedule)
    how = "longest path" if path >= work else "sum of work"
    used = time.monotonic() - started
    return LatencySolution(best, value, makespan(problem, listed), solver_bound, bound, how, used)


def list_schedule(problem: Problem) -> Schedule | None:
    """Schedule nodes by their longest way to the end, each where it ends first; None: memory ran out."""
    order = _by_longest_way(problem)
    colours = problem.colours
    sizes = [Fraction(0)] * (max(colours, default=-1) + 1)
    runs = [True] * len(sizes)
    for colour, record in zip(colours, problem.nodes, strict=True):
        sizes[colour] += record.size
        runs[colour] = runs[colour] and record.accelerator_time is not None
    inputs: list[list[int]] = [[] for _ in problem.nodes]
    for source, target in problem.edges:
        inputs[target].append(source)
    device_of_colour: dict[int, int] = {}
    room = list(problem.memories)
    free, ends = [0.0] * problem.devices, [0.0] * len(order)
    times = _times(problem)
    costs = [float(node.output_cost) for node in problem.nodes]

    def end_on(node: int, device: int) -> float:
        ready = free[device]
        for source in inputs[node]:
            other = device_of_colour[colours[source]]
            crosses = other != device and (problem.is_accelerator(other) or problem.is_accelerator(device))
            ready = max(ready, ends[source] + (costs[source] if crosses else 0.0))
        return float(ready + times[0 if problem.is_accelerator(device) else 1, node])

    for node in order:
        colour = colours[node]
        if colour not in device_of_colour:
            allowed = [
                device
                for device in range(problem.devices)
                if not problem.is_accelerator(device) or (runs[colour] and sizes[colour] <= room[device])
            ]
            if not allowed:
                return None
            device = min(allowed, key=lambda d: (end_on(node, d), d))
            device_of_colour[colour] = device
            if problem.is_accelerator(device):
                room[device] -= sizes[colour]
        device = device_of_colour[colour]
        ends[node] = free[device] = end_on(node, device)
    placement = NodePlacement(tuple(device_of_colour[colour] for colour in colours))
    return run_in_order(problem, placement, order)


def _packed_schedule(problem: Problem, seconds: float) -> Schedule | None:
    """Schedule nodes by their longest way to the end where memory has room for them; None: not found."""
    placement = pack(problem, seconds)
    return None if placement is None else run_in_order(problem, placement, _by_longest_way(problem))


def _chained(problem: Problem, seconds: float, seed: int) -> list[Schedule]:
    """Run the contiguous answer for throughput: few transfers; a list scheduler looks one node ahead."""
    try:
        one_cpu = replace(problem, cpus=min(1, problem.cpus))
        placement = place_contiguously(one_cpu, seconds=seconds, seed=seed).placement
    except NoPlacement:
        return []
    schedule = run_in_order(problem, placement, _by_longest_way(problem))
    return [] if schedule_violations(problem, schedule) else [schedule]


def _by_longest_way(problem: Problem) -> list[int]:
    order = topological_order(problem)
    readers: list[list[int]] = [[] for _ in problem.nodes]
    for source, target in problem.edges:
        readers[source].append(target)
    way = [Fraction(0)] * len(order)
    for node in reversed(order):
        record = problem.nodes[node]
        time = record.cpu_time if record.accelerator_time is None else record.accelerator_time
        way[node] = time + max((record.output_cost + way[r] for r in readers[node]), default=Fraction(0))
    place = {node: i for i, node in enumerate(order)}
    return sorted(order, key=lambda node: (-way[node], place[node]))


def _times(problem: Problem) -> np.ndarray:
    times = [[np.inf if n.accelerator_time is None else float(n.accelerator_time) for n in problem.nodes]]
    return np.array([*times, [float(n.cpu_time) for n in problem.nodes]])


def _annealed(
    problem: Problem, start: Schedule, deadline_s: float, seed: int, bound: Fraction
) -> Iterator[Schedule]:
    """Yield better and better schedules until the deadline, or the bound."""
    groups = group_nodes(problem, contiguous=False)
    group_of = np.zeros(len(problem.nodes), np.int64)
    for group, members in enumerate(groups.members):
        group_of[list(members)] = group
    arrays = _arrays(problem)
    order: Ints = np.array(_order_of(problem, start), np.int64)
    devices: Ints = np.array(start.placement.device_of, np.int64)
    value, round_ = np.inf, 0
    while time.monotonic() < deadline_s and value > float(bound) * (1 + 1e-12):
        hot = (3e-2, 1e-2, 3e-3, 1e-3)[round_ % 4]
        new_order, new_devices, new_value = anneal_schedule(  # as many as it takes
            order, devices, group_of, *flat(groups.members), *arrays,
            problem.accelerators, problem.devices, np.array(problem.memories, np.float64),
            hot, 1e-5, MOVES, seed + round_,
        )  # fmt: skip
        if new_value < value:
            value, order, devices = new_value, new_order, new_devices
            yield run_in_order(problem, NodePlacement(tuple(map(int, devices))), list(map(int, order)))
        round_ += 1


def _arrays(problem: Problem) -> tuple[np.ndarray, ...]:
    inputs: list[list[int]] = [[] for _ in problem.nodes]
    readers: list[list[int]] = [[] for _ in problem.nodes]
    for source, target in problem.edges:
        inputs[target].append(source)
        readers[source].append(target)
    costs = np.array([float(node.output_cost) for node in problem.nodes])
    sizes = np.array([float(node.size) for node in problem.nodes])
    tables = (*flat(tuple(map(tuple, inputs))), *flat(tuple(map(tuple, readers))))
    return (_times(problem), costs, sizes, *tables)


def _order_of(problem: Problem, schedule: Schedule) -> list[int]:
    place = {node: i for i, node in enumerate(topological_order(problem))}
    return sorted(place, key=lambda node: (schedule.starts[node], place[node]))


def _solve_sat(
    problem: Problem, start: Schedule, value: Fraction, seconds: float, seed: int
) -> tuple[Schedule | None, Fraction]:
    """CP-SAT with an interval per node and device, in 2^-24 of the makespan to be undercut, rounded down."""
    unit = value / TICKS
    model = cp_model.CpModel()
    colours = max(problem.colours) + 1
    on = [[model.new_bool_var("") for _ in range(problem.devices)] for _ in range(colours)]
    begin = [model.new_int_var(0, TICKS, "") for _ in problem.nodes]
    end = [model.new_int_var(0, TICKS, "") for _ in problem.nodes]
    last = model.new_int_var(0, TICKS, "")
    lanes: list[list[cp_model.IntervalVar]] = [[] for _ in range(problem.devices)]
    for colour, row in enumerate(on):
        model.add_exactly_one(row)
        first = problem.colours.index(colour)
        for device, var in enumerate(row):
            model.add_hint(var, start.placement.device_of[first] == device)
    for i, node in enumerate(problem.nodes):
        model.add(end[i] <= last)
        model.add_hint(begin[i], int(start.starts[i] // unit))
        for device, var in enumerate(on[problem.colours[i]]):
            length = node.accelerator_time if problem.is_accelerator(device) else node.cpu_time
            if length is None:
                model.add(var == 0)
                continue
            ticks = int(length // unit)
            lanes[device].append(model.new_optional_interval_var(begin[i], ticks, end[i], var, ""))
    for lane in lanes:
        model.add_no_overlap(lane)
    for source, target in problem.edges:
        _wait(model, problem, on, (begin, end), (source, target), unit)
    for device, memory in enumerate(problem.memories):
        sizes = [int(node.size) * on[problem.colours[i]][device] for i, node in enumerate(problem.nodes)]
        model.add(sum(sizes) <= int(memory))
    model.minimize(last)
    solver = new_solver(2, seed)
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    bound = Fraction(max(0, int(solver.best_objective_bound))) * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, bound if status != cp_model.INFEASIBLE else value
    devices = tuple(
        next(d for d, var in enumerate(on[colour]) if solver.boolean_value(var)) for colour in problem.colours
    )
    place = {node: i for i, node in enumerate(topological_order(problem))}
    order = sorted(place, key=lambda node: (solver.value(begin[node]), place[node]))
    return run_in_order(problem, NodePlacement(devices), order), bound


def _wait(
    model: cp_model.CpModel,
    problem: Problem,
    on: list[list[cp_model.IntVar]],
    times: tuple[list[cp_model.IntVar], list[cp_model.IntVar]],
    edge: tuple[int, int],
    unit: Fraction,
) -> None:
    """An input is there at the producer's end, or its cost later where an accelerator is between."""
    source, target = edge
    begin, end = times
    model.add(begin[target] >= end[source])
    cost = int(problem.nodes[source].output_cost // unit)
    ends = problem.colours[source], problem.colours[target]
    if ends[0] == ends[1] or cost == 0:
        return
    for device in range(problem.accelerators):
        here, there = (on[colour][device] for colour in ends)
        model.add(begin[target] >= end[source] + cost).only_enforce_if([here, ~there])
        model.add(begin[target] >= end[source] + cost).only_enforce_if([~here, there])
