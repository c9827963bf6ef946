"""The tasks of a step whose operator groups each have devices of their own (flexflow.txt, section 5.1).

    computing  what a group does on one way
    transfer   a tensor, from the group that has it to those that want it on other devices, or other parts
    update     a bucket of parameters

Each is a block of the task graph, and what it waits for another one without tasks, so that either is replaced
without the other. Blocks of alike groups with equal configurations are written once.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import numpy as np

from partc.compiler.planning.gradient_tasks import Term, Updated, UpdateWriter
from partc.compiler.planning.task_blocks import (
    Placed,
    Read,
    TaskBlock,
    Tensor,
    write_computing,
    write_transfer,
)
from partc.compiler.planning.task_prices import TaskPrices
from partc.cost.simulation.task_arrays import Floats, Ints
from partc.cost.simulation.task_graph import BlockTasks, TaskGraph
from partc.passes.layouts.layouts import Layout
from partc.passes.search.group_layouts import GroupLayouts, plain
from partc.passes.search.grouped_step import ASIDE, FORWARD, GroupedStep, Way
from partc.passes.search.operator_space import OperatorConfig

MOST_REMEMBERED = 50_000  # blocks

Computing = tuple[int, Way]

NO_TASKS: Ints = np.zeros(0, np.int32)
NO_SECONDS: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A block of the step: the groups it follows, the blocks it waits for, by slot, and how it is written.

    `key` returns what tells whether a remembered block is the one to write.
    """

    groups: tuple[int, ...]
    sources: tuple[int, ...]
    key: Callable[[], Hashable]
    write: Callable[[], TaskBlock]


@dataclass
class _Before:
    """What a move changed."""

    placed: dict[int, Placed] = field(default_factory=dict)
    blocks: dict[int, TaskBlock] = field(default_factory=dict)


