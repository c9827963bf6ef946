"""CP-SAT's program of a placement that need not be contiguous: improves an answer, and bounds it.

    x[g, d] = 1 when group g is on device d

    minimise  T
    sum_d x[g, d] = 1                                        every group is on one device
    some[f, d] >= x[g, d] >= all[f, d]    g in family f      what a family has on an accelerator
    sum_g work[g] x[g, d] + sum_f cost[f] (some - all)[f, d] <= T      accelerators
    sum_g cpu[g] x[g, d] <= T                                          CPUs
    sum_g size[g] x[g, d] <= memory                                    accelerators
    x[g_i, d] <= sum over j < i of x[g_j, d - 1]             equal accelerators open in this order

Times are whole units of 2^-24 of the greatest load, rounded down, so the bound holds for the problem.
"""

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from partc.cost.new_solver import new_solver
from partc.cost.placement.problems.groups import NEVER, Groups, Ints

TIME_BITS = 24
ORDERED_GROUPS = 24


@dataclass(frozen=True)
class SatAnswer:
    """Devices of groups, or None; `bound` in ticks, `limit` where no answer is below it."""

    devices: Ints | None
    bound: int


def solve_assignment(groups: Groups, start: Ints, limit: int, *, seconds: float, seed: int) -> SatAnswer:
    """Look for an answer of a load of at most `limit` ticks, from a start that is one."""
    shift = max(0, int(limit).bit_length() - TIME_BITS)
    model = cp_model.CpModel()
    problem = groups.problem
    order = sorted(range(groups.count), key=lambda g: (-int(groups.work[g]), g))
    start = _opened_in_order(start, order, problem.accelerators)
    x = [[model.new_bool_var("") for _ in range(problem.devices)] for _ in range(groups.count)]
    load = model.new_int_var(0, limit >> shift, "load")
    for group in range(groups.count):
        model.add_exactly_one(x[group])
        for device in range(problem.devices):
            model.add_hint(x[group][device], int(start[group]) == device)
            if device < problem.accelerators and groups.work[group] >= NEVER:
                model.add(x[group][device] == 0)
    for device in range(problem.devices):
        _load_device(model, groups, x, load, device, shift)
    for i, group in enumerate(order[:ORDERED_GROUPS]):
        for device in range(1, problem.accelerators):
            model.add(x[group][device] <= sum(x[other][device - 1] for other in order[:i]))
    model.minimize(load)
    solver = new_solver(2, seed)
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return SatAnswer(None, limit)
    bound = int(solver.best_objective_bound) << shift
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return SatAnswer(None, max(bound, 0))
    devices = [next(d for d, var in enumerate(row) if solver.boolean_value(var)) for row in x]
    return SatAnswer(np.array(devices, np.int64), bound)


def _load_device(
    model: cp_model.CpModel,
    groups: Groups,
    x: list[list[cp_model.IntVar]],
    load: cp_model.IntVar,
    device: int,
    shift: int,
) -> None:
    here = [row[device] for row in x]
    if device >= groups.problem.accelerators:
        model.add(sum(int(c >> shift) * v for c, v in zip(groups.cpu, here, strict=True)) <= load)
        return
    works = [0 if w >= NEVER else int(w >> shift) for w in groups.work]
    terms = [w * v for w, v in zip(works, here, strict=True)]
    for family, cost in zip(groups.families, groups.costs, strict=True):
        if cost >> shift == 0:
            continue
        cut = model.new_bool_var("")
        first = here[family[0]]
        some, every = (first, first) if len(family) == 1 else (model.new_bool_var(""), model.new_bool_var(""))
        for group in family:
            model.add_implication(here[group], some)
            model.add_implication(every, here[group])
        model.add(cut >= some - every)
        terms.append(int(cost >> shift) * cut)
    model.add(sum(terms) <= load)
    if sum(int(s) for s in groups.size) > groups.memory:
        model.add(sum(int(s) * v for s, v in zip(groups.size, here, strict=True)) <= groups.memory)


def _opened_in_order(start: Ints, order: list[int], accelerators: int) -> Ints:
    """Renumber the accelerators by the first of their groups in this order."""
    numbers: dict[int, int] = {}
    for group in order:
        device = int(start[group])
        if device < accelerators:
            numbers.setdefault(device, len(numbers))
    return np.array([numbers.get(int(device), int(device)) for device in start], np.int64)
