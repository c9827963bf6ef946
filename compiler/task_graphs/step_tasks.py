"""The task graph of a step whose operator groups each have devices of their own (flexflow.txt, section 5.1).

What the step consists of is in blocks (step_blocks.py), and what a block waits for in another one without
tasks, so that either is replaced without the other. Blocks of alike groups with equal configurations are
written once.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from partc.compiler.task_graphs.step_blocks import BlockList, Present, StepBlock, Written
from partc.compiler.task_graphs.task_blocks import Placed
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.cost.simulation.task_arrays import Floats, Ints
from partc.cost.simulation.task_graph import BlockTasks, TaskGraph
from partc.passes.search.group_layouts import GroupLayouts
from partc.passes.search.grouped_step import GroupedStep
from partc.passes.search.operator_space import OperatorConfig

MOST_REMEMBERED = 50_000  # blocks

NO_TASKS: Ints = np.zeros(0, np.int32)
NO_SECONDS: Floats = np.zeros(0)
NO_ROWS: Ints = np.zeros((0, 4), np.int32)


@dataclass(frozen=True, slots=True)
class _Before:
    """What a move changed."""

    placed: Mapping[int, Placed] = field(default_factory=dict)
    written: Mapping[int, Written | None] = field(default_factory=dict)


class StepTasks:
    """The task graph of a step, for one configuration of every group at a time."""

    def __init__(self, step: GroupedStep, prices: TaskPrices, bucket_bytes: int) -> None:
        self.step = step
        self.prices = prices
        self._layouts = GroupLayouts(step)
        self._known: dict[tuple[int, OperatorConfig], Placed | None] = {}
        self._placings: dict[Hashable, Placed] = {}
        self._blocks = BlockList(step, self._layouts, prices, bucket_bytes).blocks
        self._waiting: list[list[int]] = [[] for _ in self._blocks]  # block -> those that wait for it
        self._following: list[list[int]] = [[] for _ in step.groups]  # group -> the blocks written by it
        for number, block in enumerate(self._blocks):
            for source in block.sources:
                self._waiting[source].append(number)
            for group in dict.fromkeys(block.groups):
                self._following[group].append(number)
        self._present = Present([], [None] * len(self._blocks))
        self._remembered: dict[Hashable, Written] = {}
        self._contents: dict[tuple[int, int], BlockTasks] = {}
        self._results: dict[Hashable, int] = {}
        self._serials = 0
        self.graph = TaskGraph(2 * len(self._blocks), prices.gate + 1)
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

    def placed(self, number: int, config: OperatorConfig) -> Placed | None:
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
        return float(sum(block.seconds[block.resources < last].sum() for block in blocks))

    def _place(self, number: int, config: OperatorConfig) -> Placed | None:
        if (number, config) not in self._known:
            layout = self._layouts(number, config.split)
            placed = None
            if layout is not None:
                place = layout.mesh.axes, config.workers
                placed = self._placings.setdefault((layout.kind, place), Placed(layout, place))
            self._known[number, config] = placed
        return self._known[number, config]

    # ------------------------------------------------------------ blocks

    def _rewrite(self, numbers: Iterable[int]) -> dict[int, Written | None]:
        """Write blocks anew, and those that see other results then; return what changed as it was before."""
        former: dict[int, Written | None] = {}
        linked: dict[int, None] = {}
        queue = list(numbers)
        heapify(queue)
        queued = set(queue)
        while queue:
            number = heappop(queue)
            before, now = self._present.written[number], self._written(number)
            if now is before:
                continue
            former[number] = before
            self._put(number, now)
            linked[number] = None
            linked.update(dict.fromkeys(self._waiting[number]))
            if before is None or now.results != before.results:
                for waiting in self._waiting[number]:
                    if waiting not in queued:
                        queued.add(waiting)
                        heappush(queue, waiting)
        if former:
            contents = {number: self._tasks_of(number) for number in former}
            links = {len(self._blocks) + number: self._links_of(number) for number in linked}
            self.graph.replace(contents | links)
        return former

    def _put(self, number: int, written: Written | None) -> None:
        """Have a block, and its memory, in place of the one before."""
        before = self._present.written[number]
        self._present.written[number] = written
        for each, sign in ((before, -1), (written, 1)):
            if each is not None and each.block.memory is not None:
                self._memory = self._memory + sign * each.block.memory

    def _written(self, number: int) -> Written:
        """Return a block as the configurations and blocks that it depends on have it."""
        block = self._blocks[number]
        key = block.key(self._present)
        if key not in self._remembered:
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered, self._contents = {}, {}
            found = block.write(self._present)
            results = tuple(found.done.items()), tuple(found.gates.items()), tuple(found.cuts.items())
            alike = self._results.setdefault(results, len(self._results))
            self._remembered[key] = Written(found, self._serials, alike)
            self._serials += 1
        return self._remembered[key]

    def _tasks_of(self, number: int) -> BlockTasks:
        """Return a block's tasks."""
        written = self._present.written[number]
        assert written is not None
        block = written.block
        rows = _rows(number, block.rows[:, 0], number, block.rows[:, 1])
        return BlockTasks(block.resources, block.seconds, rows)

    def _links_of(self, number: int) -> BlockTasks:
        """Return what a block waits for in others."""
        written = self._present.written[number]
        assert written is not None
        key = number, written.serial
        if key not in self._contents:
            sources = self._blocks[number].sources
            rows = [
                _rows(sources[slot], pairs[:, 0], number, pairs[:, 1])
                for slot, pairs in written.block.links.items()
            ]
            self._contents[key] = BlockTasks(NO_TASKS, NO_SECONDS, np.concatenate([NO_ROWS, *rows]))
        return self._contents[key]


def _rows(source: int, sources: Ints, target: int, targets: Ints) -> Ints:
    rows = np.empty((len(sources), 4), np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = source, sources, target, targets
    return rows
