"""The arrays by which compiled code (flat_blocks.py) looks blocks up, and what Python adds to them."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from partc.compiler.task_graphs.flat_blocks import (
    COMPUTING,
    TRANSFER,
    UPDATE,
    FlatBlocks,
    Placings,
    Scratch,
    Templates,
)
from partc.compiler.task_graphs.mesh_places import Where
from partc.compiler.task_graphs.step_blocks import ComputingBlock, StepBlock, TransferBlock, UpdateBlock
from partc.compiler.task_graphs.task_blocks import PlacedGroup, TaskBlock
from partc.compiler.task_graphs.tensor_moves import SentTensor
from partc.cost.simulation.task_arrays import NONE, Ints
from partc.cost.simulation.task_graph import TaskGraph
from partc.passes.layouts.layouts import Layout
from partc.passes.search.operators.group_layouts import plain
from partc.passes.search.operators.grouped_step import PassLevel

AnyHashable = TypeVar("AnyHashable", bound=Hashable)


class Numbering(Generic[AnyHashable]):
    """Numbers of things, from 0 on as they come."""

    def __init__(self) -> None:
        self.each: list[AnyHashable] = []
        self._numbers: dict[AnyHashable, int] = {}

    def of(self, thing: AnyHashable) -> int:
        """Return the number of a thing."""
        number = self._numbers.setdefault(thing, len(self.each))
        if number == len(self.each):
            self.each.append(thing)
        return number

    def has(self, thing: AnyHashable) -> bool:
        """Tell whether it has a number."""
        return thing in self._numbers


class GrowingArray:
    """An array that grows at its end. `values` has room beyond its `used` rows."""

    def __init__(self, dtype: type, *rest: int) -> None:
        self.values: NDArray[Any] = np.zeros((16, *rest), dtype)
        self.used = 0

    def add(self, rows: NDArray[Any] | Sequence[Any]) -> int:
        """Add rows; return where they begin."""
        begin, self.used = self.used, self.used + len(rows)
        if self.used > len(self.values):
            larger = np.zeros((2 * self.used, *self.values.shape[1:]), self.values.dtype)
            larger[:begin] = self.values[:begin]
            self.values = larger
        self.values[begin : self.used] = rows
        return begin


class BlockNumbers:
    """A step's blocks in numbers: of ways, tensors and whether these are made, buckets, and columns."""

    def __init__(self, blocks: Sequence[StepBlock]) -> None:
        self.ways: Numbering[PassLevel] = Numbering()
        self.tensors: Numbering[tuple[SentTensor, bool]] = Numbering()
        self.buckets: list[int] = []  # blocks
        self.has: Numbering[tuple[int, bool]] = Numbering()
        self.wants: Numbering[tuple[int, PassLevel]] = Numbering()
        rows = [self._row(number, block) for number, block in enumerate(blocks)]
        reads = [read for *_, own in rows for read in own]
        results = [block.results if isinstance(block, ComputingBlock) else () for block in blocks]
        self.flat = FlatBlocks._make(
            (
                *(np.array([row[column] for row in rows], np.int32) for column in range(2)),
                _bounds([block.groups for block in blocks]),
                _flat(block.groups for block in blocks),
                _bounds([row[2] for row in rows]),
                *(np.array([read[column] for read in reads], np.int32) for column in range(3)),
                _bounds(results),
                _flat(results),
                6 + max(map(_longest, blocks), default=0),
            )
        )

    def _row(self, number: int, block: StepBlock) -> tuple[int, int, list[tuple[int, int, int]]]:
        """Return a block's kind, its number of that kind, and its reads: column, transfer, maker."""
        if isinstance(block, ComputingBlock):
            reads = [
                (
                    self.wants.of((read.place, block.way)),
                    ABSENT if read.transfer is None else read.transfer,
                    ABSENT if read.maker is None else read.maker,
                )
                for read in block.reads
            ]
            return COMPUTING, self.ways.of(block.way), reads
        if isinstance(block, TransferBlock):
            columns = [self.has.of((block.place, block.is_made)), *map(self.wants.of, block.reads)]
            which = self.tensors.of((block.tensor, block.is_made))
            return TRANSFER, which, [(column, ABSENT, ABSENT) for column in columns]
        assert isinstance(block, UpdateBlock)
        self.buckets.append(number)
        return UPDATE, len(self.buckets) - 1, []


ABSENT = int(NONE)
WANTED = 8  # ways in which a group reads a tensor, at the most


