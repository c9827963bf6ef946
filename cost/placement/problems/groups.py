"""A problem as whole numbers in flat arrays: what kernels read.

Nodes that must share a device become one group: nodes of a colour, nodes between which contiguity leaves
no order, and the family of an output whose cost alone exceeds a load that is to be undercut. Families that
are equal after that are added up, and those inside one group are dropped.

Times are whole *ticks*, a power of two to the unit, **rounded down**: what is proven of ticks holds for
the problem.
"""

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import networkx as nx
import numpy as np
import numpy.typing as npt

from partc.cost.placement.problems.problem import NodePlacement, Problem

Ints = npt.NDArray[np.int64]
TICK_BITS = 48
NEVER = 1 << 50


@dataclass(frozen=True)
class Groups:
    """Groups of nodes with loads in ticks, families of groups, and what forward groups come after."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]
    work: Ints
    cpu: Ints
    size: Ints
    families: tuple[tuple[int, ...], ...]
    costs: Ints
    before: tuple[tuple[int, ...], ...]
    forward: tuple[bool, ...]
    ticks_per_unit: Fraction

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.members)

    @cached_property
    def family_table(self) -> tuple[Ints, Ints]:
        """Families as (starts int64[families + 1], groups int64[entries])."""
        return flat(self.families)

    @cached_property
    def touching(self) -> tuple[tuple[int, ...], ...]:
        """Per group: the families that it belongs to."""
        touching: list[list[int]] = [[] for _ in range(self.count)]
        for family, groups in enumerate(self.families):
            for group in groups:
                touching[group].append(family)
        return tuple(map(tuple, touching))

    def ticks(self, time: Fraction, *, up: bool = False) -> int:
        """Convert a time to ticks, rounded down, or up."""
        return int(-(-time * self.ticks_per_unit // 1)) if up else int(time * self.ticks_per_unit // 1)

    def time(self, ticks: int) -> Fraction:
        """Convert ticks to a time, exactly."""
        return Fraction(int(ticks)) / self.ticks_per_unit

    @property
    def memory(self) -> int:
        """Memory of an accelerator, in whole units of size."""
        return int(self.problem.accelerator_memory // 1)

    def placement(self, device_of_group: "list[int] | Ints") -> NodePlacement:
        """Turn a device per group into a device per node."""
        device_of = [-1] * len(self.problem.nodes)
        for group, members in enumerate(self.members):
            for node in members:
                device_of[node] = int(device_of_group[group])
        return NodePlacement(tuple(device_of))

    def devices(self, placement: NodePlacement) -> Ints:
        """Turn a device per node into a device per group: that of its first node."""
        return np.array([placement.device_of[members[0]] for members in self.members], np.int64)


def group_nodes(problem: Problem, *, contiguous: bool, undercut: Fraction | None = None) -> Groups:
    """Group the nodes that share a device in every (contiguous) answer of a load below `undercut`."""
    sets = _Sets(problem.colours)
    # With several CPUs an output may cross between two of them, which costs nothing.
    if undercut is not None and problem.cpus <= 1:
        for node, family in zip(problem.nodes, problem.families, strict=True):
            if node.output_cost >= undercut:
                sets.join(family)
    if contiguous:
        for cycle in nx.strongly_connected_components(_forward_graph(problem, sets.numbers())):
            sets.join_sets(cycle)
    return _build(problem, sets.numbers(), contiguous)


class _Sets:
    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._of = list(numbers)

    def numbers(self) -> tuple[int, ...]:
        order: dict[int, int] = {}
        return tuple(order.setdefault(number, len(order)) for number in self._of)

    def join(self, nodes: tuple[int, ...]) -> None:
        joined = {self._of[node] for node in nodes}
        self._of = [min(joined) if number in joined else number for number in self._of]

    def join_sets(self, numbers: set[int]) -> None:
        if len(numbers) > 1:
            current = self.numbers()
            self._of = [min(numbers) if number in numbers else number for number in current]


def _forward_graph(problem: Problem, group_of: tuple[int, ...]) -> "nx.DiGraph":
    graph = nx.DiGraph()
    for group, node in zip(group_of, problem.nodes, strict=True):
        if not node.backward:
            graph.add_node(group)
    for source, target in problem.edges:
        if not (problem.nodes[source].backward or problem.nodes[target].backward):
            ends = group_of[source], group_of[target]
            graph.add_edges_from([ends] if ends[0] != ends[1] else [])
    return graph


def _build(problem: Problem, group_of: tuple[int, ...], contiguous: bool) -> Groups:
    count = max(group_of, default=-1) + 1
    members: list[list[int]] = [[] for _ in range(count)]
    for node, group in enumerate(group_of):
        members[group].append(node)
    per_unit = _ticks_per_unit(problem)
    costs: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for record, family in zip(problem.nodes, problem.families, strict=True):
        groups = tuple(sorted({group_of[member] for member in family}))
        if len(groups) > 1 and record.output_cost > 0:
            costs[groups] += record.output_cost
    graph = _forward_graph(problem, group_of)
    return Groups(
        problem,
        tuple(map(tuple, members)),
        work=np.array([_work(problem, nodes, per_unit) for nodes in members], np.int64),
        cpu=np.array(
            [int(sum(problem.nodes[n].cpu_time for n in ns) * per_unit) for ns in members], np.int64
        ),
        size=np.array([int(sum(problem.nodes[n].size for n in ns)) for ns in members], np.int64),
        families=tuple(costs),
        costs=np.array([int(cost * per_unit) for cost in costs.values()], np.int64),
        before=tuple(
            tuple(sorted(graph.predecessors(group))) if contiguous and group in graph else ()
            for group in range(count)
        ),
        forward=tuple(group in graph for group in range(count)),
        ticks_per_unit=per_unit,
    )


def _work(problem: Problem, nodes: list[int], per_unit: Fraction) -> int:
    times = [problem.nodes[node].accelerator_time for node in nodes]
    known = [time for time in times if time is not None]
    return int(sum(known) * per_unit) if len(known) == len(times) else int(NEVER)


def _ticks_per_unit(problem: Problem) -> Fraction:
    total = sum(
        (n.cpu_time + (n.accelerator_time or 0) + 2 * n.output_cost for n in problem.nodes), Fraction(1)
    )
    return Fraction(2) ** (TICK_BITS - int(total).bit_length())


def flat(lists: tuple[tuple[int, ...], ...]) -> tuple[Ints, Ints]:
    """Lay lists end to end: (starts int64[lists + 1], entries int64[sum of lengths])."""
    starts = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(entries) for entries in lists], out=starts[1:])
    return starts, np.array([entry for entries in lists for entry in entries], np.int64)


def without_groups(groups: Groups, dropped: frozenset[int]) -> Groups:
    """Leave groups out: a relaxation, for what remains keeps its order, and loses loads and cuts only."""
    remaining = [group for group in range(groups.count) if group not in dropped]
    number = {group: i for i, group in enumerate(remaining)}
    costs: dict[tuple[int, ...], int] = defaultdict(int)
    for family, cost in zip(groups.families, groups.costs, strict=True):
        inner = tuple(number[group] for group in family if group in number)
        if len(inner) > 1:
            costs[inner] += int(cost)
    chosen = np.array(remaining, np.int64)
    return Groups(
        groups.problem,
        tuple(groups.members[group] for group in remaining),
        groups.work[chosen],
        groups.cpu[chosen],
        groups.size[chosen],
        tuple(costs),
        np.array(list(costs.values()), np.int64),
        tuple(tuple(sorted(number[b] for b in _kept_before(groups, group, dropped))) for group in remaining),
        tuple(groups.forward[group] for group in remaining),
        groups.ticks_per_unit,
    )


def _kept_before(groups: Groups, group: int, dropped: frozenset[int]) -> set[int]:
    before: set[int] = set()
    seen = set(groups.before[group])
    waiting = list(seen)
    while waiting:
        other = waiting.pop()
        if other not in dropped:
            before.add(other)
            continue
        waiting += [b for b in groups.before[other] if b not in seen]
        seen.update(groups.before[other])
    return before
