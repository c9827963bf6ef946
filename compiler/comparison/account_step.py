"""Add up the parts of a step's critical path by what they went to."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import PurePosixPath

import numpy as np

from partc.compiler.report.describe_program import segment_names
from partc.compiler.report.measure_traffic import lane_name
from partc.cost.cluster.cluster import Cluster
from partc.cost.network.topology import Network, network_of
from partc.cost.network.traffic import lane_loads
from partc.cost.simulation.communication_phases import phases_of
from partc.cost.simulation.critical_path import PathPart, critical_path
from partc.cost.step_account import StepAccount, Term
from partc.runtime.execution.recorder import StepTimes
from partc.runtime.plan.program import Kind, Plan, Run, Start, Store, members_of

COLLECTIVES: dict[Kind, str] = {
    "all_reduce": "AllReduce",
    "reduce": "Reduce",
    "broadcast": "Broadcast",
    "reduce_scatter": "ReduceScatter",
    "all_gather": "AllGather",
    "shift_ahead": "send and receive",
    "shift_back": "send and receive",
    "exchange": "send and receive",
    "gather_rows": "Gatherv",
    "scatter_rows": "Scatterv",
    "all_gather_rows": "AllGatherv",
    "all_to_all_rows": "AllToAllv",
}
STARTING, COPYING = "beginning communications", "copying values"
BETWEEN = {
    "core": "between steps",
    "data": "waiting for data",
    "between": "work between steps and instructions",
}
_WAITED_S = 20e-6  # who waits longer learns when a communication was complete

Interval = tuple[float, float]


def account_of(
    plan: Plan, cluster: Cluster, steps: Mapping[int, Sequence[StepTimes]], step_s: float | None = None
) -> StepAccount:
    """Return what a step's time went to, the mean of several in sequence.

    `steps`: of every rank, on one clock. `step_s`: of one step that is longer than its instructions.
    """
    count = max(1, max(len(of_rank) for of_rank in steps.values()) - 1)
    parts = [part for part in critical_path(plan, steps) if part.seconds > 0]
    terms = _Terms(plan, cluster).of(parts, count)
    total_s = sum(term.seconds for term in terms)
    if step_s is not None and step_s - total_s > 1e-12:
        terms += (Term("between", BETWEEN["between"], "", step_s - total_s),)
        total_s = step_s
    return StepAccount(total_s, terms, count)


class _Terms:
    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self._plan = plan
        self._cluster = cluster
        self._names = segment_names(plan)
        self._ranks = {rank.rank: rank for rank in plan.ranks}
        self._loads: dict[tuple[int, tuple[int, ...]], tuple[str, float]] = {}

    @cached_property
    def _variables(self) -> frozenset[str]:
        return frozenset(piece.value for rank in self._plan.ranks for piece in rank.pieces)

    @cached_property
    def _network(self) -> Network:
        return network_of(self._cluster)

    def of(self, parts: Iterable[PathPart], count: int) -> tuple[Term, ...]:
        """Return the terms of a path over `count` steps, the longest first."""
        alike: dict[tuple[str, str, str], list[PathPart]] = {}
        for part in parts:
            alike.setdefault((part.kind, *self._name(part)), []).append(part)
        terms = [self._term(group, name, same, count) for (_, group, name), same in alike.items()]
        return tuple(sorted(terms, key=lambda term: -term.seconds))

    def _name(self, part: PathPart) -> tuple[str, str]:
        """Return what a part is in any plan, and in this one."""
        match part.instruction:
            case Run() as run:
                stem = PurePosixPath(run.segment).stem
                return self._group(run), f"{self._names[stem]} ({stem})"
            case Start() as start:
                group, what = COLLECTIVES[start.kind], start.words or start.label
                name = f"{group}: {what}" if what else group
                return (STARTING, "") if part.kind == "start" else (group, name)
            case Store():
                return COPYING, ""
        return BETWEEN[part.kind], ""

    def _group(self, run: Run) -> str:
        updates = any(value in self._variables for _, value in run.writes)
        if run.site == "server":
            return "the update on servers" if updates else "on servers"
        return "the update" if updates else "forward and backward"

    def _term(self, group: str, name: str, parts: Sequence[PathPart], count: int) -> Term:
        seconds = sum(part.seconds for part in parts) / count
        by_rank = {rank: sum(p.seconds for p in parts if p.rank == rank) for rank in {p.rank for p in parts}}
        rank = max(sorted(by_rank), key=by_rank.__getitem__)
        kind = parts[0].kind
        if kind != "transfer":
            return Term(kind, group, name, seconds, rank)
        loads = [self._load(part) for part in parts]
        links = {link: sum(amount for other, amount in loads if other == link) for link, _ in loads}
        link, amount = max(links, key=links.__getitem__), sum(links.values()) / count
        rate = _rate(parts, [amount for _, amount in loads])
        return Term(kind, group, name, seconds, rank, link, amount, rate)

    def _load(self, part: PathPart) -> tuple[str, float]:
        """Return the link that a communication occupies longest, and the bytes that pass it."""
        start = part.instruction
        assert isinstance(start, Start)
        members = members_of(self._plan, start.group, self._ranks[part.rank])
        key = start.tag_id, members
        if key not in self._loads:
            phases = phases_of(start, [self._ranks[member] for member in members], self._network)
            loads = lane_loads(self._network, phases)
            busiest = int(np.argmax(loads / self._network.bytes_per_s))
            is_sent = bool(loads[busiest])
            name = lane_name(self._network.lanes[busiest]) if is_sent else ""
            self._loads[key] = name, float(loads[busiest])
        return self._loads[key]


def _rate(parts: Sequence[PathPart], amounts: Sequence[float]) -> float | None:
    """Return the bytes a second while communications were under way, of those whose ends are known."""
    known = [
        ((part.begun_s, part.end_s), amount)
        for part, amount in zip(parts, amounts, strict=True)
        if part.seconds > _WAITED_S and amount and part.begun_s is not None
    ]
    busy_s = _union_s([(begin_s, end_s) for (begin_s, end_s), _ in known])
    return sum(amount for _, amount in known) / busy_s if busy_s else None


def _union_s(intervals: Iterable[Interval]) -> float:
    total_s, until_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s