class StepTasks:
    """The task graph of a step, for one configuration of every group at a time."""

    def __init__(self, step: GroupedStep, prices: TaskPrices, bucket_bytes: int) -> None:
        self.step = step
        self.prices = prices
        self._layouts = GroupLayouts(step)
        self._updates = UpdateWriter(step, prices)
        self._placed: list[Placed] = []
        self._known: dict[tuple[int, OperatorConfig], Placed | None] = {}
        self._remembered: dict[Hashable, TaskBlock] = {}
        self._known_results: dict[Hashable, int] = {}
        self._results: dict[int, int] = {}  # serial of a block -> a number of its results
        self._buckets = _buckets(step, bucket_bytes)
        self._number: dict[Hashable, int] = {}
        self._kinds: list[_Kind] = []
        self._number_blocks()
        self._blocks: list[TaskBlock | None] = [None] * len(self._kinds)
        self._waiting: list[list[int]] = [[] for _ in self._kinds]  # block -> those that wait for it
        self._following: list[list[int]] = [[] for _ in step.groups]  # group -> the blocks it changes
        for number, kind in enumerate(self._kinds):
            for source in set(kind.sources):
                self._waiting[source].append(number)
            for group in kind.groups:
                self._following[group].append(number)
        self.graph = TaskGraph(2 * len(self._kinds), prices.gate + 1)
        self._before = _Before()
        self._memory: Floats = np.zeros(len(prices.workers))

    # ------------------------------------------------------------ configurations

    def begin(self, configs: Sequence[OperatorConfig]) -> float | None:
        """Build the graph anew; return the seconds of a step, None where a group cannot be divided so."""
        placed = [self._place(number, config) for number, config in enumerate(configs)]
        if any(each is None for each in placed):
            return None
        self._placed = [each for each in placed if each is not None]
        self._blocks = [None] * len(self._kinds)
        self._rebuild(range(len(self._kinds)))
        self._memory = np.zeros(len(self.prices.workers))
        self._count_memory(self._blocks, 1)
        return self.graph.full()

    def move(self, changes: Mapping[int, OperatorConfig], limit_s: float = float("inf")) -> float | None:
        """Configure some groups otherwise; return the seconds of a step, infinity where above the limit.

        None where a group cannot be divided so, or variables take more memory than a worker has: then
        nothing is changed. Otherwise `undo` takes it back.
        """
        placed = {number: self._place(number, config) for number, config in changes.items()}
        if any(each is None for each in placed.values()):
            return None
        numbers = sorted({block for number in placed for block in self._following[number]})
        self._before = _Before({number: self._placed[number] for number in placed})
        for number, each in placed.items():
            assert each is not None
            self._placed[number] = each
        self._before.blocks = self._rebuild(numbers)
        self._count_memory(self._before.blocks.values(), -1)
        self._count_memory((self._blocks[number] for number in self._before.blocks), 1)
        if (self._memory > self.prices.limits_bytes).any():
            self.undo()
            return None
        return self.graph.delta(limit_s) if self._before.blocks else self.graph.full()

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that workers send each other in a step."""
        return sum(block.sent for block in self._blocks if block is not None)

    @property
    def computing_s(self) -> float:
        """Return the seconds that all workers compute together in a step."""
        last = len(self.prices.workers)
        each = (block.seconds[block.resources < last].sum() for block in self._blocks if block is not None)
        return float(sum(each))

    def undo(self) -> None:
        """Take the last move back."""
        for number, placed in self._before.placed.items():
            self._placed[number] = placed
        self._count_memory((self._blocks[number] for number in self._before.blocks), -1)
        for number, block in self._before.blocks.items():
            self._blocks[number] = block
        self._count_memory(self._before.blocks.values(), 1)
        if self._before.blocks:
            self.graph.undo()

    def _count_memory(self, blocks: Iterable[TaskBlock | None], sign: int) -> None:
        for block in blocks:
            if block is not None and block.memory is not None:
                self._memory = self._memory + sign * block.memory

    def _place(self, number: int, config: OperatorConfig) -> Placed | None:
        if (number, config) not in self._known:
            layout = self._layouts(number, config.split)
            placed = None if layout is None else Placed(layout, (layout.mesh.axes, config.workers))
            self._known[number, config] = placed
        return self._known[number, config]

    # ------------------------------------------------------------ blocks

    def _rebuild(self, numbers: Iterable[int]) -> dict[int, TaskBlock]:
        """Write blocks anew, and put those that change, and what waits for them, in. Return the former."""
        changed: dict[int, TaskBlock] = {}
        links: dict[int, None] = {}
        for number in numbers:
            former, block = self._blocks[number], self._written(number)
            if block is former:
                continue
            self._blocks[number] = block
            links[number] = None
            links.update(dict.fromkeys(self._waiting[number]))
            if former is not None:
                changed[number] = former
        contents: dict[int, BlockTasks] = {}
        for number in links:
            block_now = self._blocks[number]
            assert block_now is not None, "blocks are written in order"
            contents[len(self._kinds) + number] = self._links_of(number, block_now)
            if number in changed or not changed:
                rows = _rows(number, block_now.rows[:, 0], number, block_now.rows[:, 1])
                contents[number] = BlockTasks(block_now.resources, block_now.seconds, rows)
        if contents:
            self.graph.replace(contents)
        return changed

    def _links_of(self, number: int, block: TaskBlock) -> BlockTasks:
        sources = self._kinds[number].sources
        rows = [_rows(sources[slot], pairs[:, 0], number, pairs[:, 1]) for slot, pairs in block.links.items()]
        return BlockTasks(NO_TASKS, NO_SECONDS, np.concatenate([np.zeros((0, 4), np.int32), *rows]))

    def _written(self, number: int) -> TaskBlock:
        """Return a block as the configurations and blocks that it depends on have it."""
        kind = self._kinds[number]
        key = kind.key()
        if key not in self._remembered:
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered = {}
            block = kind.write()
            self._remembered[key] = block
            results = tuple(block.done.items()), tuple(block.gates.items()), tuple(block.cuts.items())
            self._results[block.serial] = self._known_results.setdefault(results, len(self._known_results))
        return self._remembered[key]

    def _result_of(self, number: int) -> int:
        """Return what blocks have in common whose results others find at the same tasks."""
        return self._results[self._block(number).serial]

    def _number_blocks(self) -> None:
        """List the blocks, each behind those that it waits for."""
        step = self.step
        made: dict[Computing, list[str]] = {}
        for tensor in step.readers:
            if tensor in step.maker:
                made.setdefault(step.maker[tensor], []).append(tensor)
            else:
                self._add_transfer(tensor)
        for computing in _computing_order(step):
            self._add_computing(*computing)
            for tensor in made.get(computing, ()):
                self._add_transfer(tensor)
        for bucket in range(len(self._buckets)):
            self._add_update(bucket)

    def _add(self, name: Hashable, kind: _Kind) -> None:
        self._number[name] = len(self._kinds)
        self._kinds.append(kind)

    # ------------------------------------------------------------ computing

    def _add_computing(self, number: int, way: Way) -> None:
        step = self.step
        read = _reads(step, number, way)
        makers = [step.maker.get(tensor) for tensor in read]
        transfers = [self._number.get(("transfer", tensor)) for tensor in read]
        sources: dict[int, int] = {}  # block -> slot
        for found in (*transfers, *(self._number.get(("computing", maker)) for maker in makers)):
            if found is not None:
                sources.setdefault(found, len(sources))
        blocks = [
            (tensor, transfer, self._number.get(("computing", maker)))
            for tensor, transfer, maker in zip(read, transfers, makers, strict=True)
        ]
        slots = tuple(sources.get(block, -1) for _, *both in blocks for block in both if block is not None)

        def key() -> Hashable:
            placed = self._placed[number]
            serials = tuple(self._result_of(source) for source in sources)
            return "computing", placed.layout.kind, placed.place, way, slots, serials

        def write() -> TaskBlock:
            placed = self._placed[number]
            reads = [
                Read(
                    placed.layout.wants.get((tensor, way), ()),
                    None if transfer is None else self._block(transfer),
                    -1 if transfer is None else sources[transfer],
                    None if maker is None else self._block(maker),
                    -1 if maker is None else sources[maker],
                )
                for tensor, transfer, maker in blocks
            ]
            return write_computing(self.prices, placed, way, reads)

        groups = {number, *(maker[0] for maker in makers if maker is not None)}
        for tensor in read:
            groups |= {group for group, _ in step.readers.get(tensor, ())}
            if tensor not in step.maker and tensor in step.homes:
                groups.add(step.homes[tensor])
        self._add(("computing", (number, way)), _Kind(tuple(sorted(groups)), tuple(sources), key, write))

    def _block(self, number: int) -> TaskBlock:
        block = self._blocks[number]
        assert block is not None, "blocks are written in order"
        return block

    # ------------------------------------------------------------ transfers

    def _add_transfer(self, tensor: str) -> None:
        step = self.step
        maker, readers = step.maker.get(tensor), step.readers[tensor]
        source = step.homes[tensor] if maker is None else maker[0]
        made = None if maker is None else self._number["computing", maker]
        places = tuple((self._layouts.place(group, tensor), way) for group, way in readers)
        place = None if maker is None else self._layouts.place(source, tensor)
        facts = step.analysis.facts
        known = Tensor(facts.shape(tensor), facts.dtypes[tensor].itemsize)

        def key() -> Hashable:
            keeper = self._placed[source]
            wanted = tuple(
                (self._placed[group].layout.kind, self._placed[group].place) for group, _ in readers
            )
            serial = None if made is None else self._result_of(made)
            has = plain(self._has(tensor, keeper)) if made is None else keeper.layout.kind
            return "transfer", known, place, places, keeper.place, has, serial, wanted

        def write() -> TaskBlock:
            keeper = self._placed[source]
            wants = (
                (self._placed[group], self._placed[group].layout.wants.get((tensor, way), ()))
                for group, way in readers
            )
            block = None if made is None else self._block(made)
            return write_transfer(self.prices, known, keeper, plain(self._has(tensor, keeper)), block, wants)

        groups = dict.fromkeys((source, *(group for group, _ in readers)))
        sources = () if made is None else (made,)
        self._add(("transfer", tensor), _Kind(tuple(groups), sources, key, write))

    def _has(self, tensor: str, keeper: Placed) -> Layout:
        found = keeper.layout.homes if tensor in self.step.analysis.training.variables else keeper.layout.has
        return found.get(tensor, Layout(""))

    # ------------------------------------------------------------ updates

    def _add_update(self, bucket: int) -> None:
        step = self.step
        terms = {
            parameter: [term for term in step.terms[parameter] if term in step.maker]
            for parameter in self._buckets[bucket]
        }
        homes = {parameter: step.homes.get(parameter, 0) for parameter in terms}
        makers = dict.fromkeys(step.maker[term] for own in terms.values() for term in own)
        sources = {self._number["computing", maker]: slot for slot, maker in enumerate(makers)}
        groups = tuple(dict.fromkeys((*homes.values(), *(group for group, _ in makers))))

        def key() -> Hashable:
            placed = tuple((self._placed[group].layout.kind, self._placed[group].place) for group in groups)
            return "update", bucket, placed, tuple(self._result_of(source) for source in sources)

        def term_of(name: str) -> Term:
            number = self._number["computing", step.maker[name]]
            return Term(name, self._placed[step.maker[name][0]], self._block(number), sources[number])

        def write() -> TaskBlock:
            return self._updates.write(
                [
                    Updated(parameter, self._placed[homes[parameter]], tuple(map(term_of, own)))
                    for parameter, own in terms.items()
                ]
            )

        self._add(("update", bucket), _Kind(groups, tuple(sources), key, write))


def _rows(source: int, sources: Ints, target: int, targets: Ints) -> Ints:
    rows = np.empty((len(sources), 4), np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = source, sources, target, targets
    return rows


# ---------------------------------------------------------------- what blocks there are


def _reads(step: GroupedStep, number: int, way: Way) -> list[str]:
    """Return what a group reads on one way that it does not make on it, in order."""
    nodes = step.groups[number].nodes[way]
    made = {tensor.name for node in nodes for tensor in node.outputs}
    return list(dict.fromkeys(t.name for n in nodes for t in n.inputs if t.name and t.name not in made))


def _computing_order(step: GroupedStep) -> list[Computing]:
    """Return what is computed, each behind what it reads: forward, back, and weights as early as may be."""
    behind: dict[Computing, set[Computing]] = {}
    for way in sorted({way for group in step.groups for way in group.nodes}):
        numbers = [number for number, group in enumerate(step.groups) if way in group.nodes]
        for number in numbers if way[0] in (FORWARD, ASIDE) else reversed(numbers):
            behind[number, way] = set()
    for tensor, readers in step.readers.items():
        if tensor in step.maker:
            for reader in readers:
                behind[reader].add(step.maker[tensor])
    return list(TopologicalSorter(behind).static_order())


def _buckets(step: GroupedStep, limit_bytes: int) -> list[list[str]]:
    """Return the parameters whose gradients travel together, in the order in which these are made."""
    order = {computing: place for place, computing in enumerate(_computing_order(step))}
    ready = {
        parameter: max((order[step.maker[term]] for term in terms if term in step.maker), default=0)
        for parameter, terms in step.terms.items()
    }
    buckets: list[list[str]] = [[]]
    filled = 0
    for parameter in sorted(ready, key=lambda name: ready[name]):
        is_sparse = step.analysis.training.gradients[parameter].is_sparse
        nbytes = 0 if is_sparse else step.analysis.facts.nbytes(parameter)
        if buckets[-1] and filled + nbytes > limit_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += nbytes
    return buckets
