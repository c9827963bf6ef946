"""What segments and messages take while they last, and how long a step of them is in their order.

    segment    the cores of its mesh's workers
    message    level by level, the wires of its members, each of whom has one message at a time, and the lanes
               that hold it up: messages of other meshes may take these as well. Of a sum by levels members
               begin the next while links carry it on

Resources that are never taken apart from each other count as one.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from partc.runtime.plan.program import Site

Resource = tuple[str, int]  # what it is, and which of them
Taken = tuple[int, ...]  # numbers of resources
Seconds = Callable[[Item], float]


@dataclass(frozen=True, slots=True)
class Time:
    """When an item begins and ends."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MessageLevel:
    """One collective of those that carry out a message, one behind the other.

    sites        whose members' wires it takes, and the lanes that hold it up
    seconds      with what its members do themselves to begin it
    handed_on_s  how long before its end its wires and lanes are free
    """

    sites: tuple[Site, ...]
    lanes: tuple[int, ...]
    seconds: float
    handed_on_s: float = 0.0


LevelsOf = Callable[[Communication], Sequence[MessageLevel]]


@dataclass(frozen=True, slots=True)
class Held:
    """What a level of a message takes, for how long, and when the next may begin."""

    wires: Taken
    held_s: float
    seconds: float


class Resources:
    """What items take, and for how long.

    seconds  of a segment
    levels   of a message
    servers  the workers whose processes servers share, -1 for servers that have their own
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        items: Iterable[Item],
        seconds: Seconds,
        levels: LevelsOf,
        servers: Sequence[int] = (),
    ) -> None:
        self._workers = {mesh.name: mesh.workers for mesh in lowered.meshes.each} | {"server": servers}
        self._of_segment, self._levels = seconds, levels
        self._seconds: dict[int, float] = {}  # by an item's id
        self._held: dict[int, tuple[Held, ...]] = {}  # likewise
        items = list(items)
        any_of = {route_of(item): item for item in items}
        cores = {route: self._all("core", self._ends(item)) for route, item in any_of.items()}
        messages = (item for item in items if isinstance(item, Communication))
        ways = {(level.sites, level.lanes) for message in messages for level in levels(message)}
        wires: dict[Hashable, set[Resource]] = {
            (sites, lanes): self._all("wire", sites) | {("lane", lane) for lane in lanes}
            for sites, lanes in sorted(ways)
        }
        self._cores, self._wires = _numbered(cores), _numbered(wires)

    def _ends(self, item: Item) -> Collection[Site]:
        if isinstance(item, Chunk):
            return (item.site,)
        attributes = item.nodes[0].attrs
        return {attributes[end] for end in ("site", "to") if end in attributes} or self._workers.keys()

    def _all(self, what: str, sites: Iterable[Site]) -> set[Resource]:
        return {(what, worker) for site in sites for worker in self._workers[site]}

    def cores(self, item: Item) -> Taken:
        """Return the cores of an item's members."""
        return self._cores[route_of(item)]

    def held(self, message: Communication) -> tuple[Held, ...]:
        """Return what each level of a message takes, one behind the other."""
        if id(message) not in self._held:
            self._held[id(message)] = tuple(self._hold(message))
        return self._held[id(message)]

    def _hold(self, message: Communication) -> Iterator[Held]:
        own_s = PER_COMMUNICATION_S  # of the first: before it begins
        for level in self._levels(message):
            seconds = level.seconds - own_s
            yield Held(self._wires[level.sites, level.lanes], seconds - level.handed_on_s, seconds)
            own_s = 0.0

    def seconds(self, item: Item) -> float:
        """Return how long an item lasts."""
        if id(item) not in self._seconds:
            if isinstance(item, Communication):
                self._seconds[id(item)] = sum(level.seconds for level in self.held(item))
            else:
                self._seconds[id(item)] = self._of_segment(item)
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
        cores = resources.cores(item)
        if isinstance(item, Communication):
            free_s.update({core: free_s[core] + PER_COMMUNICATION_S for core in cores})
        at_s = max(
            *(free_s[core] for core in cores),
            *(made_s[tensor.name] for node in item.nodes for tensor in node.inputs),
            0.0,
        )
        if isinstance(item, Communication):
            for level in resources.held(item):
                at_s = max(at_s, *(sent_s[wire] for wire in level.wires))
                sent_s.update(dict.fromkeys(level.wires, at_s + level.held_s))
                at_s += level.seconds
        else:
            at_s += resources.seconds(item)
            free_s.update(dict.fromkeys(cores, at_s))
        made_s.update((tensor.name, at_s) for node in item.nodes for tensor in node.outputs)
    return max((*free_s.values(), *made_s.values()), default=0.0)
