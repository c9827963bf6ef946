"""A placement problem: nodes with a time per kind of device, edges that cost time where they cross, memory.

    accelerator    sum of its nodes' accelerator times + cost of every node u whose output crosses its border,
                   once per u: the accelerator holds some, but not all, of u and the readers of u
    CPU            sum of its nodes' CPU times
    throughput     the greatest load of a device is made as small as possible

Nodes of one colour share a device. `contiguous` asks for an order of the devices in which no forward node
reads from a later device than its own; backward nodes follow their colour, or go anywhere without one.

Source: J. Tarnawski and others, Efficient algorithms for device placement of DNN graph operators, NeurIPS
2020.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from partc.runtime.errors import InputError


class BadPlacementProblem(InputError):
    """A placement problem's file, or record, contradicts itself."""


@dataclass(frozen=True)
class Node:
    """One operator. Times and costs in the problem's own unit of time; `None`: accelerators cannot run it."""

    name: str
    cpu_time: Fraction
    accelerator_time: Fraction | None
    output_cost: Fraction
    size: Fraction = Fraction(0)
    colour: int | None = None
    backward: bool = False


@dataclass(frozen=True)
class Problem:
    """Nodes, edges (producer, reader) by position, and the devices: equal accelerators, and equal CPUs.

    own_memory  of each accelerator where they differ in it, none above `accelerator_memory`; contiguous
                answers do not know it
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    accelerators: int
    cpus: int
    accelerator_memory: Fraction
    own_memory: tuple[Fraction, ...] | None = None

    def __post_init__(self) -> None:
        if self.accelerators < 0 or self.cpus < 0 or self.accelerators + self.cpus == 0:
            fix = "give counts of at least 0, and one device at least"
            raise BadPlacementProblem("there is no device", at="problem: devices", fix=fix)
        for source, target in self.edges:
            if not (0 <= source < len(self.nodes) and 0 <= target < len(self.nodes)) or source == target:
                fix = "name two different nodes of the problem"
                raise BadPlacementProblem("an edge leads nowhere", at=f"edge {source} -> {target}", fix=fix)
        for node in self.nodes:
            numbers = (node.cpu_time, node.accelerator_time or 0, node.output_cost, node.size)
            if min(numbers) < 0:
                fix = "give times, costs and sizes of at least 0"
                raise BadPlacementProblem("a negative number", at=f"node '{node.name}'", fix=fix)

    @property
    def devices(self) -> int:
        """Accelerators, which come first, and CPUs."""
        return self.accelerators + self.cpus

    def is_accelerator(self, device: int) -> bool:
        """Whether this device is an accelerator."""
        return device < self.accelerators

    @property
    def memories(self) -> tuple[Fraction, ...]:
        """The memory of each accelerator."""
        return self.own_memory or (self.accelerator_memory,) * self.accelerators

    @cached_property
    def families(self) -> tuple[tuple[int, ...], ...]:
        """Per node: itself and the readers of its output, without repetition."""
        families: list[list[int]] = [[node] for node in range(len(self.nodes))]
        for source, target in self.edges:
            families[source].append(target)
        return tuple(tuple(dict.fromkeys(family)) for family in families)

    @cached_property
    def colours(self) -> tuple[int, ...]:
        """Per node: the number of its set of nodes that share a device, counted from 0 by first node."""
        numbers: dict[object, int] = {}
        keys = (("node", i) if n.colour is None else ("colour", n.colour) for i, n in enumerate(self.nodes))
        return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


@dataclass(frozen=True)
class NodePlacement:
    """A device per node; contiguous answers give the order of the devices too."""

    device_of: tuple[int, ...]
