"""Put the distributed step in one order that all ranks share, and cut it into segments.

Nodes are taken in waves: a wave holds what has equally many communications before it. Within a wave
a site's nodes keep the order of the original graph; a communication begins right after the last node
it waits for, which ends a segment there, so that the backward pass goes on meanwhile. A segment ends as
well before the first node that reads a large AllGather, so that what is before it need not wait.

What is computed from variables alone, such as the decayed means of an optimizer, needs no communication
but waits for the wave that reads it: made in the first wave, it would lie in memory through the whole
step. What nobody on a server reads, a counter's next value, waits for the servers' last wave: nothing is
written before gradients have come.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.microbatches.find_repeated import REARRANGING, Repeated
from partc.passes.scheduling.bucket_communications import Bucket, depths
from partc.runtime.plan.program import Site

SMALL_BYTES = 1_000_000  # a smaller message does not end a segment before the wave ends


@dataclass(frozen=True)
class RunningSum:
    """A value of every micro-batch that is added to those of the micro-batches before."""

    term: gs.Tensor
    total: gs.Tensor
    op: str  # Add, Max, Min


@dataclass
class Chunk:
    """Nodes of one site that run as one segment: once, or for every micro-batch."""

    site: Site
    nodes: list[gs.Node] = field(default_factory=list)
    is_repeated: bool = False
    sums: tuple[RunningSum, ...] = ()  # over micro-batches, of what the nodes make

    def nodes_of(self, microbatch: int | None) -> list[gs.Node]:
        """Return the nodes as a micro-batch runs them: the first begins the sums, others go on."""
        return [*self.nodes, *(self._going_on if microbatch else self._beginning)]

    @cached_property
    def _beginning(self) -> list[gs.Node]:
        return [
            gs.Node("Identity", f"{s.total.name}.begin", {}, [_alike(s.term)], [_alike(s.total)])
            for s in self.sums
        ]

    @cached_property
    def _going_on(self) -> list[gs.Node]:
        return [
            gs.Node(
                s.op,
                f"{s.total.name}.add",
                {},
                [gs.Variable(f"{s.total.name}.before", dtype=s.total.dtype), _alike(s.term)],
                [_alike(s.total)],
            )
            for s in self.sums
        ]


@dataclass(frozen=True)
class Communication:
    """One communication: a bucket's, or a single node's."""

    nodes: tuple[gs.Node, ...]
    bucket: Bucket | None

    @property
    def reads(self) -> tuple[str, ...]:
        """Values that must exist before it begins."""
        return tuple(tensor.name for node in self.nodes for tensor in node.inputs)

    @property
    def writes(self) -> tuple[str, ...]:
        """Values that exist once it is complete."""
        return tuple(tensor.name for node in self.nodes for tensor in node.outputs)


Item = Chunk | Communication
Lane = tuple[Site, bool]  # where nodes run, and whether for every micro-batch


def _alike(tensor: gs.Tensor) -> gs.Variable:
    """Return the tensor apart from the graph that it is in."""
    return gs.Variable(tensor.name, dtype=tensor.dtype)


def schedule(
    lowered: LoweredGraph, buckets: Mapping[str, Bucket], position_of: Mapping[str, int], repeated: Repeated
) -> list[Item]:
    """Return segments and messages in order. `position_of`: lowered node -> place in the original."""
    messages = messages_of(lowered, buckets)
    depth = _depths_with(messages, lowered)
    waves = _late_where_free(lowered, depth, repeated)
    order = _ordered_nodes(lowered, waves, position_of)
    nodes_of, waiting = defaultdict(list), defaultdict(list)
    for node in order:
        nodes_of[waves[node.name]].append(node)
    for message in messages:
        waiting[depth[message.nodes[0].name]].append(message)
    arriving = {
        value: message.bucket.name
        for message in messages
        if message.bucket is not None
        and message.bucket.op == "AllGather"
        and message.bucket.nbytes >= SMALL_BYTES
        for value in message.writes
    }
    items: list[Item] = []
    arrived: set[str] = set()
    for wave in range(max(depth.values(), default=0) + 1):
        for item in _schedule_wave(nodes_of[wave], waiting[wave], lowered, repeated):
            items += _cut_at_gathers(item, arriving, arrived)
    return items


def _depths_with(messages: Sequence[Communication], lowered: LoweredGraph) -> dict[str, int]:
    """Return for each node the communications on the longest way to it; a message has its deepest node's."""
    alone = depths(lowered)
    of_message = {
        node.name: max(alone[member.name] for member in message.nodes)
        for message in messages
        for node in message.nodes
    }
    reached: dict[str, int] = {}
    result: dict[str, int] = {}
    for node in lowered.nodes:
        behind = max((reached.get(tensor.name, 0) for tensor in node.inputs), default=0)
        result[node.name] = of_message.get(node.name, behind)
        for tensor in node.outputs:
            reached[tensor.name] = result[node.name] + is_communication(node)
    return result


def messages_of(lowered: LoweredGraph, buckets: Mapping[str, Bucket]) -> list[Communication]:
    """Return all communications, those of a bucket as one."""
    messages: list[Communication] = []
    seen: set[str] = set()
    for node in lowered.nodes:
        if not is_communication(node):
            continue
        bucket = buckets.get(node.name)
        if bucket is None:
            messages.append(Communication((node,), None))
        elif bucket.name not in seen:
            seen.add(bucket.name)
            messages.append(Communication(bucket.members, bucket))
    return messages


