"""What the blocks of a step take alone, by the configurations of the groups that they join.

They are those that the task graph consists of (step_blocks.py), written with one reader, or with the
parameters of one group: what then depends on one configuration, or on two.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partc.compiler.task_graphs.step_blocks import (
    ComputingBlock,
    ParameterOf,
    Present,
    ReadTensor,
    StepBlock,
    TransferBlock,
    UpdateBlock,
    WrittenBlock,
)
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.compiler.task_graphs.task_blocks import TaskBlock
from partc.cost.simulation.task_arrays import OWN, Floats
from partc.cost.simulation.task_graph import BlockTasks
from partc.passes.search.operators.operator_space import OperatorConfig


@dataclass(frozen=True, slots=True)
class Alone:
    """A block on its own: when it ends, when its first result is there, and what it occupies for how long.

    first_s        where all was launched ahead
    kernels_s      when it ends, where all was launched ahead
    computing_s    float64[workers]
    sending_s      float64[workers + lanes + workers]: the workers' communications, the network, launches
    memory         float64[workers]: bytes of variables
    """

    seconds: float
    first_s: float
    kernels_s: float
    computing_s: Floats
    sending_s: Floats
    memory: Floats


@dataclass(frozen=True, slots=True)
class TransferCost:
    """A tensor's way alone: what its reader waits, and what it occupies, as in Alone."""

    seconds: float
    sending_s: Floats


@dataclass(frozen=True, slots=True)
class Reading:
    """A tensor that goes from one group to one way of another.

    maker   the block that makes it, None: it is kept from step to step
    reader  the block that reads it
    sender  the block that sends it, and the number of the reader among its readers
    """

    tensor: int
    maker: int | None
    reader: int
    sender: TransferBlock
    number: int

    @property
    def groups(self) -> tuple[int, int]:
        """Return the group that has it, and the one that reads it."""
        return self.sender.groups[0], self.sender.groups[1 + self.number]