class PlacedGroups:
    """The groups that were placed so far, and how they have and want tensors."""

    def __init__(self, blocks: BlockNumbers) -> None:
        self.numbers: Numbering[PlacedGroup] = Numbering()
        self.wheres: Numbering[Where] = Numbering()
        self._blocks = blocks
        self._has, self._has_terms, self._begin, self._end = (
            GrowingArray(np.int32, max(1, len(columns.each)))
            for columns in (blocks.has, blocks.has, blocks.wants, blocks.wants)
        )
        self._wants = GrowingArray(np.int32)

    def number(self, placed: PlacedGroup) -> int:
        """Return the number of a placed group."""
        if not self.numbers.has(placed):
            self._add(placed)
        return self.numbers.of(placed)

    def _add(self, placed: PlacedGroup) -> None:
        layout, columns = placed.layout, self._blocks
        whole = self.wheres.of(Where.of(placed.place, plain(Layout(""))))
        every = self._has, self._has_terms, self._begin, self._end
        has, has_terms, begin, end = (np.zeros(rows.values.shape[1], np.int32) for rows in every)
        has[:] = whole
        for column in (*((n, True) for n in layout.has), *((n, False) for n in layout.homes)):
            if columns.has.has(column):
                has[columns.has.of(column)] = self.wheres.of(placed.has(*column))
        for column in ((tensor, True) for tensor in layout.has_terms):
            if columns.has.has(column):
                has_terms[columns.has.of(column)] = 1
        for read in filter(columns.wants.has, layout.wants):
            wanted = [self.wheres.of(where) for where in placed.wants(read)]
            assert len(wanted) <= WANTED, "room in keys"
            number = columns.wants.of(read)
            begin[number] = self._wants.add(wanted)
            end[number] = begin[number] + len(wanted)
        for rows, values in zip(every, (has, has_terms, begin, end), strict=True):
            rows.add([values])

    @property
    def flat(self) -> Placings:
        """Return the arrays."""
        every = self._has, self._has_terms, self._begin, self._end, self._wants
        return Placings(*(rows.values for rows in every))


class BlockTemplates:
    """The templates so far. Number 0 has no tasks."""

    def __init__(self, graph: TaskGraph, wheres: Numbering[Where], workers: int) -> None:
        self.each: list[TaskBlock | None] = [None]
        self._graph, self._wheres = graph, wheres
        self._outcomes: Numbering[object] = Numbering()
        self._outcomes.of(())
        self._lists: Numbering[bytes] = Numbering()
        self._last_tasks: Numbering[bytes] = Numbering()
        self._columns = [GrowingArray(np.int32) for _ in range(7)]
        for rows in self._columns:
            rows.add([0])
        self._list, self._worker, self._task = (GrowingArray(np.int32) for _ in range(3))
        self._list_begin = GrowingArray(np.int32)
        self._list_begin.add([0])
        self._gates = GrowingArray(np.int32), GrowingArray(np.int32), GrowingArray(np.int64)
        self._last = GrowingArray(np.int32, workers)

    def add(self, block: TaskBlock) -> int:
        """Return the number of a new template."""
        gates = [
            (self._wheres.of(where), block.gates.get(where, ABSENT), block.cuts.get(where, 0))
            for where in dict.fromkeys((*block.gates, *block.cuts))
        ]
        last = 0 if block.last_tasks is None else self._row(block.last_tasks)
        outcome: object = tuple(gates) if block.last_tasks is None else last
        fields = (
            self._graph.add_content(block.parts, block.resources, block.seconds, block.pairs),
            self._outcomes.of(outcome),
            last,
            self._list.add([self._list_number(rows) for rows in block.awaited]),
            len(block.awaited),
            self._add_gates(gates),
            len(gates),
        )
        for rows, value in zip(self._columns, fields, strict=True):
            rows.add([value])
        self.each.append(block)
        return len(self.each) - 1

    def _row(self, last_tasks: Ints) -> int:
        key = last_tasks.tobytes()
        if not self._last_tasks.has(key):
            self._last.add([last_tasks])
        return self._last_tasks.of(key)

    def _list_number(self, rows: Ints) -> int:
        key = rows.tobytes()
        if not self._lists.has(key):
            self._worker.add(rows[:, 0])
            self._list_begin.add([self._task.add(rows[:, 1]) + len(rows)])
        return self._lists.of(key)

    def _add_gates(self, gates: Sequence[tuple[int, int, int]]) -> int:
        begin = self._gates[0].used
        for column, rows in enumerate(self._gates):
            rows.add([gate[column] for gate in gates])
        return begin

    @property
    def flat(self) -> Templates:
        """Return the arrays."""
        rows = (
            *self._columns,
            self._list,
            self._list_begin,
            self._worker,
            self._task,
            *self._gates,
            self._last,
        )
        return Templates(*(each.values for each in rows))


def scratch_of(blocks: Sequence[StepBlock], longest: int, rows: int) -> Scratch:
    """Return room to work in. `longest`: of keys; `rows`: of links."""
    slots = max((len(block.sources) for block in blocks), default=0) + 1
    sizes = longest, longest, longest, longest, rows, rows, slots, len(blocks)
    return Scratch(*(np.zeros(size, np.int32) for size in sizes))


def _longest(block: StepBlock) -> int:
    """Return how many numbers of a key tell how tensors are and are wanted, at the most."""
    tensors = len(block.results) if isinstance(block, ComputingBlock) else 1
    return tensors * (3 + len(block.groups) * WANTED)


def _flat(each: Iterable[Sequence[int]]) -> Ints:
    return np.array([value for own in each for value in own], np.int32)


def _bounds(each: Sequence[Sequence[object]]) -> Ints:
    return np.cumsum([0, *map(len, each)], dtype=np.int32)
