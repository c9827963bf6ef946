"""Put the step in the order of a simulated one, where work waits for messages that others wait for as well.

    two layers of a recurrence on two devices, three steps of it

    by waves   device 0  a1 a2 a3 .  .  .         by time   device 0  a1 a2 a3 .
               device 1  .  .  .  b1 b2 b3                  device 1  .  b1 b2 b3

    of one mesh, in parts

    by waves   compute  dx  dW  .  .  dx' dW'       by time   compute  dx  dW  dx' dW'
               send     .   .   sum(dx)                       send     .   sum(dx)

Two schedules are tried. In one each node takes the workers of its mesh as soon as they are free, of those
ready the first of the original graph (list scheduling: Graham 1969, "Bounds on multiprocessing timing
anomalies"); in the other what most comes after goes first, and the rest into gaps (fill_gaps.py). Nodes that
follow each other on a mesh are one segment, up to where one waits for a message that the segment's beginning
does not, or where what they made is worth being sent: it is large, another mesh waits for it, or enough is
computed while it is under way.

In the order of the graph, what others wait for is made, and sent, before what nobody waits for:

    of y = x W on the way back            in the order of the graph     `lead_first`
    dW = x' dy, which ends in a sum       dW  sum(dW)  dx  send(dx)     dx  send(dx)  dW  sum(dW)
    dx = dy W', which other ranks want

Messages of a rank go one after the other, so that dx would wait for dW's sum.
"""

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import onnx_graphsurgeon as gs

from partc.cost.cluster.profiles import SLOT_S
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.microbatches.find_repeated import find_repeated
from partc.passes.scheduling.bucket_communications import Bucket, communications_ahead
from partc.passes.scheduling.dependencies import dependencies_of
from partc.passes.scheduling.resources import Seconds, Time
from partc.passes.scheduling.schedule import SMALL_BYTES, Chunk, Communication, Item, late_nodes, messages_of
from partc.runtime.plan.program import Site

TimesOf = Callable[[Sequence[Item]], Sequence[Time]]  # messages, and nodes one by one
Takes = Callable[[Item], tuple[object, ...]]  # what is not free for other items meanwhile


def ready_slots(lowered: LoweredGraph, position_of: Mapping[str, int], seconds: Seconds) -> dict[str, int]:
    """Return for each communication between meshes a number: those that are ready together have the same."""
    items = _single_items(lowered, {}, position_of)
    times = simulate_items(items, Workers(lowered), seconds)
    return {
        item.nodes[0].name: int(time.begin_s / SLOT_S)
        for item, time in zip(items, times, strict=True)
        if isinstance(item, Communication) and _crosses(item)
    }


def order_by_time(
    lowered: LoweredGraph, buckets: Mapping[str, Bucket], position_of: Mapping[str, int], times_of: TimesOf
) -> list[Item]:
    """Return segments and messages in order. `position_of`: lowered node -> place in the original."""
    items = _single_items(lowered, buckets, position_of)
    times = times_of(items)
    joiner = _Joiner(lowered, list(zip(items, times, strict=True)))
    for number in sorted(range(len(items)), key=lambda number: (times[number].begin_s, number)):
        joiner.add(items[number], times[number].begin_s)
    return joiner.finish()


def orders_differ(lowered: LoweredGraph) -> bool:
    """Tell whether an order by time may be another than that of waves: messages wait for messages.

    Micro-batches have an order of their own.
    """
    if find_repeated(lowered).count > 1:
        return False
    if len(lowered.meshes.each) > 1:
        return True
    ahead = communications_ahead(lowered)
    return any(ahead[node.name] for node in lowered.nodes if is_communication(node))


class Workers:
    """Who is busy with an item: a mesh's workers compute, meshes may share them; messages all go at once."""

    def __init__(self, lowered: LoweredGraph, servers: tuple[int, ...] = ()) -> None:
        self._workers = {mesh.name: mesh.workers for mesh in lowered.meshes.each} | {"server": servers}

    def __call__(self, item: Item) -> tuple[object, ...]:
        """Return what the item takes."""
        return self._workers[item.site] if isinstance(item, Chunk) else ()


def _crosses(message: Communication) -> bool:
    attributes = message.nodes[0].attrs
    return "to" in attributes and attributes["to"] != attributes.get("site")


