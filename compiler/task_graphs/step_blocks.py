"""The blocks that a step's task graph consists of: what each is written by, and how.

    computing  what a group does on one way
    transfer   a tensor, from the group that has it to those that want it on other devices, or other parts
    update     a bucket of parameters

A block is written by how its `groups` are placed, and by what transfers send it, of its `sources`: the blocks
that it waits for, all before it, in slots 0, 1, ... (flat_blocks.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from partc.compiler.task_graphs.computing_order import (
    Computing,
    buckets_of,
    computing_order,
    sums_first_order,
)
from partc.compiler.task_graphs.gradient_tasks import GradientTerm, UpdatedParameter, UpdateWriter
from partc.compiler.task_graphs.group_tasks import Readers, write_computing, write_transfer
from partc.compiler.task_graphs.mesh_places import Where
from partc.compiler.task_graphs.task_blocks import PlacedGroup, TaskBlock
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.compiler.task_graphs.tensor_moves import SentTensor, TensorMoves
from partc.cost.simulation.task_arrays import Ints
from partc.passes.layouts.layouts import Layout
from partc.passes.search.operators.group_layouts import GroupLayouts
from partc.passes.search.operators.grouped_step import GroupedStep, PassLevel


class StepBlock(Protocol):
    """A block of the step."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Return the groups by whose configurations it is written."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Return the blocks that it waits for, by slot."""


@dataclass(frozen=True, slots=True)
class ReadTensor:
    """A tensor that a group reads: its number there, and the slots of what sends it and of what makes it."""

    place: int
    transfer: int | None
    maker: int | None


@dataclass(frozen=True, slots=True)
class ComputingBlock:
    """What a group does on one way.

    results  the blocks that send what it makes
    readers  the groups that read that
    """

    prices: TaskPrices
    group: int
    way: PassLevel
    reads: tuple[ReadTensor, ...]
    results: tuple[int, ...]
    readers: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """Return the group, and those for which it sums what they read."""
        return (self.group, *self.readers)

    def write(self, placed: PlacedGroup, has_gates: bool, cut_bytes: int, readers: Readers) -> TaskBlock:
        """Return a task on each worker, and the collectives behind them, as write_computing does."""
        return write_computing(self.prices, placed, self.way, has_gates, cut_bytes, readers)


@dataclass(frozen=True, slots=True)
class TransferBlock:
    """A tensor that goes from the group that makes or keeps it to all that read it.

    place  its number in that group
    reads  its number in each group that reads it, and on which way
    """

    moves: TensorMoves
    tensor: SentTensor
    place: int
    reads: tuple[tuple[int, PassLevel], ...]
    groups: tuple[int, ...]  # the one that has it, then those that read it
    sources: tuple[int, ...]

    @property
    def is_made(self) -> bool:
        """Tell whether the tensor is made in the step, not kept."""
        return bool(self.sources)

    def write(self, here: Where, targets: Sequence[Where]) -> TaskBlock:
        """Return the messages that bring it from how it is there to how else it is wanted."""
        return write_transfer(self.moves, self.tensor, here, self.is_made, targets)


@dataclass(frozen=True, slots=True)
class TermOf:
    """A term of a gradient: its name, its number in the group that makes it, and that block's slot."""

    name: str
    place: int
    group: int
    slot: int


@dataclass(frozen=True, slots=True)
class ParameterOf:
    """A parameter: its name, its number in the group that keeps it, and the terms of its gradient."""

    name: str
    place: int
    home: int
    terms: tuple[TermOf, ...]


@dataclass(frozen=True, slots=True)
class UpdateBlock:
    """A bucket of parameters: their gradients' sums, on their way home, and their updates."""

    writer: UpdateWriter
    bucket: int
    parameters: tuple[ParameterOf, ...]
    groups: tuple[int, ...]
    sources: tuple[int, ...]

    def write(self, placed: Mapping[int, PlacedGroup]) -> TaskBlock:
        """Return the sums, the messages and the updates. `placed`: of the groups of its parameters."""
        updates = []
        for parameter in self.parameters:
            home = placed[parameter.home]
            layout = home.layout.homes.get(parameter.place, Layout(""))  # whole where it is only kept
            terms = []
            for term in parameter.terms:
                own = placed[term.group]
                terms.append(GradientTerm(term.name, own.layout.has[term.place], own, term.slot))
            updates.append(UpdatedParameter(parameter.name, layout, home, tuple(terms)))
        return self.writer.write(updates)


# ---------------------------------------------------------------- what blocks there are


