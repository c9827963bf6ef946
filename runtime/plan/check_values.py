"""Prove that no rank reads what is not there, and that nobody touches memory that is on its way.

From a communication's start to its wait, what it reads must not be written, and what it writes must be
neither read nor written. Memory is compared, not names: slices of a buffer may overlap. Who sends a buffer
has written into every slice of it, or into its own where members' parts are gathered.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from partc.runtime.data.batches import inputs_of
from partc.runtime.data.step_draws import draws_of
from partc.runtime.errors import BadPlan
from partc.runtime.plan.members import lands_at, roots_of, sends_at, shard_values
from partc.runtime.plan.program import (
    Instruction,
    Plan,
    Rank,
    Run,
    Slice,
    Start,
    Store,
    Wait,
    instructions_of,
)


@dataclass(frozen=True, slots=True)
class _Region:
    """Elements [start, stop) of a buffer, or the whole of another value."""

    memory: str
    start: int = 0
    stop: int = 1
    holder: str = ""  # the buffer: several may take one memory, one after the other

    def overlaps(self, other: "_Region") -> bool:
        return self.memory == other.memory and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A communication under way: what it reads and writes, and which values exist behind it."""

    label: str
    reads: tuple[_Region, ...]
    writes: tuple[_Region, ...]
    results: tuple[str, ...]


def check_values(plan: Plan) -> None:
    """Raise BadPlan, naming the rank and the value, at the first read or write that must not be."""
    seen: set[Hashable] = set()
    common = _parts(plan.slices)
    for rank in plan.ranks:
        kind = _kind(plan, rank)
        if kind in seen:
            continue
        seen.add(kind)
        walk = _Walk(rank, _regions(plan, rank), common, _parts(rank.slices))
        for values in (plan.constants, rank.constants, (piece.value for piece in rank.pieces)):
            walk.make(values)
        walk.make(data_input.name for data_input in inputs_of(plan, rank))
        walk.make(shard_values(plan, rank))
        walk.make(drawn.name for drawn in draws_of(plan, rank))
        _walk_through(instructions_of(plan, rank), walk, roots_of(plan, rank))


def _kind(plan: Plan, rank: Rank) -> Hashable:
    """Return what ranks have in common that do the same to the same values."""
    is_root = frozenset((group, root == rank.rank) for group, root in roots_of(plan, rank).items())
    values = tuple(piece.value for piece in rank.pieces)
    return rank.sites, rank.replica is None, is_root, values, tuple(rank.constants), rank.slices


def _walk_through(program: Iterable[Instruction], walk: "_Walk", roots: Mapping[str, int]) -> None:
    for instruction in program:
        match instruction:
            case Run(reads=reads, writes=writes):
                walk.touch((value for _, value in reads), (value for _, value in writes))
            case Store(source=source, target=target):
                walk.touch((source,), (target,))
            case Start():
                walk.start(instruction, roots[instruction.group])
            case Wait(tag_id=tag_id):
                walk.wait(tag_id)


