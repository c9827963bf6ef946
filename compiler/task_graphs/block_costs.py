"""What the blocks of a step take alone, by the configurations of the groups that they join.

They are those that the task graph consists of (step_blocks.py), written with one reader, or with the
parameters of one group: what then depends on one configuration, or on two.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from partc.compiler.task_graphs.mesh_places import Where
from partc.compiler.task_graphs.step_blocks import ComputingBlock, ParameterOf, TransferBlock, UpdateBlock
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.compiler.task_graphs.task_blocks import PlacedGroup, TaskBlock
from partc.cost.simulation.task_arrays import Floats
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
    """A tensor's way alone: what its reader waits, and what it occupies, as in Alone.

    sum_s  of it, what its terms take to be summed for this reader; with others that takes lanes alone
    """

    seconds: float
    sending_s: Floats
    sum_s: float

    def once_s(self, reading: "Reading") -> float:
        """Return the seconds, of several who read it the sum for the first alone."""
        return self.seconds if reading.number == 0 else self.seconds - self.sum_s


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
    _sent: dict[Hashable, TransferCost] = field(default_factory=dict)
    _computed: dict[Hashable, Alone] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = self.tasks.blocks
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
        block = self.computing[number]
        placed = self._placed(block.group, config)
        key = id(placed), block.way
        if key not in self._computed:
            self._computed[key] = self._alone(block.write(placed, False, 0, {}))
        return self._computed[key]

    def send(self, reading: Reading, source: OperatorConfig, target: OperatorConfig) -> TransferCost:
        """Return what a reader waits for a tensor: its way, and what the reader takes longer for it."""
        having, wanting = reading.groups
        sender, destination = reading.sender, reading.sender.reads[reading.number]
        one, other = self._placed(having, source), self._placed(wanting, target)
        if having == wanting:
            one = other
        key = sender.tensor, sender.place, sender.is_made, destination, id(one), id(other)
        if key not in self._sent:
            self._sent[key] = self._send(reading, one, other, source, target)
        return self._sent[key]

    def _send(
        self,
        reading: Reading,
        having: PlacedGroup,
        wanting: PlacedGroup,
        source: OperatorConfig,
        target: OperatorConfig,
    ) -> TransferCost:
        here = having.has(reading.sender.place, reading.sender.is_made)
        wants = wanting.wants(reading.sender.reads[reading.number])
        sum_s, summing_s = self._sum(reading, having, source, wants)
        sent = reading.sender.write(here, [where for where in dict.fromkeys(wants) if where is not here])
        cut_bytes = sum(sent.cuts.get(where, 0) for where in wants)
        block = self.computing[reading.reader]
        behind = self._alone(block.write(wanting, bool(sent.gates), cut_bytes, {}))
        longer_s = behind.kernels_s - self.compute(reading.reader, target).kernels_s
        alone = self._alone(sent)
        seconds = sum_s + alone.seconds + max(0.0, longer_s)
        return TransferCost(seconds, alone.sending_s + summing_s, sum_s)

    def _sum(
        self, reading: Reading, having: PlacedGroup, source: OperatorConfig, wants: tuple[Where, ...]
    ) -> tuple[float, Floats]:
        """Return what the terms of a tensor take to be summed: seconds, and how long lanes are occupied."""
        tensor, workers = reading.sender.place, len(self.tasks.prices.workers)
        if reading.maker is None or tensor not in having.layout.has_terms:
            return 0.0, np.zeros(self.tasks.prices.resources - workers)
        block = self.computing[reading.maker].write(having, False, 0, {tensor: wants})
        alone, without = self._alone(block), self.compute(reading.maker, source)
        summing_s = alone.sending_s - without.sending_s
        summing_s[:workers] = summing_s[-workers:] = 0.0
        return alone.kernels_s - without.kernels_s, summing_s

    def update(
        self, number: int, parameters: Sequence[ParameterOf], configs: Mapping[int, OperatorConfig]
    ) -> Alone:
        """Return how parameters of a bucket are summed and applied. `configs`: of all their groups."""
        placed = {group: self._placed(group, config) for group, config in configs.items()}
        return self._alone(replace(self.updates[number], parameters=tuple(parameters)).write(placed))

    def _placed(self, group: int, config: OperatorConfig) -> PlacedGroup:
        placed = self.tasks.placed(group, config)
        assert placed is not None, "configurations that can be"
        return placed

    def _alone(self, block: TaskBlock) -> Alone:
        workers = len(self.tasks.prices.workers)
        seconds_s = block.seconds.clip(0.0)  # a beginning may be another's, too
        is_launch = block.resources >= self.tasks.prices.launching(0)
        ends, kernel_ends = _ends(block, seconds_s), _ends(block, np.where(is_launch, 0.0, seconds_s))
        occupied_s: Floats = np.bincount(block.resources, seconds_s, self.tasks.prices.resources).astype(
            np.float64
        )
        last = np.empty(0, np.int32) if block.last_tasks is None else block.last_tasks
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


def _ends(block: TaskBlock, seconds: Floats) -> list[float]:
    """Return when each task of a block ends whose parts take so long, if nothing else is waited for."""
    lasts = np.cumsum(block.parts).tolist()
    ends = [
        float(seconds[last - parts : last].max(initial=0.0))
        for last, parts in zip(lasts, block.parts.tolist(), strict=True)
    ]
    alone_s = list(ends)
    for source, target in sorted(block.pairs.tolist(), key=itemgetter(1)):
        ends[target] = max(ends[target], ends[source] + alone_s[target])
    return ends
