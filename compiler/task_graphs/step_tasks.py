"""The task graph of a step whose operator groups each have devices of their own (flexflow.txt, section 5.1).

What the step consists of is in blocks (step_blocks.py). Blocks of alike groups with equal configurations are
written once.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter

import numpy as np

from partc.compiler.task_graphs.step_blocks import BlockList, Present, StepBlock, WrittenBlock
from partc.compiler.task_graphs.task_blocks import PlacedGroup
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.compiler.task_graphs.tensor_moves import MeshPlace
from partc.cost.simulation.task_arrays import Floats
from partc.cost.simulation.task_graph import TaskGraph
from partc.passes.search.operators.group_layouts import GroupLayouts
from partc.passes.search.operators.grouped_step import GroupedStep
from partc.passes.search.operators.operator_space import OperatorConfig

MOST_REMEMBERED = 50_000  # blocks

Chosen = Callable[[Sequence[object]], object]  # some entries of a sequence


@dataclass(frozen=True, slots=True)
class _Before:
    """What a move changed."""

    placed: Mapping[int, PlacedGroup] = field(default_factory=dict)
    written: Mapping[int, WrittenBlock | None] = field(default_factory=dict)


class StepTasks:
    """The task graph of a step, for one configuration of every group at a time."""

    def __init__(self, step: GroupedStep, prices: TaskPrices, bucket_bytes: int) -> None:
        self.step = step
        self.prices = prices
        self._layouts = GroupLayouts(step)
        self._known: dict[tuple[int, OperatorConfig], PlacedGroup | None] = {}
        self._placings: dict[Hashable, PlacedGroup] = {}
        self._blocks = BlockList(step, self._layouts, prices, bucket_bytes).blocks
        self._waiting: list[list[int]] = [[] for _ in self._blocks]  # block -> those that wait for it
        self._following: list[list[int]] = [[] for _ in step.groups]  # group -> the blocks written by it
        for number, block in enumerate(self._blocks):
            for source in block.sources:
                self._waiting[source].append(number)
            for group in dict.fromkeys(block.groups):
                self._following[group].append(number)
        self._keys = _keys_of(self._blocks)
        self._present = Present([], [None] * len(self._blocks))
        self._remembered: dict[Hashable, WrittenBlock] = {}
        self._by_inputs: dict[Hashable, WrittenBlock] = {}
        self._results: dict[Hashable, int] = {}
        self.graph = TaskGraph(
            [block.sources for block in self._blocks], prices.resources, prices.launching(0)
        )
        self._before = _Before()
        self._memory: Floats = np.zeros(len(prices.workers))

    # ------------------------------------------------------------ configurations

    def begin(self, configs: Sequence[OperatorConfig]) -> float | None:
        """Build the graph anew; return the seconds of a step, None where a group cannot be divided so."""
        placed = [self._place(number, config) for number, config in enumerate(configs)]
        if any(each is None for each in placed):
            return None
        known = [each for each in placed if each is not None]
        self._present = Present(known, [None] * len(self._blocks))
        self._memory = np.zeros(len(self.prices.workers))
        self._rewrite(range(len(self._blocks)))
        return self.graph.full()

    def move(self, changes: Mapping[int, OperatorConfig], limit_s: float = float("inf")) -> float | None:
        """Configure some groups otherwise; return the seconds of a step, infinity where above the limit.

        None where a group cannot be divided so, or variables take more memory than a worker has: then
        nothing is changed. Otherwise `undo` takes it back.
        """
        placed = {number: self._place(number, config) for number, config in changes.items()}
        if any(each is None for each in placed.values()):
            return None
        former = {number: self._present.placed[number] for number in placed}
        for number, each in placed.items():
            assert each is not None
            self._present.placed[number] = each
        written = self._rewrite({block for number in placed for block in self._following[number]})
        self._before = _Before(former, written)
        if self.exceeds_memory:
            self.undo()
            return None
        return self.graph.delta(limit_s) if written else self.graph.full()

    def undo(self) -> None:
        """Take the last move back."""
        for number, placed in self._before.placed.items():
            self._present.placed[number] = placed
        for number, written in self._before.written.items():
            self._put(number, written)
        if self._before.written:
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
        """Tell whether variables take more memory than a worker has."""
        return bool((self._memory > self.prices.limits_bytes).any())

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that workers send each other in a step."""
        return sum(written.block.sent for written in self._present.written if written is not None)

    @property
    def computing_s(self) -> float:
        """Return the seconds that all workers compute together in a step."""
        blocks = (written.block for written in self._present.written if written is not None)
        last = len(self.prices.workers)
        return float(sum(b.tasks.seconds[b.tasks.resources < last].sum() for b in blocks))

    def _place(self, number: int, config: OperatorConfig) -> PlacedGroup | None:
        if (number, config) not in self._known:
            layout = self._layouts(number, config.split)
            placed = None
            if layout is not None:
                place = MeshPlace.of(layout.mesh.axes, config.workers)
                placed = self._placings.setdefault((layout.kind, place), PlacedGroup(layout, place))
            self._known[number, config] = placed
        return self._known[number, config]

    # ------------------------------------------------------------ blocks

    def _rewrite(self, numbers: Iterable[int]) -> dict[int, WrittenBlock | None]:
        """Write blocks anew, and those that see other results then; return what changed as it was before."""
        former: dict[int, WrittenBlock | None] = {}
        queue = sorted(numbers)
        queued = set(queue)
        written = self._present.written
        while queue:
            number = heappop(queue)
            before, now = written[number], self._written(number)
            if now is before:
                continue
            former[number] = before
            self._put(number, now)
            if before is None or now.results != before.results:
                for waiting in self._waiting[number]:
                    if waiting not in queued:
                        queued.add(waiting)
                        heappush(queue, waiting)
        if former:
            self.graph.replace({number: self._present.block(number).tasks for number in former})
        return former

    def _put(self, number: int, written: WrittenBlock | None) -> None:
        """Have a block, and its memory, in place of the one before."""
        before = self._present.written[number]
        self._present.put(number, written)
        for each, sign in ((before, -1), (written, 1)):
            if each is not None and each.block.memory is not None:
                self._memory = self._memory + sign * each.block.memory

    def _written(self, number: int) -> WrittenBlock:
        """Return a block as the configurations and blocks that it depends on have it."""
        likeness, places, results = self._keys[number]
        key = likeness, places(self._present.placed), results(self._present.results)
        block = self._remembered.get(key)
        if block is None:
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered, self._by_inputs = {}, {}
            block = self._remembered[key] = self._write(number)
        return block

    def _write(self, number: int) -> WrittenBlock:
        """Return a block by what it is written by, which may be less than what it depends on."""
        block = self._blocks[number]
        inputs = block.inputs(self._present)
        if inputs not in self._by_inputs:
            written = block.write(inputs)
            results = written.last_tasks, tuple(written.gates.items()), tuple(written.cuts.items())
            number = self._results.setdefault(results, len(self._results))
            self._by_inputs[inputs] = WrittenBlock(written, number)
        return self._by_inputs[inputs]


def _keys_of(blocks: Sequence[StepBlock]) -> list[tuple[int, Chosen, Chosen]]:
    """Return for each block a number of its likeness, and what picks its groups and its sources."""
    likenesses: dict[Hashable, int] = {}
    return [
        (
            likenesses.setdefault(block.likeness, len(likenesses)),
            _chosen(block.groups),
            _chosen(block.sources),
        )
        for block in blocks
    ]


def _chosen(places: Sequence[int]) -> Chosen:
    return itemgetter(*places) if places else lambda _: ()
