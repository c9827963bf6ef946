"""One member's part in a communication: what it supplies and where the results land.

Dense kinds become pairs of arrays, the same memory wherever the result may replace the contribution:

    kind            source                              target
    all_reduce      the value                           the same memory
    reduce          the value                           the same memory (root only)
    broadcast       the value (root only)               the value
    reduce_scatter  the whole, sum(counts) elements     this member's region
    all_gather      this member's region                the whole
    shift_ahead     the value                           the value of the member before, or zeros
    shift_back      the value                           the value of the member behind, or zeros
    exchange        the region that this member has     the region that it wants
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partc.runtime.errors import BadPlan
from partc.runtime.execution.arrays import Array, DeviceArrays
from partc.runtime.execution.environment import Environment
from partc.runtime.plan.members import lands_at, sends_at
from partc.runtime.plan.moves import Index, place_in, shape_of
from partc.runtime.plan.program import Rank, Start

ROW_KINDS = frozenset({"gather_rows", "scatter_rows", "all_gather_rows", "all_to_all_rows"})
SHIFTS = {"shift_ahead": 1, "shift_back": -1}
# Measured with 2 to 4 members, in one machine and at 1 Gbit/s (docs/benchmarks.md): shorter sums take the
# same or less in one collective, and so does an all_reduce of two members.
LONG_SUM_BYTES = 1 << 19
_READS_COUNTS = frozenset({"scatter_rows", "all_to_all_rows"})


@dataclass(frozen=True, slots=True)
class Dense:
    """One value of a dense kind. Arrays are contiguous, and lie where the member computes."""

    source: Array
    target: Array
    is_placed: bool = True  # the target lies where the value lives


@dataclass(frozen=True, slots=True)
class Part:
    """What one member brings to a communication."""

    start: Start
    members: tuple[int, ...]  # world ranks; the first is the root
    position: int  # among the members
    sends: bool
    lands: bool  # this member ends with the writes
    dense: tuple[Dense, ...] = ()
    rows: tuple[Array, ...] = ()  # in host memory, unless it is alone; empty for a member that does not send
    counts: tuple[int, ...] = ()  # rows to every member, where the kind reads counts
    hosts: tuple[tuple[int, ...], ...] = ()  # of a sum by levels: the members, host by host

    @property
    def is_root(self) -> bool:
        """Tell whether this member is the group's first."""
        return self.position == 0

    def moves(self) -> Iterator[tuple[int, int, Index | None, Index | None]]:
        """Yield the moves of an exchange that concern this member.

        (source, target, where it lies in what this member has, where in what it wants), as far as it does.
        """
        exchange, own = self.start.exchange, self.position
        assert exchange is not None, "an exchange tells who has what"
        has, wants = exchange.has[own], exchange.wants[own]
        for move in exchange.moves:
            if own in (move.source, move.target):
                out = place_in(has, move.region) if move.source == own and has is not None else None
                into = place_in(wants, move.region) if move.target == own and wants is not None else None
                yield move.source, move.target, out, into

    @property
    def sent_bytes(self) -> int:
        """Return what an exchange makes this member send to others."""
        (dense,) = self.dense
        pieces = (out for source, target, out, _ in self.moves() if out is not None and source != target)
        return sum(dense.source[piece].nbytes for piece in pieces)

    @property
    def received_bytes(self) -> int:
        """Return what an exchange makes this member receive of others."""
        (dense,) = self.dense
        pieces = (into for source, target, _, into in self.moves() if into is not None and source != target)
        return sum(dense.target[piece].nbytes for piece in pieces)

    @property
    def shifts_to(self) -> int | None:
        """Return the position that a shift's value goes to, None at the end."""
        return self._neighbour(SHIFTS[self.start.kind])

    @property
    def shifts_from(self) -> int | None:
        """Return the position that a shift brings a value from, None at the end."""
        return self._neighbour(-SHIFTS[self.start.kind])

    def _neighbour(self, distance: int) -> int | None:
        place = self.position + distance
        return place if 0 <= place < len(self.members) else None


