"""Order nodes so that what nobody waits for within a step, as most sums of gradients, begins early.

    the way back through two layers, three steps of a recurrence      b3 a3 b2 a2 b1 a1   sum(B) sum(A)
    the sum that is least work away goes first                        b3 b2 b1   a3 a2 a1
                                                                            sum(B)      sum(A)

A sum is on its way while what is left is computed. One by levels is handed on within hosts at its end, while
the next is under way already: what takes long to be handed on begins so much earlier.
"""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from types import MappingProxyType

import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.scheduling.bucket_communications import communications_ahead

Sums = int  # of communications, one bit each


def sums_first(
    lowered: LoweredGraph,
    position_of: Mapping[str, int],
    node_s: Callable[[gs.Node], float],
    tail_s: Callable[[gs.Node], float],
) -> dict[str, int]:
    """Return new places of nodes. `position_of`: lowered node -> place in the original.

    `node_s`: seconds; `tail_s`: of a sum, how long before its end the next may begin.
    """
    leads_to, sums = _sums_behind(lowered)
    work_s: dict[Sums, float] = {}
    for node in lowered.nodes:
        behind_it = leads_to[node.name]
        work_s[behind_it] = work_s.get(behind_it, 0.0) + (0.0 if is_communication(node) else node_s(node))
    turn = turns_of(work_s, {one: tail_s(node) for one, node in sums.items()})
    behind: dict[str, int] = {}  # value -> the place of what it is made of
    keys: dict[str, tuple[float, int, int]] = {}
    for number, node in enumerate(lowered.nodes):
        inherited = max((behind.get(tensor.name, -1) for tensor in node.inputs), default=-1)
        place = position_of.get(node.name, inherited)
        behind.update((tensor.name, place) for tensor in node.outputs)
        keys[node.name] = turn.get(leads_to[node.name], inf), place, number
    return {name: place for place, name in enumerate(sorted(keys, key=keys.__getitem__))}


def _sums_behind(lowered: LoweredGraph) -> tuple[dict[str, Sums], dict[Sums, gs.Node]]:
    """Return for each node the communications that come of it and that nobody waits for, itself included.

    And each of these by its bit.
    """
    ahead = communications_ahead(lowered)
    behind: dict[str, Sums] = {}  # value -> what comes of it
    result: dict[str, Sums] = {}
    node_of: dict[Sums, gs.Node] = {}
    for node in reversed(lowered.nodes):
        found = 0
        for tensor in node.outputs:
            found |= behind.get(tensor.name, 0)
        if is_communication(node) and not ahead[node.name]:
            bit = 1 << len(node_of)
            found, node_of[bit] = found | bit, node
        result[node.name] = found
        for tensor in node.inputs:
            behind[tensor.name] = behind.get(tensor.name, 0) | found
    return result, node_of


def turns_of(
    work_s: Mapping[Sums, float], tail_s: Mapping[Sums, float] = MappingProxyType({})
) -> dict[Sums, int]:
    """Return when nodes have their turn, by the sums that they lead to: with the first of these that is made.

    `work_s`: seconds, of all nodes that lead to the same; `tail_s`: of each sum, how long before its end the
    next may begin: a sum that is on its way for so much longer begins so much earlier.
    """
    left_s: dict[Sums, float] = {}
    for sums, seconds in work_s.items():
        for one in _each(sums):
            left_s[one] = left_s.get(one, 0.0) + seconds
    turn: dict[Sums, int] = {}
    waiting = set(work_s)
    for number in range(len(left_s)):
        chosen = min(left_s, key=lambda one: left_s[one] - tail_s.get(one, 0.0))
        del left_s[chosen]
        for sums in [sums for sums in waiting if sums & chosen]:
            turn[sums] = number
            waiting.remove(sums)
            for one in _each(sums & ~chosen):
                if one in left_s:
                    left_s[one] -= work_s[sums]
    return turn


def _each(sums: Sums) -> Iterator[Sums]:
    while sums:
        one = sums & -sums
        yield one
        sums ^= one
