"""Write the schedule down as instructions, buffers and segments.

    chunk     ->  Run, with a segment               bucket  ->  a Buffer and its Slices
    message   ->  Start and Wait, level by level    state   ->  a variable updated in place, or a Store

Waits come as late as they may: before the first reader, or before the next level of the same message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.bucket_communications import IN_PIECES, Bucket
from partc.passes.scheduling.levels import Collective, HostGrid, levels_of
from partc.passes.scheduling.outline_segments import SegmentOutliner
from partc.passes.scheduling.prove_in_place import prove_in_place
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from partc.passes.scheduling.segment_work import WorkCounter
from partc.passes.scheduling.write_segments import SegmentWriter, row_shape
from partc.runtime.plan.program import Buffer, Instruction, RowShape, Run, Site, Slice, Start, Store, Wait
from partc.runtime.transports.communication import ROW_KINDS


@dataclass
class Program:
    """Instructions of the whole cluster, and what they name."""

    instructions: list[Instruction] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    # (value, the parameter whose rows it holds, its bucket, its place there); None: a part along a mesh axis
    owned_slices: list[tuple[str, str | None, Bucket, int]] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)  # value -> the variable written in place


@dataclass
class _Flight:
    """A message under way: its levels still to come, the one begun last."""

    levels: list[Collective]
    moves: frozenset[str]  # values that it reads or writes
    begun: int = -1


class ProgramMaker:
    """Makes one program; `writer` makes its segments, or only tells what they would read and write."""

    def __init__(
        self,
        lowered: LoweredGraph,
        items: Sequence[Item],
        topology: HostGrid,
        writer: SegmentWriter | SegmentOutliner,
    ) -> None:
        self.lowered = lowered
        self.items = items
        self.topology = topology
        self.writer = writer
        self.program = Program()
        self._work = WorkCounter(lowered, writer.functions, topology.hosts)
        self._in_flight: list[_Flight] = []
        self._next_tag = 0

    def make(self) -> Program:
        """Return the program. Fills the writer's folder with segments on the way."""
        safe = prove_in_place(self.lowered, self.items)
        self.program.renamed = {state.next: state.value for state in safe}
        self._lay_out_buffers()
        readers = _readers(self.items)
        lasting = {value for _, value, _ in self.lowered.outputs} | {s.next for s in self.lowered.states}
        for item in self.items:
            if isinstance(item, Chunk):
                self._run(item, lasting, readers)
            else:
                self._start(item)
        self._finish(self._in_flight)
        for state in self.lowered.states:
            if state not in safe:
                self.program.instructions.append(Store(state.site, state.next, state.value))
        return self.program

    def _lay_out_buffers(self) -> None:
        buckets = [item.bucket for item in self.items if isinstance(item, Communication) and item.bucket]
        for bucket in buckets:
            both: tuple[Site, ...] = ("worker", "server")
            sites = (bucket.site,) if bucket.op in ("AllReduce", *IN_PIECES) else both
            name = np.dtype(bucket.dtype).name
            self.program.buffers.append(Buffer(bucket.name, name, bucket.elements, sites))
            for index, node in enumerate(bucket.members):
                self._place_member(bucket, index, node.inputs[0].name, node.outputs[0].name)

    def _place_member(self, bucket: Bucket, index: int, source: str, target: str) -> None:
        """Both ends of an in-place communication share a place; servers' owned rows have their own."""
        parts = {"Push": (source, target), "ReduceScatter": (source, target)}
        parts |= {"Pull": (target, source), "AllGather": (target, source)}
        whole, owned = parts.get(bucket.op, (None, None))
        for value in (source, target) if whole is None else (whole,):
            place = Slice(value, bucket.name, bucket.offsets[index], bucket.shapes[index])
            self.program.slices.append(place)
        if owned is not None:
            owner = bucket.members[index].attrs.get("owner")
            self.program.owned_slices.append((owned, owner, bucket, index))

    def _run(self, chunk: Chunk, lasting: set[str], readers: Mapping[str, list[Item]]) -> None:
        produced = [t.name for node in chunk.nodes for t in node.outputs if t.name]
        wanted = {v for v in produced if v in lasting or any(r is not chunk for r in readers.get(v, ()))}
        touched = {self._name(t.name) for node in chunk.nodes for t in (*node.inputs, *node.outputs)}
        self._wait_for(touched)
        segment = self.writer.make(chunk, wanted, self.program.renamed.keys())
        work = self._work.count(chunk.nodes, wanted)
        if not segment.writes:
            return
        self.program.instructions.append(
            Run(
                chunk.site,
                segment.path,
                tuple((name, self._name(name)) for name in segment.reads),
                tuple((name, self._name(name)) for name in segment.writes),
                segment.races,
                work.flops,
                work.touched_bytes,
                work.streamed_bytes,
                work.nodes,
                work.sorted_ids,
            )
        )
        self._advance()

    def _name(self, value: str) -> str:
        return self.program.renamed.get(value, value)

    def _start(self, message: Communication) -> None:
        self._wait_for(set(message.reads))
        self._work.pass_on(message.nodes)
        for node in message.nodes:
            if message.bucket is None:
                for index, tensor in enumerate(node.outputs):
                    self.writer.dtypes[tensor.name] = np.dtype(tensor.dtype)
                    shape = row_shape(node, index, self.writer.shapes)
                    self.writer.shapes.setdefault(tensor.name, shape)
        levels = levels_of(message, self.topology, self.lowered)
        flight = _Flight(levels, frozenset({*message.reads, *message.writes}))
        self._in_flight.append(flight)
        self._next_level(flight)

    def _next_level(self, flight: _Flight) -> None:
        if flight.begun >= 0:
            self.program.instructions.append(Wait(flight.begun))
        if not flight.levels:
            self._in_flight.remove(flight)
            return
        level = flight.levels.pop(0)
        flight.begun = self._next_tag
        self._next_tag += 1
        self.program.instructions.append(
            Start(
                flight.begun,
                level.kind,
                level.group,
                level.senders,
                level.receivers,
                tuple(self._name(value) for value in level.reads),
                level.writes,
                level.reduction,
                level.counts,
                level.payload_bytes,
                level.label,
                rows=self._row_shapes(level),
            )
        )

    def _row_shapes(self, level: Collective) -> tuple[RowShape, ...]:
        """Return what one row of each value looks like, nothing where that follows the data."""
        if level.kind not in ROW_KINDS:
            return ()
        values = level.writes if level.kind == "scatter_rows" else level.writes[:-1]
        known = [self.writer.shapes.get(value, (None, None))[1:] for value in values]
        if any(size is None for shape in known for size in shape):
            return ()
        return tuple(
            RowShape(np.dtype(self.writer.dtypes[value]).name, tuple(size or 0 for size in shape))
            for value, shape in zip(values, known, strict=True)
        )

    def _advance(self) -> None:
        """Let messages that still have a level to go take it while others compute."""
        for flight in list(self._in_flight):
            if flight.levels:
                self._next_level(flight)

    def _wait_for(self, values: set[str]) -> None:
        """End what moves any of the values: it may be in place, so that even a sent one may change."""
        self._finish([flight for flight in self._in_flight if values & flight.moves])

    def _finish(self, flights: Sequence[_Flight]) -> None:
        for flight in list(flights):
            while flight in self._in_flight:
                self._next_level(flight)


def _readers(items: Sequence[Item]) -> dict[str, list[Item]]:
    readers: dict[str, list[Item]] = {}
    for item in items:
        for node in item.nodes:
            for tensor in node.inputs:
                readers.setdefault(tensor.name, []).append(item)
    return readers
