"""The task graph of a step whose operator groups each have devices of their own (flexflow.txt, section 5.1).

What the step consists of is in blocks (step_blocks.py). They are looked up in compiled code (flat_blocks.py)
by what they are written by, so that blocks of alike groups with equal configurations are written once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from partc.compiler.task_graphs.block_templates import BlockNumbers, BlockTemplates, PlacedGroups, scratch_of
from partc.compiler.task_graphs.flat_blocks import (
    COMPUTING,
    DUE,
    KEYS_FULL,
    LINKS_FULL,
    LOW_BITS,
    TRANSFER,
    Now,
    find_templates,
)
from partc.compiler.task_graphs.group_tasks import Readers, write_computing, write_transfer
from partc.compiler.task_graphs.key_table import Keys, no_keys, with_room
from partc.compiler.task_graphs.mesh_places import MeshPlace
from partc.compiler.task_graphs.step_blocks import BlockList, StepBlock, UpdateBlock
from partc.compiler.task_graphs.task_blocks import PlacedGroup, TaskBlock
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.cost.simulation.task_arrays import NONE, FlatGraph, Floats, Ints
from partc.cost.simulation.task_graph import TaskGraph, compile_simulation
from partc.passes.search.operators.group_layouts import GroupLayouts
from partc.passes.search.operators.grouped_step import GroupedStep
from partc.passes.search.operators.operator_space import OperatorConfig

# Beyond these, all is forgotten, and what is there written anew.
MOST_TEMPLATES, MOST_LINKED = 50_000, 20_000_000


@dataclass(frozen=True, slots=True)
class _Before:
    """How groups were placed, and what blocks had, before a move."""

    placing: Ints
    template: Ints
    graph: FlatGraph


class StepTasks:
    """The task graph of a step, for one configuration of every group at a time."""

    _now: Now
    _keys: Keys
    _templates: BlockTemplates

    def __init__(
        self,
        step: GroupedStep,
        prices: TaskPrices,
        bucket_bytes: int,
        graph: type[TaskGraph] = TaskGraph,
    ) -> None:
        self.step = step
        self.prices = prices
        self._layouts = GroupLayouts(step)
        self._known: dict[tuple[int, OperatorConfig], PlacedGroup | None] = {}  # by likeness of groups
        self._likeness = [self._layouts.likeness(number) for number in range(len(step.groups))]
        listed = BlockList(step, self._layouts, prices, bucket_bytes)
        self._blocks, self._moves = listed.blocks, listed.moves
        self._following: list[list[int]] = [[] for _ in step.groups]  # group -> the blocks written by it
        for number, block in enumerate(self._blocks):
            for group in dict.fromkeys(block.groups):
                self._following[group].append(number)
        self._numbers = BlockNumbers(self._blocks)
        self._placed = PlacedGroups(self._numbers)
        sources = [block.sources for block in self._blocks]
        self.graph = graph(sources, prices.resources, prices.launching(0), listed.order)
        self._scratch = scratch_of(self._blocks, self._numbers.flat.longest, 1 << 10)
        self._forget()
        self._before: _Before | None = None

    # ------------------------------------------------------------ configurations

    def begin(self, configs: Sequence[OperatorConfig]) -> float | None:
        """Build the graph anew; return the seconds of a step, None where a group cannot be divided so."""
        placed = self._numbers_of(dict(enumerate(configs)))
        if placed is None:
            return None
        self._now.placing[:] = [placed[number] for number in range(len(configs))]
        self._forget_if_full()
        self._rewrite(range(len(self._blocks)))
        return self.graph.full()

    def move(self, changes: Mapping[int, OperatorConfig], limit_s: float = float("inf")) -> float | None:
        """Configure some groups otherwise; return the seconds of a step, infinity where above the limit.

        None where a group cannot be divided so, or variables take more memory than a worker has: then
        nothing is changed. Otherwise `undo` takes it back.
        """
        placed = self._numbers_of(changes)
        if placed is None:
            return None
        self._forget_if_full()
        before = _Before(self._now.placing.copy(), self._now.template.copy(), self.graph.now)
        for number, placing in placed.items():
            self._now.placing[number] = placing
        self._rewrite({block for number in placed for block in self._following[number]})
        self._before = before
        if self.exceeds_memory:
            self.undo()
            return None
        return self.graph.delta(limit_s)

    def undo(self) -> None:
        """Take the last move back."""
        assert self._before is not None, "a move"
        self._now.placing[:], self._now.template[:] = self._before.placing, self._before.template
        self._before = None
        self.graph.undo()

    @property
    def blocks(self) -> Sequence[StepBlock]:
        """Return the blocks that the graph consists of, each behind those that it waits for."""
        return self._blocks

    def placed(self, number: int, config: OperatorConfig) -> PlacedGroup | None:
        """Return how a configuration divides and places a group, None where it cannot be divided so."""
        return self._place(number, config)

    @property
    def exceeds_memory(self) -> bool:
        """Tell whether variables alone take more memory than a worker has: no plan of this state fits."""
        return bool((self.kept_bytes > self.prices.limits_bytes).any())

    @property
    def kept_bytes(self) -> Floats:
        """Return what variables take on each worker at the least, float64[workers]."""
        memory = np.zeros(len(self.prices.workers))
        for block in self._present(self._numbers.buckets):
            assert block.memory is not None, "an update"
            memory += block.memory
        return memory

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that workers send each other in a step."""
        return sum(block.sent for block in self._present())

    @property
    def computing_s(self) -> float:
        """Return the seconds that all workers compute together in a step."""
        last = len(self.prices.workers)
        return float(sum(b.seconds[b.resources < last].clip(0.0).sum() for b in self._present()))

    def _present(self, numbers: Sequence[int] | slice = slice(None)) -> Iterable[TaskBlock]:
        blocks = (self._templates.each[number] for number in self._now.template[numbers].tolist())
        return (block for block in blocks if block is not None)

    def _numbers_of(self, configs: Mapping[int, OperatorConfig]) -> dict[int, int] | None:
        """Return the number of each group's placing, None where one cannot be divided so."""
        numbers = {}
        for group, config in configs.items():
            placed = self._place(group, config)
            if placed is None:
                return None
            numbers[group] = self._placed.number(placed)
        return numbers

    def _place(self, number: int, config: OperatorConfig) -> PlacedGroup | None:
        key = self._likeness[number], config
        if key not in self._known:
            layout = self._layouts(number, config.split)
            self._known[key] = None
            if layout is not None:
                self._known[key] = PlacedGroup(layout, MeshPlace.of(layout.mesh.axes, config.workers))
        return self._known[key]

    # ------------------------------------------------------------ blocks

    def _rewrite(self, numbers: Iterable[int]) -> None:
        """Write blocks anew, and those that see other results then."""
        now, former = self._now, self.graph.now
        self.graph.now = FlatGraph(former.content.copy(), former.link.copy())
        now.is_due[list(numbers)] = DUE
        is_changed = np.zeros_like(now.is_changed)
        now = now._replace(is_changed=is_changed)
        while missing := self._find_templates(now):
            if missing == KEYS_FULL:
                self._keys = with_room(self._keys, self._numbers.flat.longest)
            elif missing == LINKS_FULL:
                self._make_room()
            else:
                for key in self._scratch.missing[:missing].tolist():
                    self._keys.value[key] = self._templates.add(self._write(key))
        self.graph.change(former, is_changed)

    def _find_templates(self, now: Now) -> int:
        flat = self._numbers.flat, self._placed.flat, self._templates.flat, self._keys
        return find_templates(*flat, self.graph.links, self.graph.waiting, now, self.graph.now, self._scratch)

    def _write(self, key: int) -> TaskBlock:
        """Write what a key is of, as flat_blocks.py makes them."""
        begin, end = self._keys.begin[key : key + 2]
        kind, first, *rest = self._keys.part[begin:end].tolist()
        if kind == COMPUTING:
            way, has_gates, low, high, *summed = rest
            placed, cut = self._placed.numbers.each[first], low | high << LOW_BITS
            known = self._numbers.ways.each[way], bool(has_gates), cut, self._readers(summed)
            return write_computing(self.prices, placed, *known)
        if kind == TRANSFER:
            tensor, is_made = self._numbers.tensors.each[first]
            here, *targets = (self._placed.wheres.each[where] for where in rest)
            return write_transfer(self._moves, tensor, here, is_made, targets)
        block = self._blocks[self._numbers.buckets[first]]
        assert isinstance(block, UpdateBlock)
        placed_groups = (self._placed.numbers.each[number] for number in rest)
        return block.write(dict(zip(block.groups, placed_groups, strict=True)))

    def _readers(self, summed: Sequence[int]) -> Readers:
        """Return how each tensor that is summed for its readers is wanted, as flat_blocks.py tells it."""
        begins = [place for place, number in enumerate(summed) if number == NONE]
        readers = {}
        for begin, end in pairwise((*begins, len(summed))):
            column, _, *wanted = summed[begin + 1 : end]
            tensor, _ = self._numbers.has.each[column]
            readers[tensor] = tuple(self._placed.wheres.each[where] for where in wanted)
        return readers

    def _make_room(self) -> None:
        """Have twice the room for links."""
        rows, used = 2 * len(self._scratch.source), self.graph.links.used
        self._scratch = scratch_of(self._blocks, self._numbers.flat.longest, rows)
        self.graph.have_room(int(used[1]) + rows, int(used[2]) + rows)

    def _forget_if_full(self) -> None:
        used = self.graph.links.used
        if len(self._templates.each) > MOST_TEMPLATES or used[1] + used[2] > MOST_LINKED:
            placing = self._now.placing
            self._forget()
            self._now.placing[:] = placing
            self._rewrite(range(len(self._blocks)))

    def _forget(self) -> None:
        """Forget all blocks, and have none."""
        self.graph.forget()
        self._templates = BlockTemplates(self.graph, self._placed.wheres, len(self.prices.workers))
        self._keys = no_keys()
        groups, blocks = len(self.step.groups), len(self._blocks)
        self._now = Now(*(np.zeros(size, np.int32) for size in (groups, blocks, blocks, blocks)))


def compile_kernels() -> None:
    """Compile all that task graphs call, if this process has not done so: it takes some seconds."""
    compile_simulation()
    numbers, graph, nothing = BlockNumbers([]), TaskGraph([], 1), np.zeros(0, np.int32)
    placed = PlacedGroups(numbers)
    templates, scratch = BlockTemplates(graph, placed.wheres, 1), scratch_of([], numbers.flat.longest, 1)
    flat = numbers.flat, placed.flat, templates.flat, with_room(no_keys(), 1)
    now = Now(nothing, nothing, nothing, nothing)
    find_templates(*flat, graph.links, graph.waiting, now, graph.now, scratch)