def _single_items(
    lowered: LoweredGraph, buckets: Mapping[str, Bucket], position_of: Mapping[str, int]
) -> list[Item]:
    """Return messages, and nodes one by one, by their places in the original graph."""
    late = {node.name for node in late_nodes(lowered)}
    nodes = [node for node in lowered.nodes if not is_communication(node) and node.name not in late]
    inherited: dict[str, int] = {}
    keys: list[int] = []
    for node in nodes:
        behind = max((inherited.get(tensor.name, -1) for tensor in node.inputs), default=-1)
        keys.append(position_of.get(node.name, behind))
        inherited.update((tensor.name, keys[-1]) for tensor in node.outputs)
    order = sorted(range(len(nodes)), key=lambda index: (keys[index], index))
    single = [Chunk(lowered.site_of[nodes[index].name], [nodes[index]]) for index in order]
    return [*messages_of(lowered, buckets), *single]


# ---------------------------------------------------------------- the clock


@dataclass
class _Queue:
    """What waits for a mesh: what is there by its place, what is yet to come by its time."""

    ready: list[int] = field(default_factory=list)
    coming: list[tuple[float, int]] = field(default_factory=list)

    def next_s(self, free_s: float) -> float:
        """Return when the mesh goes on."""
        return free_s if self.ready else max(free_s, self.coming[0][0])

    def take(self, at_s: float) -> int:
        """Return the first item of those that are ready then."""
        while self.coming and self.coming[0][0] <= at_s:
            heapq.heappush(self.ready, heapq.heappop(self.coming)[1])
        return heapq.heappop(self.ready)


def simulate_items(items: Sequence[Item], takes: Takes, seconds: Seconds) -> list[Time]:
    """Return the time of each item: one that stands further ahead comes first, where both are ready."""
    dependencies = dependencies_of(items)
    missing, after = list(dependencies.missing), dependencies.after
    queues: dict[tuple[object, ...], _Queue] = defaultdict(_Queue)  # by what its items take
    free_s: dict[object, float] = defaultdict(float)
    ready_s = [0.0 for _ in items]
    times: dict[int, Time] = {}

    def arrive(number: int) -> None:
        taken = takes(items[number])
        if taken:
            heapq.heappush(queues[taken].coming, (ready_s[number], number))
        else:
            run(number, ready_s[number])

    def run(number: int, begin_s: float) -> None:
        times[number] = Time(begin_s, begin_s + seconds(items[number]))
        for following in after[number]:
            ready_s[following] = max(ready_s[following], times[number].end_s)
            missing[following] -= 1
            if not missing[following]:
                arrive(following)

    for number in [number for number, count in enumerate(missing) if not count]:
        arrive(number)
    while waiting := [(taken, queue) for taken, queue in queues.items() if queue.ready or queue.coming]:
        begin_s, place = min(
            (queue.next_s(max(free_s[one] for one in taken)), place)
            for place, (taken, queue) in enumerate(waiting)
        )
        taken, queue = waiting[place]
        number = queue.take(begin_s)
        free_s.update(dict.fromkeys(taken, begin_s + seconds(items[number])))
        run(number, begin_s)
    assert len(times) == len(items), "items wait for each other"
    return [times[number] for number in range(len(items))]


# ---------------------------------------------------------------- segments


@dataclass
class _Open:
    """A segment that may still grow."""

    begin_s: float
    nodes: list[gs.Node] = field(default_factory=list)


class _Busy:
    """How long a mesh computes within any time."""

    def __init__(self, items: Sequence[tuple[Item, Time]], site: Site) -> None:
        times = sorted(
            (time.begin_s, time.end_s)
            for item, time in items
            if isinstance(item, Chunk) and item.site == site
        )
        self._begins_s = [begin_s for begin_s, _ in times]
        self._ends_s = [end_s for _, end_s in times]
        self._before_s = [0.0, *accumulate(end_s - begin_s for begin_s, end_s in times)]

    def between(self, begin_s: float, end_s: float) -> float:
        """Return how long it computes between two moments."""
        return self._until(end_s) - self._until(begin_s)

    def _until(self, at_s: float) -> float:
        count = bisect_left(self._begins_s, at_s)
        over_s = max(0.0, self._ends_s[count - 1] - at_s) if count else 0.0
        return self._before_s[count] - over_s