def part_of(
    start: Start,
    rank: Rank,
    members: tuple[int, ...],
    environment: Environment,
    hosts: tuple[tuple[int, ...], ...] = (),
) -> Part:
    """Collect what `rank` supplies to the communication `start` among `members` from its environment.

    `hosts`: the members, host by host.
    """
    position = members.index(rank.rank)
    sends, lands = sends_at(start, rank, members[0]), lands_at(start, rank, members[0])
    if start.kind not in ROW_KINDS:
        resolver = _DenseResolver(start, environment, len(members), position, sends)
        dense = tuple(resolver.resolve(*pair) for pair in zip(start.reads, start.writes, strict=True))
        levels = hosts if start.by_levels else ()
        return Part(start, members, position, sends, lands, dense=dense, hosts=levels)
    if not sends:
        return Part(start, members, position, sends, lands)
    rows, counts = _rows_of(start, environment, len(members))
    return Part(start, members, position, sends, lands, rows=rows, counts=counts)


def stays_the_same(part: Part, environment: Environment) -> bool:
    """Tell whether every step's part is this one: results replace what is sent, in fixed memory."""
    start = part.start
    return (
        part.sends
        and bool(part.dense)
        and start.reads == start.writes
        and all(dense.is_placed for dense in part.dense)
        and all(environment.memory(name) is not None for name in start.reads)
    )


@dataclass(frozen=True, slots=True)
class _DenseResolver:
    """Finds the memory of dense values."""

    start: Start
    environment: Environment
    size: int
    position: int
    sends: bool

    @property
    def _arrays(self) -> DeviceArrays:
        return self.environment.arrays

    def _held(self, read: str) -> Array:
        return self._arrays.contiguous(self.environment.held(read))

    def resolve(self, read: str, write: str) -> Dense:
        match self.start.kind:
            case "all_reduce":
                return self._in_place(read, write)
            case "reduce":
                return self._in_place(read, write) if self.position == 0 else self._supplied_only(read, write)
            case "broadcast":
                return self._broadcast(read, write)
            case "reduce_scatter":
                return self._reduce_scatter(read, write)
            case "shift_ahead" | "shift_back":
                return self._shift(read, write)
            case "exchange":
                return self._exchange(read)
            case _:
                return self._all_gather(read, write)

    def _in_place(self, read: str, write: str) -> Dense:
        target = self._memory_for(write, read)
        if self.sends:
            source = self.environment.held(read)
            self._check_size(read, source.size, target.size)
            if self._arrays.address(source) != self._arrays.address(target):
                self._arrays.copy(target, source.reshape(target.shape))
        else:
            target.fill(_neutral(self.start.reduction, target.dtype))
        return Dense(target, target, self._is_placed(write))

    def _supplied_only(self, read: str, write: str) -> Dense:
        if self.sends:
            source = self._held(read)
        else:
            source = self._scratch(read, write)
            source.fill(_neutral(self.start.reduction, source.dtype))
        return Dense(source, source)

    def _broadcast(self, read: str, write: str) -> Dense:
        if self.position == 0:
            source = self._held(read)
            return Dense(source, source, read == write)
        target = self._memory_for(write, read)
        return Dense(target, target, self._is_placed(write))

    def _shift(self, read: str, write: str) -> Dense:
        source = self._supplied_only(read, write).source
        target = self._memory_for(write, read)
        self._check_size(write, target.size, source.size)
        return Dense(source, target, self._is_placed(write))

    def _exchange(self, read: str) -> Dense:
        exchange = self.start.exchange
        assert exchange is not None, "an exchange tells who has what"
        dtype = np.dtype(exchange.dtype)
        has, wants = exchange.has[self.position], exchange.wants[self.position]
        source, target = self._arrays.empty(0, dtype), self._arrays.empty(0, dtype)
        if has is not None:
            source = self._held(read).reshape(shape_of(has))
        if wants is not None:
            target = self._arrays.empty(shape_of(wants), dtype)
        return Dense(source, target, is_placed=False)

    def _reduce_scatter(self, read: str, write: str) -> Dense:
        whole = self._supplied_only_in_place(read, write)
        self._check_size(read, whole.size, sum(self.start.counts))
        region = self._region(whole) if read == write else self._region_memory(write, whole.dtype)
        return Dense(whole, region, self._is_placed(write))

    def _supplied_only_in_place(self, read: str, write: str) -> Array:
        whole = self.environment.memory(read)
        if self.sends or whole is None:
            return self._supplied_only(read, write).source
        whole.fill(_neutral(self.start.reduction, whole.dtype))
        return whole

    def _region_memory(self, write: str, dtype: np.dtype[Any]) -> Array:
        memory = self.environment.memory(write)
        own = self.start.counts[self.position]
        if memory is None:
            return self._arrays.empty(own, dtype)
        return memory if memory.size == own else self._region(memory)

    def _all_gather(self, read: str, write: str) -> Dense:
        own = self.start.counts[self.position]
        whole = self._memory_for(write, read, elements=sum(self.start.counts))
        self._check_size(write, whole.size, sum(self.start.counts))
        if read == write:
            source = self._region(whole)
        elif self.sends:
            source = self._held(read)
            source = source if source.size == own else self._region(source)
        else:
            source = self._arrays.zeros(own, whole.dtype)
        return Dense(source, whole, self._is_placed(write))

    def _region(self, whole: Array) -> Array:
        """Return this member's elements of a whole."""
        first = sum(self.start.counts[: self.position])
        self._check_size("counts", whole.size, sum(self.start.counts))
        return whole.reshape(-1)[first : first + self.start.counts[self.position]]

    def _memory_for(self, write: str, read: str, elements: int | None = None) -> Array:
        """Return the memory where a result lands: the value's own, else new, shaped as planned."""
        memory = self.environment.memory(write)
        return self._scratch(read, write, elements) if memory is None else memory

    def _scratch(self, read: str, write: str, elements: int | None = None) -> Array:
        if self.sends:
            source = self.environment.held(read)
            return self._arrays.empty(source.shape if elements is None else elements, source.dtype)
        declared = self.environment.declared(write) or self.environment.declared(read)
        if declared is None:
            raise _misfit(self.start, f"the size of {write!r} is not known here", "place it in a buffer")
        return self._arrays.empty(declared[0] if elements is None else elements, declared[1])

    def _is_placed(self, write: str) -> bool:
        return self.environment.memory(write) is not None

    def _check_size(self, name: str, actual: int, expected: int) -> None:
        if actual != expected:
            raise _misfit(self.start, f"{name!r} has {actual} elements, {expected} were planned")