@dataclass(slots=True)
class _Walk:
    """One rank's step so far."""

    rank: Rank
    regions: dict[str, _Region]
    common: Mapping[str, tuple[str, ...]]  # buffer -> the values that lie there on every rank
    own: Mapping[str, tuple[str, ...]]  # buffer -> the rank's own parts
    present: set[str] = field(default_factory=set)
    filled: dict[str, set[tuple[int, int]]] = field(default_factory=dict)  # buffer -> what was written there
    flights: dict[int, _Flight] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)  # memory -> the buffer last written there
    near: dict[str, list[_Flight]] = field(default_factory=dict)  # memory -> what is under way there

    def touch(self, reads: Iterable[str], writes: Iterable[str]) -> None:
        """Read, then write, at once."""
        for value in reads:
            self._read(value)
        for value in writes:
            self._write(value)
            self.make((value,))

    def make(self, values: Iterable[str]) -> None:
        """Take values for written."""
        for value in values:
            region = self.regions.get(value)
            if region is None:
                self.present.add(value)
            else:
                self.filled.setdefault(region.holder, set()).add((region.start, region.stop))

    def start(self, start: Start, root: int) -> None:
        """Begin to read and write, until the wait."""
        lands = lands_at(start, self.rank, root)
        reads = start.reads if sends_at(start, self.rank, root) else ()
        writes = start.writes if lands else ()
        parts = self.own if start.kind == "all_gather" else self.common
        for value in reads:
            region = self._region(value)
            is_buffer = value == region.holder
            for part in parts.get(value, ()) if is_buffer else (value,):
                self._read(part)
            self._refuse_flights(value, region)
        for value in writes:
            self._write(value)
        flight = _Flight(
            start.label or f"communication {start.tag_id}",
            tuple(self._region(value) for value in reads),
            tuple(self._region(value) for value in writes),
            writes,
        )
        self.flights[start.tag_id] = flight
        for memory in {region.memory for region in (*flight.reads, *flight.writes)}:
            self.near.setdefault(memory, []).append(flight)

    def wait(self, tag_id: int) -> None:
        """End a communication."""
        flight = self.flights.pop(tag_id)
        self.make(flight.results)
        for memory in {region.memory for region in (*flight.reads, *flight.writes)}:
            self.near[memory].remove(flight)

    def _read(self, value: str) -> None:
        region = self._region(value)
        holder = self.holders.get(region.memory, region.holder)
        if holder != region.holder:
            raise _mistake(f"value {value!r} is read when {holder!r} has taken its memory", self.rank)
        if not (self._is_filled(region) if region.holder else value in self.present):
            raise _mistake(f"value {value!r} is read before anything makes it", self.rank)
        self._refuse_flights(value, region)

    def _is_filled(self, region: _Region) -> bool:
        filled = self.filled.get(region.holder, set())
        is_empty = region.start == region.stop  # a server may own no rows
        return (
            is_empty
            or (region.start, region.stop) in filled
            or any(start < region.stop and region.start < stop for start, stop in filled)
        )

    def _refuse_flights(self, value: str, region: _Region) -> None:
        for flight in self.near.get(region.memory, ()):
            self._refuse_overlap(value, region, flight, flight.writes, "read")

    def _write(self, value: str) -> None:
        region = self._region(value)
        for flight in self.near.get(region.memory, ()):
            self._refuse_overlap(value, region, flight, (*flight.reads, *flight.writes), "written")
        if region.holder != self.holders.get(region.memory, region.holder):
            self.filled.pop(region.holder, None)
        self.holders[region.memory] = region.holder

    def _refuse_overlap(
        self, value: str, region: _Region, flight: _Flight, regions: Iterable[_Region], verb: str
    ) -> None:
        if any(region.overlaps(other) for other in regions):
            raise _mistake(f"value {value!r} is {verb} while {flight.label!r} is under way", self.rank)

    def _region(self, value: str) -> _Region:
        return self.regions.get(value) or _Region(f"value {value}")


def _regions(plan: Plan, rank: Rank) -> dict[str, _Region]:
    buffers = {buffer.name: buffer for buffer in plan.buffers if set(buffer.sites) & set(rank.sites)}
    memory = {name: buffer.memory or name for name, buffer in buffers.items()}
    regions = {name: _Region(memory[name], 0, buffer.elements, name) for name, buffer in buffers.items()}
    for piece in (*plan.slices, *rank.slices):
        if piece.buffer in buffers:
            size = 1
            for length in piece.shape:
                size *= length
            regions[piece.value] = _Region(
                memory[piece.buffer], piece.offset, piece.offset + size, piece.buffer
            )
    return regions


def _parts(slices: Iterable[Slice]) -> dict[str, tuple[str, ...]]:
    parts: dict[str, list[str]] = {}
    for piece in slices:
        parts.setdefault(piece.buffer, []).append(piece.value)
    return {buffer: tuple(values) for buffer, values in parts.items()}


def _mistake(what: str, rank: Rank) -> BadPlan:
    return BadPlan(
        what,
        at=f"the program of rank {rank.rank}",
        fix="compile the model again; in a plan as partc compiled it this is a mistake: report it",
    )