class BlockList:
    """The blocks of a step, each behind those that it waits for.

    order  of all blocks, in which workers may compute and send: int32[blocks]
    """

    def __init__(
        self, step: GroupedStep, layouts: GroupLayouts, prices: TaskPrices, bucket_bytes: int
    ) -> None:
        self.blocks: list[StepBlock] = []
        self._step, self._layouts, self._prices = step, layouts, prices
        self._computing: dict[Computing, int] = {}
        self._transfer: dict[str, int] = {}
        self.moves = TensorMoves(prices)
        results: dict[Computing, list[str]] = {}
        for tensor in step.readers:
            if tensor in step.maker:
                results.setdefault(step.maker[tensor], []).append(tensor)
            else:
                self._add_transfer(tensor)
        order = computing_order(step)
        for computing in order:
            own = results.get(computing, [])
            self._add_computing(*computing, own)
            for tensor in own:
                self._add_transfer(tensor)
        turns = sums_first_order(step, order, layouts, prices)
        writer = UpdateWriter(step, self.moves)
        for bucket, parameters in enumerate(buckets_of(step, turns, bucket_bytes)):
            self._add_update(writer, bucket, parameters)
        self.order = self._in_turn(turns)

    def _in_turn(self, turns: Sequence[Computing]) -> Ints:
        """Return all blocks, by turn; what is sent or summed follows the last that it waits for."""
        turn_of = {self._computing[computing]: turn for turn, computing in enumerate(turns)}
        turn: list[int] = []
        for number, block in enumerate(self.blocks):
            before = max((turn_of[source] for source in block.sources if source in turn_of), default=-1)
            turn.append(turn_of.get(number, before))
        return np.argsort(turn, kind="stable").astype(np.int32)

    def _add_computing(self, group: int, way: PassLevel, results: Sequence[str]) -> None:
        slots: dict[int, int] = {}  # block -> slot
        reads = []
        for tensor in _reads(self._step, group, way):
            transfer, maker = self._transfer.get(tensor), self._maker(tensor)
            for block in (transfer, maker):
                if block is not None:
                    slots.setdefault(block, len(slots))
            place = self._layouts.place(group, tensor)
            reads.append(ReadTensor(place, *(None if b is None else slots[b] for b in (transfer, maker))))
        number = self._computing[group, way] = len(self.blocks)
        sends = tuple(range(number + 1, number + 1 + len(results)))
        readers = tuple(dict.fromkeys(group for tensor in results for group, _ in self._step.readers[tensor]))
        own = ComputingBlock(self._prices, group, way, tuple(reads), sends, readers, tuple(slots))
        self.blocks.append(own)

    def _maker(self, tensor: str) -> int | None:
        maker = self._step.maker.get(tensor)
        return None if maker is None else self._computing[maker]

    def _add_transfer(self, tensor: str) -> None:
        step, maker = self._step, self._maker(tensor)
        facts, readers = step.analysis.facts, step.readers[tensor]
        source = step.homes[tensor] if maker is None else step.maker[tensor][0]
        known = SentTensor.of(facts.shape(tensor), facts.dtypes[tensor].itemsize)
        place = self._layouts.place(source, tensor)
        reads = tuple((self._layouts.place(group, tensor), way) for group, way in readers)
        groups = (source, *(group for group, _ in readers))
        self._transfer[tensor] = len(self.blocks)
        sources = () if maker is None else (maker,)
        self.blocks.append(TransferBlock(self.moves, known, place, reads, groups, sources))

    def _add_update(self, writer: UpdateWriter, bucket: int, parameters: Sequence[str]) -> None:
        step = self._step
        slots: dict[int, int] = {}
        groups: dict[int, None] = {}
        of_parameters = []
        for parameter in parameters:
            home = step.homes.get(parameter, 0)
            groups[home] = None
            terms = []
            for term in filter(step.maker.__contains__, step.terms[parameter]):
                group, _ = maker = step.maker[term]
                groups[group] = None
                slot = slots.setdefault(self._computing[maker], len(slots))
                terms.append(TermOf(term, self._layouts.place(group, term), group, slot))
            place = self._layouts.place(home, parameter)
            of_parameters.append(ParameterOf(parameter, place, home, tuple(terms)))
        self.blocks.append(UpdateBlock(writer, bucket, tuple(of_parameters), tuple(groups), tuple(slots)))


def _reads(step: GroupedStep, number: int, way: PassLevel) -> list[str]:
    """Return what a group reads on one way that it does not make on it, in order."""
    nodes = step.groups[number].nodes[way]
    results = {tensor.name for node in nodes for tensor in node.outputs}
    return list(dict.fromkeys(t.name for n in nodes for t in n.inputs if t.name and t.name not in results))
