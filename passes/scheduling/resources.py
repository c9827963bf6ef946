"""What segments and messages take while they last, and how long a step of them is in their order.

    segment    the cores of its mesh's workers
    message    the wires of its members, each of whom has one message at a time, and the lanes that hold it
               up: messages of other meshes may take these as well. Of a sum by levels members begin the next
               while links carry it on

Resources that are never taken apart from each other count as one.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Chunk, Communication, Item

SERVER = -1  # all of them: they do the same

Resource = tuple[str, int]  # what it is, and which of them
Taken = tuple[int, ...]  # numbers of resources
Seconds = Callable[[Item], float]
Lanes = Callable[[Communication], Iterable[int]]
SecondsOfMessage = Callable[[Communication], float]


@dataclass(frozen=True, slots=True)
class Time:
    """When an item begins and ends."""

    begin_s: float
    end_s: float


class Resources:
    """What items take, and for how long.

    seconds   of an item; of a message, with what its members do themselves to begin it
    lanes     that hold a message up
    handed_on_s  how long before its end a message's wires and lanes are free
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        items: Iterable[Item],
        seconds: Seconds,
        lanes: Lanes,
        handed_on_s: SecondsOfMessage,
    ) -> None:
        self._workers = {mesh.name: mesh.workers for mesh in lowered.meshes.each} | {"server": (SERVER,)}
        self._of_item, self._handed_on_s = seconds, handed_on_s
        self._seconds: dict[int, float] = {}  # by an item's id
        first_of = {route_of(item): item for item in items}
        cores = {route: self._all("core", item) for route, item in first_of.items()}
        wires = {
            route: self._all("wire", item) | {("lane", lane) for lane in lanes(item)}
            for route, item in first_of.items()
            if isinstance(item, Communication)
        }
        self._cores, self._wires = _numbered(cores), _numbered(wires)

    def _all(self, what: str, item: Item) -> set[Resource]:
        if isinstance(item, Chunk):
            return {(what, worker) for worker in self._workers[item.site]}
        attributes = item.nodes[0].attrs
        ends = {attributes[end] for end in ("site", "to") if end in attributes} or self._workers.keys()
        return {(what, worker) for end in ends for worker in self._workers[end]}

    def cores(self, item: Item) -> Taken:
        """Return the cores of an item's members."""
        return self._cores[route_of(item)]

    def wires(self, message: Communication) -> Taken:
        """Return the wires and lanes of a message."""
        return self._wires[route_of(message)]

    def held_s(self, message: Communication) -> float:
        """Return how long a message takes its wires and lanes."""
        return self.seconds(message) - self._handed_on_s(message)

    def seconds(self, item: Item) -> float:
        """Return how long an item lasts."""
        if id(item) not in self._seconds:
            own_s = PER_COMMUNICATION_S if isinstance(item, Communication) else 0.0
            self._seconds[id(item)] = self._of_item(item) - own_s
        return self._seconds[id(item)]


def route_of(item: Item) -> Hashable:
    """Return what items that take the same have in common."""
    if isinstance(item, Chunk):
        return (item.site,)
    node = item.nodes[0]
    return (node.op, *map(node.attrs.get, ("site", "to", "axes")))


def _numbered(used: Mapping[Hashable, Set[Resource]]) -> dict[Hashable, Taken]:
    """Number resources, those of the same users alike; return the numbers of each user."""
    users: dict[Resource, list[Hashable]] = defaultdict(list)
    for route, resources in used.items():
        for resource in resources:
            users[resource].append(route)
    numbers: dict[tuple[Hashable, ...], int] = {}
    number = {resource: numbers.setdefault(tuple(routes), len(numbers)) for resource, routes in users.items()}
    return {route: tuple(sorted({number[each] for each in of})) for route, of in used.items()}


def step_s(items: Sequence[Item], resources: Resources) -> float:
    """Return how long a step takes where each worker does what concerns it in the order of the items."""
    free_s: dict[int, float] = defaultdict(float)  # cores
    sent_s: dict[int, float] = defaultdict(float)  # wires and lanes
    made_s: dict[str, float] = defaultdict(float)
    for item in items:
        seconds, cores = resources.seconds(item), resources.cores(item)
        if isinstance(item, Communication):
            free_s.update({core: free_s[core] + PER_COMMUNICATION_S for core in cores})
        begin_s = max(
            *(free_s[core] for core in cores),
            *(made_s[tensor.name] for node in item.nodes for tensor in node.inputs),
            0.0,
        )
        if isinstance(item, Communication):
            wires = resources.wires(item)
            begin_s = max(begin_s, *(sent_s[wire] for wire in wires))
            sent_s.update(dict.fromkeys(wires, begin_s + resources.held_s(item)))
        else:
            free_s.update(dict.fromkeys(cores, begin_s + seconds))
        made_s.update((tensor.name, begin_s + seconds) for node in item.nodes for tensor in node.outputs)
    return max((*free_s.values(), *made_s.values()), default=0.0)
