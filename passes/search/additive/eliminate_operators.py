"""Find the least additive cost by dynamic program, where the graph of operators reduces to nothing.

    a node   j ── k ── l   becomes   j ── l,   cost[a, c] = min over b of j─k[a, b] + k[b] + k─l[b, c]
    an edge  of two between the same operators becomes one, their sum
    a leaf   j ── k        becomes   j,        cost[a]    = min over b of j─k[a, b] + k[b]

OptCNN's (Jia et al., ICML 2018, section 5.2; flexflow.txt, section 8.2.3), which eliminates operators of one
producer and one reader. Costs know no direction, so that here any operator with at most two neighbours goes.
Memory has no place in it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from partc.passes.search.additive.additive_costs import AdditiveCosts, ConfigNumbers, Floats
from partc.runtime.errors import BadUsage


@dataclass(frozen=True, slots=True)
class _Eliminated:
    """An operator, its former neighbours, and its best configuration for each of theirs."""

    operator: int
    neighbours: tuple[int, ...]
    best: np.ndarray


def check_reduces(names: Sequence[str], pairs: Iterable[tuple[int, int]]) -> None:
    """Raise BadUsage where operators that send each other something do not reduce to nothing."""
    near: dict[int, set[int]] = {number: set() for number in range(len(names))}
    for j, k in pairs:
        near[j].add(k)
        near[k].add(j)
    while near:
        operator = min(near, key=lambda number: (len(near[number]), number))
        neighbours = near[operator]
        if len(neighbours) > 2:
            raise _refusal([names[number] for number in near])
        del near[operator]
        for number in neighbours:
            near[number] = (near[number] | neighbours) - {operator, number}


def eliminate_operators(costs: AdditiveCosts) -> ConfigNumbers:
    """Return the configurations of least cost. Raises BadUsage as check_reduces does."""
    check_reduces(costs.names, costs.pair_s)
    own = {number: seconds.copy() for number, seconds in enumerate(costs.own_s)}
    edges: dict[int, dict[int, Floats]] = {number: {} for number in own}
    for (j, k), seconds in costs.pair_s.items():
        _join(edges, j, k, seconds)
    eliminated: list[_Eliminated] = []
    while own:
        operator = min(own, key=lambda number: (len(edges[number]), number))
        assert len(edges[operator]) <= 2, "it reduces"
        eliminated.append(_eliminate(operator, own, edges))
    chosen: dict[int, int] = {}
    for each in reversed(eliminated):
        chosen[each.operator] = int(each.best[tuple(chosen[number] for number in each.neighbours)])
    return tuple(chosen[number] for number in range(len(costs.own_s)))


def _eliminate(operator: int, own: dict[int, Floats], edges: dict[int, dict[int, Floats]]) -> _Eliminated:
    """Take an operator out, with its costs in its neighbours', or in the edge between them."""
    seconds, around = own.pop(operator), edges.pop(operator)
    neighbours = tuple(around)
    for number in neighbours:
        del edges[number][operator]
    match [around[number] for number in neighbours]:
        case []:
            return _Eliminated(operator, (), np.array(seconds.argmin()))
        case [only]:  # [own, neighbour]
            total = only + seconds[:, None]
            own[neighbours[0]] = own[neighbours[0]] + total.min(axis=0)
        case [one, other]:
            total = seconds[:, None, None] + one[:, :, None] + other[:, None, :]
            _join(edges, neighbours[0], neighbours[1], total.min(axis=0))
    return _Eliminated(operator, neighbours, total.argmin(axis=0))


def _join(edges: dict[int, dict[int, Floats]], j: int, k: int, seconds: Floats) -> None:
    """Add an edge, to the one that is there. edges[j][k]: [configurations of j, configurations of k]."""
    edges[j][k] = edges[j].get(k, 0.0) + seconds
    edges[k][j] = edges[j][k].T


def _refusal(left: Sequence[str]) -> BadUsage:
    names = ", ".join(f"'{name}'" for name in left[:6]) + " ..." * (len(left) > 6)
    return BadUsage(
        f"operators do not reduce to a line: each of {len(left)} shares tensors with three others",
        at=f"--method dp: {names}",
        fix="use --method ilp, which minimises the same sum for any graph, or mcmc",
    )
