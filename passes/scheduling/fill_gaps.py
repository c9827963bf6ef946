"""Schedule nodes and messages: what most comes after goes first, other things into the gaps.

    the way back through three layers     in the order of the graph     what most comes after first
    dW ends in a sum, dx is sent          dW3 dx3  .  dW2 dx2  .        dx3 dW3  dx2 dW2  dx1 dW1

An item's rank is the longest way from its beginning to the end of the step. By rank, each takes the first
time at which all that it takes is free for as long as it lasts, between what is there already too: HEFT for
tasks whose places are known, with its insertion (Topcuoglu, Hariri and Wu, IEEE TPDS 13 (2002) 260-274,
section 4).
"""

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.passes.scheduling.dependencies import Dependencies, dependencies_of
from partc.passes.scheduling.resources import Resources, Taken, Time
from partc.passes.scheduling.schedule import Communication, Item


def fill_gaps(items: Sequence[Item], resources: Resources) -> list[Time]:
    """Return when each item begins and ends."""
    dependencies = dependencies_of(items)
    rank_s = _ranks(items, dependencies, resources)
    cores, wires = _Occupied(), _Occupied()
    ready_s = [0.0] * len(items)
    times: dict[int, Time] = {}
    missing = list(dependencies.missing)
    heap = [(-rank_s[number], number) for number, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    while heap:
        number = heapq.heappop(heap)[1]
        item, from_s = items[number], ready_s[number]
        if isinstance(item, Communication):
            times[number] = _send(item, from_s + PER_COMMUNICATION_S, resources, wires)
        else:
            seconds = resources.seconds(item)
            begin_s = cores.take(resources.cores(item), from_s, seconds)
            times[number] = Time(begin_s, begin_s + seconds)
        for following in dependencies.after[number]:
            ready_s[following] = max(ready_s[following], times[number].end_s)
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(heap, (-rank_s[following], following))
    return [times[number] for number in range(len(items))]


def _send(message: Communication, from_s: float, resources: Resources, wires: "_Occupied") -> Time:
    """Take what the levels of a message take, each once the one before has ended."""
    begins_s: list[float] = []
    at_s = from_s
    for level in resources.held(message):
        begins_s.append(wires.take(level.wires, at_s, level.held_s))
        at_s = begins_s[-1] + level.seconds
    return Time(begins_s[0], at_s)


def _ranks(items: Sequence[Item], dependencies: Dependencies, resources: Resources) -> list[float]:
    """Return the seconds from the beginning of each item to the end of the step, on the longest way."""
    rank_s = [0.0] * len(items)
    for number in reversed(dependencies.in_order()):
        behind_s = max((rank_s[following] for following in dependencies.after[number]), default=0.0)
        rank_s[number] = resources.seconds(items[number]) + behind_s
    return rank_s


class _Occupied:
    """When resources are taken: from when to when, one behind the other is one."""

    def __init__(self) -> None:
        self._begins: dict[int, list[float]] = defaultdict(list)
        self._ends: dict[int, list[float]] = defaultdict(list)

    def take(self, resources: Taken, from_s: float, seconds: float) -> float:
        """Take resources at the first time at which all are free; return when."""
        at_s = from_s
        while (free_s := max(self._free(resource, at_s, seconds) for resource in resources)) > at_s:
            at_s = free_s
        for resource in resources:
            self._add(resource, at_s, at_s + seconds)
        return at_s

    def _free(self, resource: int, from_s: float, seconds: float) -> float:
        """Return from when on a resource is free for so long."""
        begins, ends = self._begins[resource], self._ends[resource]
        place = bisect_right(begins, from_s)
        if place and ends[place - 1] > from_s:
            from_s = ends[place - 1]
        while place < len(begins) and begins[place] < from_s + seconds:
            from_s = ends[place]
            place += 1
        return from_s

    def _add(self, resource: int, begin_s: float, end_s: float) -> None:
        begins, ends = self._begins[resource], self._ends[resource]
        place = bisect_right(begins, begin_s)
        if place < len(begins) and begins[place] == end_s:
            begins.pop(place)
            end_s = ends.pop(place)
        if place and ends[place - 1] == begin_s:
            ends[place - 1] = end_s
        else:
            begins.insert(place, begin_s)
            ends.insert(place, end_s)