def _rows_of(start: Start, environment: Environment, size: int) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    names: Sequence[str] = start.reads
    counts: tuple[int, ...] = ()
    if start.kind in _READS_COUNTS:
        names = start.reads[:-1]
        counts = tuple(int(count) for count in environment.array(start.reads[-1]).reshape(-1))
    arrays = environment.arrays
    rows = tuple(arrays.contiguous(environment.held(name)) for name in names)
    if size > 1:
        rows = tuple(map(arrays.in_host_memory, rows))
    lengths = {array.shape[0] for array in rows}
    if len(lengths) != 1:
        raise _misfit(start, f"values of unequal leading sizes {sorted(lengths)} travel together")
    length = lengths.pop()
    if counts and (len(counts) != size or min(counts) < 0 or sum(counts) != length):
        what = f"counts {list(counts)} do not cut {length} rows among {size} members"
        raise _misfit(start, what, fix=_STRAY_IDS)
    return rows, counts


# Rows are cut by the servers that own them: an id that no table has belongs to none.
_STRAY_IDS = "keep every id in the data below the rows of its table; if they are, compile the model again"


def _neutral(reduction: str, dtype: np.dtype[Any]) -> float:
    if reduction == "sum":
        return 0
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    return float(limits.min if reduction == "max" else limits.max)


def _misfit(start: Start, what: str, fix: str = "compile the model again") -> BadPlan:
    return BadPlan(what, at=f"communication {start.tag_id} ({start.label or start.kind})", fix=fix)
