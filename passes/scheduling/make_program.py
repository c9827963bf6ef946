"""Write the schedule down as instructions, buffers and segments.

    chunk     ->  Run, with a segment               bucket  ->  a Buffer and its Slices
    message   ->  Start and Wait, level by level    state   ->  a variable updated in place, or a Store

Waits come as late as they may: before the first reader, or before the next level of the same message. Who
only sends to another mesh waits at the end. Micro-batches share their segments, but the first, which begins
the sums, and the others, which go on with them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.microbatches.find_repeated import Repeated
from partc.passes.microbatches.take_turns import Turn
from partc.passes.scheduling.bucket_communications import IN_PIECES, Bucket
from partc.passes.scheduling.levels import Collective, HostGrid, levels_of
from partc.passes.scheduling.live_values import lives_of
from partc.passes.scheduling.outline_segments import SegmentOutliner
from partc.passes.scheduling.place_gathers import share_gathered
from partc.passes.scheduling.prove_in_place import prove_in_place
from partc.passes.scheduling.schedule import Chunk, Communication
from partc.passes.scheduling.segment_work import Work, WorkCounter
from partc.passes.scheduling.session_memory import session_bytes, vanishing_values
from partc.passes.scheduling.share_memory import share_memory
from partc.passes.scheduling.write_segments import Segment, SegmentWriter, row_shape
from partc.runtime.plan.program import Buffer, Instruction, RowShape, Run, Site, Slice, Store, Wait
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
    # constant -> its names, one for every micro-batch, where these have different ones
    moments: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SegmentBytes:
    """Bytes that a segment makes: of each write, and the most at once (see Run)."""

    writes: tuple[int, ...]
    inner: int


@dataclass
class _Flight:
    """A message under way: its levels still to come, the one begun last."""

    levels: list[Collective]
    moves: frozenset[str]  # values that it reads or writes
    begun: int = -1
    arrives_at: Site | None = None  # what goes from one mesh to another: nobody else waits for it there


class ProgramMaker:
    """Makes one program; `writer` makes its segments, or only tells what they would read and write.

    `late`: buckets that are gathered when they are read, and may share memory.
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        turns: Sequence[Turn],
        repeated: Repeated,
        topology: HostGrid,
        writer: SegmentWriter | SegmentOutliner,
        late: Collection[str] = (),
    ) -> None:
        self.lowered = lowered
        self.turns = turns
        self.repeated = repeated
        self.topology = topology
        self.writer = writer
        self.late = late
        self.program = Program()
        self._work = WorkCounter(lowered, topology.hosts, _placed(turns), names_kernels=writer.names_kernels)
        self._in_flight: list[_Flight] = []
        self._next_tag = 0
        self._buffers_of_buckets: dict[str, list[str]] = {}  # of every micro-batch
        self._owed: list[Wait] = []  # by those who only send
        self._segments: dict[tuple[int, bool], tuple[Segment, Work, SegmentBytes]] = {}  # of repeated chunks

    def make(self) -> Program:
        """Return the program. Fills the writer's folder with segments on the way."""
        safe = prove_in_place(self.lowered, [turn.item for turn in self.turns])
        self.program.renamed = {state.next: state.value for state in safe}
        self._lay_out_buffers()
        readers = _readers(self.turns, self.repeated)
        lasting = {value for _, value, _ in self.lowered.outputs} | {s.next for s in self.lowered.states}
        for turn in self.turns:
            if isinstance(turn.item, Chunk):
                self._run(turn.item, turn.microbatch, lasting, readers)
            else:
                self._start(turn.item, turn.microbatch)
        self._finish(self._in_flight)
        self.program.instructions += self._owed
        moments = range(self.repeated.count)
        self.program.moments = {
            name: tuple(self.repeated.name(name, moment) for moment in moments)
            for name in self.lowered.moment_constants
        }
        for state in self.lowered.states:
            if state not in safe:
                self.program.instructions.append(Store(state.site, state.next, state.value))
        self._share_memory()
        return self.program

    def _share_memory(self) -> None:
        """Let what arrives for one micro-batch lie where another's lay."""
        program = self.program
        buffer_of = {piece.value: piece.buffer for piece in program.slices}
        buffer_of |= {value: bucket.name for value, _, bucket, _ in program.owned_slices}
        alike = self._buffers_of_buckets.values()
        shared = share_memory(program.instructions, program.buffers, buffer_of, alike, set(self._owed))
        program.instructions = shared.instructions
        program.buffers = share_gathered(shared.instructions, shared.buffers, buffer_of, self.late)

    def _lay_out_buffers(self) -> None:
        for turn in self.turns:
            bucket = turn.item.bucket if isinstance(turn.item, Communication) else None
            if bucket is None:
                continue
            name = _bucket_name(bucket, turn.microbatch)
            if turn.microbatch is not None:
                self._buffers_of_buckets.setdefault(bucket.name, []).append(name)
            bucket = replace(bucket, name=name)
            both: tuple[Site, ...] = ("worker", "server")
            sites = (bucket.site,) if bucket.op in ("AllReduce", *IN_PIECES) else both
            if bucket.receivers:
                sites = (bucket.site, *bucket.receivers)
            dtype = np.dtype(bucket.dtype).name
            self.program.buffers.append(Buffer(bucket.name, dtype, bucket.elements, sites))
            for index, node in enumerate(bucket.members):
                sources, targets = (
                    [self.repeated.name(t.name, turn.microbatch) for t in tensors]
                    for tensors in (node.inputs, node.outputs)
                )
                if bucket.op in IN_PIECES:
                    is_gathered = bucket.op == "AllGather"
                    whole, own = (targets, sources) if is_gathered else (sources, targets)
                    self._place_pieces(bucket, index, whole, own[0])
                else:
                    self._place_member(bucket, index, sources[0], targets[0])

    def _place_pieces(self, bucket: Bucket, index: int, whole: list[str], own: str) -> None:
        """Place a member: its pieces, or the whole of a lone one, and what a rank has of it."""
        if bucket.is_divided:
            places = [
                Slice(value, bucket.name, piece.offset, piece.apart)
                for value, piece in zip(whole, bucket.pieces[index], strict=True)
            ]
        else:
            places = [Slice(whole[0], bucket.name, 0, bucket.shapes[index])]
        self.program.slices += places
        self.program.owned_slices.append((own, None, bucket, index))

    def _place_member(self, bucket: Bucket, index: int, source: str, target: str) -> None:
        """Both ends of an in-place communication share a place; servers' owned rows have their own."""
        parts = {"Push": (source, target), "Pull": (target, source)}
        whole, owned = parts.get(bucket.op, (None, None))
        for value in (source, target) if whole is None else (whole,):
            place = Slice(value, bucket.name, bucket.offsets[index], bucket.shapes[index])
            self.program.slices.append(place)
        if owned is not None:
            owner = bucket.members[index].attrs.get("owner")
            self.program.owned_slices.append((owned, owner, bucket, index))

    def _run(
        self, chunk: Chunk, microbatch: int | None, lasting: set[str], readers: Mapping[str, set[int]]
    ) -> None:
        nodes = chunk.nodes_of(microbatch)
        touched = {self._name(t.name, microbatch) for node in nodes for t in (*node.inputs, *node.outputs)}
        self._wait_for(touched)
        segment, work, sizes = self._segment(chunk, nodes, bool(microbatch), lasting, readers)
        if not segment.writes:
            return
        before = {f"{s.total.name}.before": s.total.name for s in chunk.sums}
        self.program.instructions.append(
            Run(
                chunk.site,
                segment.path,
                tuple((name, self._name(before.get(name, name), microbatch)) for name in segment.reads),
                tuple((name, self._name(name, microbatch)) for name in segment.writes),
                segment.races,
                work.flops,
                work.touched_bytes,
                work.streamed_bytes,
                work.nodes,
                work.sorted_ids,
                work.packed_bytes,
                sizes.writes,
                sizes.inner,
                work.kernels,
            )
        )
        self._advance()

    def _segment(
        self,
        chunk: Chunk,
        nodes: list[gs.Node],
        goes_on: bool,
        lasting: set[str],
        readers: Mapping[str, set[int]],
    ) -> tuple[Segment, Work, SegmentBytes]:
        """Write a chunk's segment, once where micro-batches share it: those that go on with a sum, or all."""
        key = id(chunk), goes_on and bool(chunk.sums)
        if key not in self._segments:
            produced = [t.name for node in nodes for t in node.outputs if t.name]
            totals = {s.total.name for s in chunk.sums}
            read_later = {v for v in produced if v in lasting or readers.get(v, set()) - {id(chunk)}} | totals
            own = replace(chunk, nodes=nodes)
            segment = self.writer.make(own, read_later, self.program.renamed.keys())
            work = self._work.count(nodes, read_later)
            self._segments[key] = segment, work, self._sizes(own, read_later, segment)
        return self._segments[key]

    def _sizes(self, chunk: Chunk, read_later: set[str], segment: Segment) -> SegmentBytes:
        sizes = {
            tensor.name: self._work.expected_bytes(tensor)
            for node in chunk.nodes
            for tensor in node.outputs
            if tensor.name not in self.program.renamed
        }
        if self.writer.on_cpu or chunk.site == "server":
            vanishing = vanishing_values(chunk.nodes, read_later, sizes)
            made = {name: nbytes for name, nbytes in sizes.items() if name not in vanishing}
            inner = session_bytes(chunk.nodes, made, read_later)
        else:
            inner = lives_of(chunk.nodes, sizes, read_later).peak_bytes
        return SegmentBytes(tuple(sizes.get(name, 0) for name in segment.writes), inner)

    def _name(self, value: str, microbatch: int | None = None) -> str:
        return self.program.renamed.get(value, self.repeated.name(value, microbatch))

    def _start(self, message: Communication, microbatch: int | None) -> None:
        reads, writes = (
            {self.repeated.name(value, microbatch) for value in values}
            for values in (message.reads, message.writes)
        )
        self._wait_for(reads)
        self._work.pass_on(message.nodes)
        for node in message.nodes:
            if message.bucket is None:
                for index, tensor in enumerate(node.outputs):
                    self.writer.dtypes[tensor.name] = np.dtype(tensor.dtype)
                    if (shape := row_shape(node, index, self.writer.shapes)) is not None:
                        self.writer.shapes.setdefault(tensor.name, shape)
        levels = [
            self._of_microbatch(level, message.bucket, microbatch)
            for level in levels_of(message, self.topology, self.lowered, microbatch or 0)
        ]
        flight = _Flight(levels, frozenset(reads | writes))
        self._in_flight.append(flight)
        self._next_level(flight)

    def _of_microbatch(self, level: Collective, bucket: Bucket | None, microbatch: int | None) -> Collective:
        if microbatch is None:
            return level
        names = {bucket.name: _bucket_name(bucket, microbatch)} if bucket else {}
        reads, writes = (
            tuple(names.get(value, self.repeated.name(value, microbatch)) for value in values)
            for values in (level.reads, level.writes)
        )
        return replace(level, reads=reads, writes=writes, label=f"{level.label} #{microbatch}")

    def _next_level(self, flight: _Flight) -> None:
        if flight.begun >= 0 and flight.arrives_at is not None:
            self.program.instructions.append(Wait(flight.begun, flight.arrives_at))
        elif flight.begun >= 0:
            self.program.instructions.append(Wait(flight.begun))
        if not flight.levels:
            self._in_flight.remove(flight)
            return
        level = flight.levels.pop(0)
        flight.begun = self._next_tag
        self._next_tag += 1
        if self.lowered.meshes.are_strangers(level.senders, level.receivers):
            flight.arrives_at = level.receivers
            self._owed.append(Wait(flight.begun, level.senders))
        self.program.instructions.append(
            msgspec.structs.replace(
                level.start(flight.begun),
                reads=tuple(self._name(value) for value in level.reads),
                rows=self._row_shapes(level),
            )
        )

    def _row_shapes(self, level: Collective) -> tuple[RowShape, ...]:
        """Return what one row of each value looks like, nothing where that follows the data."""
        if level.kind not in ROW_KINDS:
            return ()
        written = level.writes if level.kind == "scatter_rows" else level.writes[:-1]
        values = [self.repeated.value_of(name) for name in written]
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


def _placed(turns: Sequence[Turn]) -> set[str]:
    """Return the values that lie in a communication's buffer."""
    return {
        tensor.name
        for turn in turns
        if isinstance(turn.item, Communication) and turn.item.bucket is not None
        for node in turn.item.bucket.members
        for tensor in (*node.inputs, *node.outputs)
    }


def _bucket_name(bucket: Bucket, microbatch: int | None) -> str:
    """Name a bucket's memory: what arrives for one micro-batch is read while others arrive."""
    return bucket.name if microbatch is None else f"{bucket.name}#{microbatch}"


def _readers(turns: Sequence[Turn], repeated: Repeated) -> dict[str, set[int]]:
    """Return value -> the items that read it, each by its id."""
    readers: dict[str, set[int]] = {}
    for turn in turns:
        item = turn.item
        for node in item.nodes_of(turn.microbatch) if isinstance(item, Chunk) else item.nodes:
            for tensor in node.inputs:
                readers.setdefault(repeated.value_of(tensor.name), set()).add(id(item))
    return readers