@dataclass
class BlockCosts:
    """Writes blocks alone. What was asked before is remembered."""

    tasks: StepTasks
    _present: Present = field(init=False)
    _sent: dict[Hashable, TransferCost] = field(default_factory=dict)
    _computed: dict[Hashable, tuple[TaskBlock, Alone]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = self.tasks.blocks
        self._present = Present([None] * len(self.tasks.step.groups), [None] * len(blocks))  # type: ignore[list-item]
        self.computing = {n: b for n, b in enumerate(blocks) if isinstance(b, ComputingBlock)}
        self.updates = {n: b for n, b in enumerate(blocks) if isinstance(b, UpdateBlock)}
        self.readings = tuple(self._readings())

    def _readings(self) -> list[Reading]:
        reader_of = {(block.group, block.way): number for number, block in self.computing.items()}
        readings = []
        for number, block in enumerate(self.tasks.blocks):
            if isinstance(block, TransferBlock):
                maker = block.sources[0] if block.sources else None
                for index, ((_, way), group) in enumerate(zip(block.reads, block.groups[1:], strict=True)):
                    readings.append(Reading(number, maker, reader_of[group, way], block, index))
        return readings

    def can_place(self, group: int, config: OperatorConfig) -> bool:
        """Tell whether a group can be divided so."""
        return self.tasks.placed(group, config) is not None

    def compute(self, number: int, config: OperatorConfig) -> Alone:
        """Return what a group does on one way, if all that it reads is there."""
        return self._compute(number, config)[1]

    def _compute(self, number: int, config: OperatorConfig) -> tuple[TaskBlock, Alone]:
        block = self.computing[number]
        self._place({block.group: config})
        placed = self._present.placed[block.group]
        key = id(placed), block.way
        if key not in self._computed:
            written = self._write(replace(block, reads=(), sources=()))
            self._computed[key] = written, self._alone(written)
        return self._computed[key]

    def send(self, reading: Reading, source: OperatorConfig, target: OperatorConfig) -> TransferCost:
        """Return what a reader waits for a tensor: its way, and what the reader takes longer for it."""
        having, wanting = reading.groups
        self._place({having: source, wanting: target})
        sender, destination = reading.sender, reading.sender.reads[reading.number]
        placed = self._present.placed
        key = (
            sender.tensor,
            sender.place,
            reading.maker is None,
            destination,
            id(placed[having]),
            id(placed[wanting]),
        )
        if key not in self._sent:
            self._sent[key] = self._send(reading, source, target)
        return self._sent[key]

    def _send(self, reading: Reading, source: OperatorConfig, target: OperatorConfig) -> TransferCost:
        having, wanting = reading.groups
        read = reading.sender.reads[reading.number]
        sender = replace(reading.sender, reads=(read,), groups=(having, wanting))
        if reading.maker is not None:
            self._present.put(reading.maker, WrittenBlock(self._compute(reading.maker, source)[0], 0))
            self._place({having: source, wanting: target})
        sent = self._write(sender)
        self._present.put(reading.tensor, WrittenBlock(sent, 0))
        sources = (reading.tensor,) if reading.maker is None else (reading.tensor, reading.maker)
        known = ReadTensor(read[0], 0, None if reading.maker is None else 1)
        block = self.computing[reading.reader]
        behind = self._write(replace(block, reads=(known,), sources=sources))
        longer_s = self._alone(behind).kernels_s - self.compute(reading.reader, target).kernels_s
        alone = self._alone(sent)
        return TransferCost(alone.seconds + max(0.0, longer_s), alone.sending_s)

    def update(
        self, number: int, parameters: Sequence[ParameterOf], configs: Mapping[int, OperatorConfig]
    ) -> Alone:
        """Return how parameters of a bucket are summed and applied. `configs`: of all their groups."""
        block = self.updates[number]
        for source in block.sources:
            maker = self.computing.get(source)
            if maker is not None and maker.group in configs:
                written, _ = self._compute(source, configs[maker.group])
                self._present.put(source, WrittenBlock(written, 0))
        self._place(configs)
        return self._alone(self._write(replace(block, parameters=tuple(parameters))))

    def _write(self, block: StepBlock) -> TaskBlock:
        return block.write(block.inputs(self._present))

    def _place(self, configs: Mapping[int, OperatorConfig]) -> None:
        for group, config in configs.items():
            placed = self.tasks.placed(group, config)
            assert placed is not None, "configurations that can be"
            self._present.placed[group] = placed

    def _alone(self, block: TaskBlock) -> Alone:
        workers = len(self.tasks.prices.workers)
        tasks = block.tasks
        without_launches = np.where(tasks.resources >= self.tasks.prices.launching(0), 0.0, tasks.seconds)
        ends, kernel_ends = _ends(tasks, tasks.seconds), _ends(tasks, without_launches)
        occupied_s: Floats = np.bincount(tasks.resources, tasks.seconds, self.tasks.prices.resources).astype(
            np.float64
        )
        last = np.empty(0, np.int32) if block.last_tasks is None else block.last_tasks.indices
        first_s = min((kernel_ends[task] for task in last[last >= 0].tolist()), default=0.0)
        memory = np.zeros(workers) if block.memory is None else block.memory
        return Alone(
            max(ends, default=0.0),
            first_s,
            max(kernel_ends, default=0.0),
            occupied_s[:workers],
            occupied_s[workers:],
            memory,
        )


def _ends(tasks: BlockTasks, seconds: Floats) -> list[float]:
    """Return when each task of a block ends whose parts take so long, if nothing else is waited for."""
    lasts = np.cumsum(tasks.parts).tolist()
    ends = [
        float(seconds[last - parts : last].max(initial=0.0))
        for last, parts in zip(lasts, tasks.parts.tolist(), strict=True)
    ]
    alone_s = list(ends)
    own = tasks.dependencies[tasks.dependencies[:, 0] == OWN]
    for _, source, target in sorted(own.tolist(), key=lambda row: row[2]):
        ends[target] = max(ends[target], ends[source] + alone_s[target])
    return ends
