"""Choose how every parameter is synchronised and where its light ops run, all at once: one ILP.

    y[g,o]  how many parameters of group g take option o      g: parameters that are alike in all
    T       the busiest lane's time                              that matters here; o: a method, local
                                                                 aggregation, where ops after
                                                                 aggregation run, boundary ops

    minimise  T + sum y[g,o] latency[g,o]                     + a thousandth of what each takes alone

    sum_o y[g,o] = size[g]                                    everyone one option     _take_one_each
    sum y[g,o] load[g,o,l] / rate[l] <= T         per lane l  hosts in and out, PCIe  _carry_on_lanes
    sum y[g,o] bytes[g] / servers <= room[s]      per server  o on servers            _fit_in_memory

A lane is one direction of a link, or a host's memory, so contention is counted where it is. Rows are
spread evenly here; which server owns which is settled next (server_assignment.py). The paper's rules
(sparse on servers, ops placed breadth first beside their inputs) are the hint. CP-SAT takes integers:
time is in units of 10 ps, rounded.

Source of what is chosen: Kim et al., arXiv:1808.02621, sections 5.3.1 and 5.3.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from partc.cost.assignment.price_options import Price, Prices, SyncOptions, alike, option_key
from partc.cost.assignment.server_assignment import server_room_bytes
from partc.cost.cluster.cluster import Cluster
from partc.cost.new_solver import new_solver
from partc.cost.strategy import SyncFacts, Synchronisation

UNIT_S = 1e-11
ALONE_SHARE = 1000  # a parameter's own time counts for one part in so many: it settles what T leaves open
DETERMINISTIC_LIMIT = 0.4


@dataclass(frozen=True, slots=True)
class OptionSolution:
    """The options taken, and what the solver says of them. Times are communication of one step."""

    chosen: dict[str, Synchronisation]
    status: str
    objective_s: float
    bound_s: float
    deterministic_time: float


@dataclass(frozen=True, slots=True)
class _Group:
    names: tuple[str, ...]
    options: SyncOptions
    prices: tuple[Price, ...]
    stored_bytes: int
    hint: int  # position of the rules' option


def choose_options(
    facts: Sequence[SyncFacts],
    options: Mapping[str, SyncOptions],
    cluster: Cluster,
    prices: Prices,
) -> OptionSolution | None:
    """Return an option for every parameter; None if nothing fits on the servers, or time ran out."""
    groups = _groups(facts, options, prices)
    model = cp_model.CpModel()
    taken = [_take_one_each(model, group) for group in groups]
    busiest = _carry_on_lanes(model, groups, taken, prices)
    _fit_in_memory(model, groups, taken, cluster)
    cost = ALONE_SHARE * busiest
    for group, counts in zip(groups, taken, strict=True):
        for index, (count, price) in enumerate(zip(counts, group.prices, strict=True)):
            cost += (ALONE_SHARE * _units(price.latency_s) + _units(price.seconds) + index) * count
    model.minimize(cost)
    solver = _solver()
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    chosen: dict[str, Synchronisation] = {}
    for group, counts in zip(groups, taken, strict=True):
        dealt = [index for index, count in enumerate(counts) for _ in range(solver.value(count))]
        chosen.update((name, options[name][i]) for name, i in zip(group.names, dealt, strict=True))
    return OptionSolution(
        chosen,
        solver.status_name(status),
        solver.objective_value * UNIT_S / ALONE_SHARE,
        solver.best_objective_bound * UNIT_S / ALONE_SHARE,
        float(solver.response_proto.deterministic_time),
    )


def _groups(facts: Sequence[SyncFacts], options: Mapping[str, SyncOptions], prices: Prices) -> list[_Group]:
    members: dict[tuple[object, ...], list[SyncFacts]] = {}
    for fact in facts:
        key = (*alike(fact), *(option_key(option) for option in options[fact.name]))
        members.setdefault(key, []).append(fact)
    return [
        _Group(
            tuple(fact.name for fact in alike_ones),
            options[alike_ones[0].name],
            tuple(prices.price(alike_ones[0], option) for option in options[alike_ones[0].name]),
            alike_ones[0].rows * (alike_ones[0].row_bytes + alike_ones[0].slot_row_bytes),
            _ruled(alike_ones[0], options[alike_ones[0].name]),
        )
        for alike_ones in members.values()
    ]


def _ruled(fact: SyncFacts, options: SyncOptions) -> int:
    """Return the option that the paper's rules take: sparse ones on servers, others AllReduced."""
    method = "servers" if fact.sparse else "all_reduce"
    return next((index for index, option in enumerate(options) if option.method == method), 0)


def _take_one_each(model: cp_model.CpModel, group: _Group) -> list[cp_model.IntVar]:
    size = len(group.names)
    counts = [model.new_int_var(0, size, f"{group.names[0]}.{index}") for index in range(len(group.options))]
    model.add(cp_model.LinearExpr.sum(counts) == size)
    for index, count in enumerate(counts):
        model.add_hint(count, size if index == group.hint else 0)
    return counts


def _carry_on_lanes(
    model: cp_model.CpModel,
    groups: Sequence[_Group],
    taken: Sequence[Sequence[cp_model.IntVar]],
    prices: Prices,
) -> cp_model.IntVar:
    """Return T. A lane that never carries more than another, as of equal hosts, needs no constraint."""
    rates = prices.groups.network.bytes_per_s
    counts = [count for of_group in taken for count in of_group]
    loads = [price.loads for group in groups for price in group.prices]
    units = np.rint(np.array(loads).reshape(len(loads), len(rates)) / rates / UNIT_S).astype(np.int64)
    rows = _undominated(np.unique(units.T, axis=0))
    most = int(rows.sum(axis=1).max(initial=0))
    sizes = max((len(group.names) for group in groups), default=1)
    busiest = model.new_int_var(0, most * sizes + 1, "T")
    for row in rows.tolist():
        if any(row):
            model.add(cp_model.LinearExpr.weighted_sum(counts, row) <= busiest)
    return busiest


def _undominated(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rows, all different, of which no other is as large everywhere."""
    covers = (rows[:, None, :] <= rows[None, :, :]).all(axis=2)  # [small, large]
    alone: npt.NDArray[np.int64] = rows[covers.sum(axis=1) == 1]  # covered by itself alone
    return alone


def _fit_in_memory(
    model: cp_model.CpModel,
    groups: Sequence[_Group],
    taken: Sequence[Sequence[cp_model.IntVar]],
    cluster: Cluster,
) -> None:
    rooms = [server_room_bytes(host) for host in cluster.hosts if host.server]
    served = [
        group.stored_bytes * count
        for group, counts in zip(groups, taken, strict=True)
        for option, count in zip(group.options, counts, strict=True)
        if option.method == "servers"
    ]
    if rooms and served:
        model.add(sum(served) <= sum(rooms))


def _solver() -> cp_model.CpSolver:
    solver = new_solver()
    # By default the linear relaxation leaves sums of counts out: of NMT on 8 x 6 a gap of 14 % was left after
    # 56 s of the processor; with them the same problem is solved in 3 ms.
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = DETERMINISTIC_LIMIT
    return solver


def _units(seconds: float) -> int:
    return round(seconds / UNIT_S)
