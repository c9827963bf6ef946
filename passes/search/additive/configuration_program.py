"""Find the least additive cost under memory limits, by integer program.

    x[k, c] = 1         when operator k has configuration c
    y[j, k, b, c] = 1   when j has b and k has c

    minimise  sum own[k][c] x[k, c]  +  sum pair[j, k][b, c] y[j, k, b, c]
    sum_c x[k, c] = 1                                every operator has one            _choose
    sum_c y[j, k, b, c] = x[j, b], and of b likewise pairs follow their operators      _follow
    sum memory[k][c][w] x[k, c] <= limit[w]          variables fit                     _fit

CP-SAT takes integers: seconds are whole parts of the largest cost, rounded; the bound is made good for that.
It concerns this sum, never a step.
"""

from dataclasses import dataclass
from math import inf

import numpy as np
from ortools.sat.python import cp_model

from partc.cost.new_solver import new_solver
from partc.passes.search.additive.additive_costs import AdditiveCosts, ConfigNumbers, Floats
from partc.runtime.errors import NoPlacement

PARTS = 1 << 24  # of the largest cost


@dataclass(frozen=True, slots=True)
class ProvenChoice:
    """An answer, its sum, and what no sum is below; equal but for rounding where it is proven."""

    choice: ConfigNumbers
    total_s: float
    bound_s: float


def solve_configurations(
    costs: AdditiveCosts, seconds: float, seed: int, effort: float | None = None
) -> ProvenChoice:
    """Return the best choice found in time. `effort`: a limit in CP-SAT's own deterministic unit besides.

    Raises NoPlacement where variables do not fit, however operators are configured, or none was found.
    """
    largest_s = max(float(each.max()) for each in (*costs.own_s, *costs.pair_s.values()))
    unit_s = max(largest_s, 1e-12) / PARTS
    model = cp_model.CpModel()
    chosen = [[model.new_bool_var("") for _ in own] for own in costs.own_s]
    for each in chosen:
        model.add_exactly_one(each)
    terms = [_weighted(row, own, unit_s) for row, own in zip(chosen, costs.own_s, strict=True)]
    terms += [_follow(model, chosen[j], chosen[k], pair, unit_s) for (j, k), pair in costs.pair_s.items()]
    _fit(model, costs, chosen)
    model.minimize(sum(terms))
    solver = new_solver(seed=seed)
    if seconds < inf:
        solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    if effort is not None:
        solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise _refusal(costs, status == cp_model.INFEASIBLE)
    choice = tuple(
        next(config for config, var in enumerate(row) if solver.boolean_value(var)) for row in chosen
    )
    rounded_s = unit_s * (len(costs.own_s) + len(costs.pair_s)) / 2
    total_s = costs.total_s(choice)
    return ProvenChoice(choice, total_s, min(total_s, solver.best_objective_bound * unit_s - rounded_s))


def _follow(
    model: cp_model.CpModel,
    ours: list[cp_model.IntVar],
    theirs: list[cp_model.IntVar],
    pair_s: Floats,
    unit_s: float,
) -> cp_model.LinearExpr:
    """Add the variables of a pair; return what they cost."""
    both = [[model.new_bool_var("") for _ in theirs] for _ in ours]
    for row, var in zip(both, ours, strict=True):
        model.add(sum(row) == var)
    for column, var in zip(zip(*both, strict=True), theirs, strict=True):
        model.add(sum(column) == var)
    return _weighted([var for row in both for var in row], pair_s.ravel(), unit_s)


def _weighted(variables: list[cp_model.IntVar], seconds: Floats, unit_s: float) -> cp_model.LinearExpr:
    return cp_model.LinearExpr.weighted_sum(variables, np.rint(seconds / unit_s).astype(int).tolist())


def _fit(model: cp_model.CpModel, costs: AdditiveCosts, chosen: list[list[cp_model.IntVar]]) -> None:
    for worker, limit in enumerate(costs.limits_bytes.tolist()):
        variables = [var for row in chosen for var in row]
        sizes = [int(size) for memory in costs.memory_bytes for size in memory[:, worker].tolist()]
        most = sum(max(memory[:, worker], default=0.0) for memory in costs.memory_bytes)
        if most > limit:
            model.add(cp_model.LinearExpr.weighted_sum(variables, sizes) <= int(limit))


def _refusal(costs: AdditiveCosts, is_proven: bool) -> NoPlacement:
    limits = ", ".join(f"{limit / 1e9:.2f}" for limit in costs.limits_bytes[:4].tolist())
    what = "variables fit under no configurations of the operators" if is_proven else "no answer in time"
    return NoPlacement(
        what,
        at=f"--method ilp: workers of {limits} GB" + " ..." * (len(costs.limits_bytes) > 4),
        fix="use a cluster of more memory or more workers" if is_proven else "give a larger --budget",
    )
