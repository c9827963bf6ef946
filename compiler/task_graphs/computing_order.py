"""In which order the groups of a step compute on their ways, and gradients are summed."""

from collections.abc import Sequence
from graphlib import TopologicalSorter
from math import inf

from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.passes.scheduling.bucket_communications import fill_buckets
from partc.passes.scheduling.sums_first import Sums, turns_of
from partc.passes.search.operators.group_layouts import GroupLayouts
from partc.passes.search.operators.grouped_step import ASIDE, FORWARD, GroupedStep, PassLevel

Computing = tuple[int, PassLevel]  # a group, and on which way


def computing_order(step: GroupedStep) -> list[Computing]:
    """Return what is computed, each behind what it reads: forward, back, and weights as early as may be."""
    behind: dict[Computing, set[Computing]] = {}
    for way in sorted({way for group in step.groups for way in group.nodes}):
        numbers = [number for number, group in enumerate(step.groups) if way in group.nodes]
        for number in numbers if way[0] in (FORWARD, ASIDE) else reversed(numbers):
            behind[number, way] = set()
    for tensor, readers in step.readers.items():
        if tensor in step.maker:
            for reader in readers:
                behind[reader].add(step.maker[tensor])
    return list(TopologicalSorter(behind).static_order())


def sums_first_order(
    step: GroupedStep, order: Sequence[Computing], layouts: GroupLayouts, prices: TaskPrices
) -> list[Computing]:
    """Return another order, in which sums of gradients begin early (passes/scheduling/sums_first.py).

    It is that of data parallelism, whose sums are the largest, whatever the groups' configurations are.
    """
    leads_to = _sums_behind(step, order)
    work_s: dict[Sums, float] = {}
    for computing, sums in leads_to.items():
        work_s[sums] = work_s.get(sums, 0.0) + _computing_s(computing, layouts, prices)
    turn = turns_of(work_s)
    return sorted(order, key=lambda computing: turn.get(leads_to[computing], inf))


def _computing_s(computing: Computing, layouts: GroupLayouts, prices: TaskPrices) -> float:
    """Return what a group computes for on one way with a part of the batch; whole, where it has no parts."""
    group, way = computing
    layout = layouts(group, (("batch", len(prices.workers)),)) or layouts(group, ())
    if layout is None:
        return 0.0
    price = prices.work(layout.work[way], 0)
    return float((price.launching_s + price.computing_s).max())


def _sums_behind(step: GroupedStep, order: Sequence[Computing]) -> dict[Computing, Sums]:
    """Return the parameters, a bit each, whose gradients come from what a group computes."""
    leads_to: dict[Computing, Sums] = dict.fromkeys(order, 0)
    for number, terms in enumerate(step.terms.values()):
        for term in filter(step.maker.__contains__, terms):
            leads_to[step.maker[term]] |= 1 << number
    readers: dict[Computing, set[Computing]] = {}
    for tensor, reading in step.readers.items():
        if tensor in step.maker:
            readers.setdefault(step.maker[tensor], set()).update(reading)
    for computing in reversed(order):
        for reader in readers.get(computing, ()):
            leads_to[computing] |= leads_to[reader]
    return leads_to


def buckets_of(step: GroupedStep, order: Sequence[Computing], limit_bytes: int) -> list[list[str]]:
    """Return the parameters whose gradients travel together, in the order in which these are made."""
    made_at = {computing: place for place, computing in enumerate(order)}
    ready = {
        parameter: max((made_at[step.maker[term]] for term in terms if term in step.maker), default=0)
        for parameter, terms in step.terms.items()
    }

    def nbytes(parameter: str) -> int:
        is_sparse = step.analysis.training.gradients[parameter].is_sparse
        return 0 if is_sparse else step.analysis.facts.nbytes(parameter)

    return fill_buckets(sorted(ready, key=ready.__getitem__), nbytes, limit_bytes)