class _Joiner:
    """Joins nodes, in the order in which they begin, into segments between the messages."""

    def __init__(self, lowered: LoweredGraph, items: Sequence[tuple[Item, Time]]) -> None:
        self._site_of = lowered.site_of
        self._items: list[Item] = []
        self._open: dict[Site, _Open] = {}
        self._maker: dict[str, Site] = {}  # value of an open segment -> where it is made
        self._late = {tensor.name: node for node in late_nodes(lowered) for tensor in node.outputs}
        self._bringer: dict[str, Communication] = {}
        self._arrives_s: dict[int, float] = {}
        for item, time in items:
            if isinstance(item, Communication):
                self._bringer.update(dict.fromkeys(item.writes, item))
                self._arrives_s[id(item)] = time.end_s
        self._busy = {site: _Busy(items, site) for site in set(lowered.site_of.values())}
        self._held: list[Communication] = []  # ready, but not worth the end of a segment
        self._sent: set[int] = set()

    def add(self, item: Item, begin_s: float) -> None:
        """Add a message or a single node that begins then."""
        if isinstance(item, Chunk):
            self._add_node(item.nodes[0], begin_s)
            return
        for value in item.reads:
            self._add_late(value, begin_s)
        makers = self._makers(item)
        is_large = item.bucket is not None and item.bucket.nbytes >= SMALL_BYTES
        is_awaited = _crosses(item) and any(begin_s - self._open[site].begin_s >= SLOT_S for site in makers)
        end_s = self._arrives_s[id(item)]
        is_hidden = any(self._busy[site].between(begin_s, end_s) >= SLOT_S for site in makers)
        if not makers or is_large or is_awaited or is_hidden:
            self._send(item)
        else:
            self._held.append(item)

    def finish(self) -> list[Item]:
        """End all segments and messages; return them in order."""
        while self._late:
            self._add_late(next(iter(self._late)), 0.0)
        for site in sorted(self._open, key=lambda site: self._open[site].begin_s):
            self._close(site)
        assert not self._held, "a message waits for nobody"
        return self._items

    def _add_node(self, node: gs.Node, begin_s: float) -> None:
        site = self._site_of[node.name]
        messages = [self._bringer[t.name] for t in node.inputs if t.name in self._bringer]
        for message in messages:
            if id(message) not in self._sent:
                self._send(message)
        segment = self._open.get(site)
        if segment is not None and any(self._arrives_s[id(m)] > segment.begin_s for m in messages):
            self._close(site)
        for tensor in node.inputs:
            self._add_late(tensor.name, begin_s)
        self._open.setdefault(site, _Open(begin_s)).nodes.append(node)
        self._maker.update((tensor.name, site) for tensor in node.outputs)

    def _add_late(self, value: str, begin_s: float) -> None:
        """Compute what is had from variables alone, now that somebody reads it."""
        node = self._late.get(value)
        if node is None:
            return
        for tensor in node.outputs:
            self._late.pop(tensor.name, None)
        self._add_node(node, begin_s)

    def _makers(self, message: Communication) -> set[Site]:
        return {self._maker[value] for value in message.reads if value in self._maker}

    def _send(self, message: Communication) -> None:
        self._sent.add(id(message))
        for value in message.reads:
            before = self._bringer.get(value)
            if before is not None and id(before) not in self._sent:
                self._send(before)
        if message in self._held:
            self._held.remove(message)
        for site in sorted(self._makers(message)):
            self._close(site)
        self._items.append(message)

    def _close(self, site: Site) -> None:
        """End a segment, and send what waited for its end alone."""
        segment = self._open.pop(site)
        self._items.append(Chunk(site, segment.nodes))
        for node in segment.nodes:
            for tensor in node.outputs:
                del self._maker[tensor.name]
        for message in [message for message in self._held if not self._makers(message)]:
            if id(message) not in self._sent:
                self._send(message)


SENT, NEVER = -1, 2**62


def lead_first(lowered: LoweredGraph, position_of: Mapping[str, int]) -> dict[str, int]:
    """Return places for nodes that have one in the original graph.

    What at most one more message comes of goes behind what reads the same and leads to several, up to where
    the first of these is sent.
    """
    ahead = communications_ahead(lowered)
    sent_at: dict[str, int] = {}  # value -> the place where the first message that comes of it may be sent
    for node in reversed(lowered.nodes):
        place = min(
            (sent_at[tensor.name] for tensor in node.outputs if tensor.name in sent_at), default=NEVER
        )
        if is_communication(node):
            place = SENT if ahead[node.name] else NEVER
        elif place == SENT:
            place = position_of.get(node.name, NEVER)
        for tensor in node.inputs if place != NEVER else ():
            sent_at[tensor.name] = min(place, sent_at.get(tensor.name, NEVER))
    places = {name: 2 * position for name, position in position_of.items()}
    for node in lowered.nodes:
        if node.name in position_of and ahead[node.name] <= 1:
            behind = max((sent_at.get(tensor.name, SENT) for tensor in node.inputs), default=SENT)
            places[node.name] = max(places[node.name], 2 * behind + 1)
    return places