def _late_where_free(lowered: LoweredGraph, depth: Mapping[str, int], repeated: Repeated) -> dict[str, int]:
    """Return each node's wave: its depth, but its first reader's if its inputs outlive the step anyway.

    What a micro-batch only turns about for its way back is turned then, by the product that reads it.
    """
    late = {node.name for node in late_nodes(lowered)}
    waves = dict(depth)
    last = max((wave for name, wave in depth.items() if lowered.site_of.get(name) == "server"), default=0)
    first_read: dict[str, int] = {}
    for node in reversed(lowered.nodes):
        reads = [first_read[tensor.name] for tensor in node.outputs if tensor.name in first_read]
        is_turned = node.op in REARRANGING and node.name in repeated.nodes
        if reads and not is_communication(node) and (is_turned or node.name in late):
            waves[node.name] = min(reads)
        elif not reads and node.name in late and lowered.site_of[node.name] == "server":
            waves[node.name] = last
        for tensor in node.inputs:
            first_read[tensor.name] = min(waves[node.name], first_read.get(tensor.name, waves[node.name]))
    return waves


def late_nodes(lowered: LoweredGraph) -> list[gs.Node]:
    """Return the compute nodes that read variables and constants alone, or what such nodes make."""
    lasting = {state.value for state in lowered.states} | lowered.constants.keys()
    late: list[gs.Node] = []
    for node in lowered.nodes:
        if not is_communication(node) and _reads_only(node, lasting):
            late.append(node)
            lasting.update(tensor.name for tensor in node.outputs)
    return late


def _reads_only(node: gs.Node, values: set[str]) -> bool:
    return all(isinstance(t, gs.Constant) or not t.name or t.name in values for t in node.inputs)


def _ordered_nodes(
    lowered: LoweredGraph, waves: Mapping[str, int], position_of: Mapping[str, int]
) -> list[gs.Node]:
    """Sort compute nodes topologically; among those ready, by wave, then by original position."""
    nodes = [node for node in lowered.nodes if not is_communication(node)]
    producer = {tensor.name: index for index, node in enumerate(nodes) for tensor in node.outputs}
    ranks: list[int] = []
    before: list[set[int]] = []
    for node in nodes:
        sources = {producer[t.name] for t in node.inputs if t.name in producer}
        inherited = max((ranks[source] for source in sources), default=-1)
        ranks.append(position_of.get(node.name, inherited))
        before.append(sources)
    after: list[list[int]] = [[] for _ in nodes]
    for index, sources in enumerate(before):
        for source in sources:
            after[source].append(index)
    missing = [len(sources) for sources in before]
    keys = [(waves[node.name], ranks[index], index) for index, node in enumerate(nodes)]
    ready = [key for index, key in enumerate(keys) if not missing[index]]
    heapq.heapify(ready)
    result: list[gs.Node] = []
    while ready:
        index = heapq.heappop(ready)[2]
        result.append(nodes[index])
        for following in after[index]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, keys[following])
    assert len(result) == len(nodes), "the lowered graph has a cycle"
    return result


def _schedule_wave(
    nodes: list[gs.Node], messages: list[Communication], lowered: LoweredGraph, repeated: Repeated
) -> list[Item]:
    lanes: dict[Lane, list[gs.Node]] = {}
    made_in: dict[str, Lane] = {}
    for node in nodes:
        lane = lowered.site_of[node.name], node.name in repeated.nodes
        lanes.setdefault(lane, []).append(node)
        made_in.update((tensor.name, lane) for tensor in node.outputs)
    waiting: dict[Lane | None, list[Communication]] = {}
    for message in messages:
        last = max((made_in[value] for value in message.reads if value in made_in), default=None)
        waiting.setdefault(last, []).append(message)
    items: list[Item] = [*waiting.get(None, ())]
    for lane in sorted(lanes):  # what runs once may be read by what is repeated
        items += _cut(lanes[lane], waiting.get(lane, []), lane)
    return items


def _cut_at_gathers(item: Item, arriving: Mapping[str, str], arrived: set[str]) -> list[Item]:
    """Cut a segment before each node that is the first to read a message; adds these to `arrived`."""
    if not isinstance(item, Chunk) or item.is_repeated:
        return [item]
    pieces = [Chunk(item.site)]
    for node in item.nodes:
        read = {arriving[tensor.name] for tensor in node.inputs if tensor.name in arriving}
        if read - arrived and pieces[-1].nodes:
            pieces.append(Chunk(item.site))
        arrived |= read
        pieces[-1].nodes.append(node)
    return [*pieces]


def _cut(nodes: list[gs.Node], messages: list[Communication], lane: Lane) -> list[Item]:
    """Cut where a large message is ready; small ones wait for the next cut."""
    place = {tensor.name: index for index, node in enumerate(nodes) for tensor in node.outputs}
    ready = sorted(
        (max(place[value] for value in message.reads if value in place), number)
        for number, message in enumerate(messages)
    )
    items: list[Item] = []
    waiting: list[Communication] = []
    begin = 0
    for position, number in ready:
        message = messages[number]
        waiting.append(message)
        if message.bucket is not None and message.bucket.nbytes >= SMALL_BYTES:
            if position + 1 > begin:
                items.append(Chunk(lane[0], nodes[begin : position + 1], lane[1]))
                begin = position + 1
            items += waiting
            waiting = []
    if begin < len(nodes):
        items.append(Chunk(lane[0], nodes[begin:], lane[1]))
    return [*items, *waiting]
