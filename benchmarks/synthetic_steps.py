"""Training steps as task graphs without a model: layers in a line, or unrolled recurrences, under strategies
drawn at random. The delta simulation is measured and tested on them.

A device belongs to a host of four. Resources are devices, then each host's bus, then each host's way out.
An operator has a forward and a backward block; a block of transfers precedes the forward block for each
operator that it reads, and another the backward block for each that reads it; a parameter has a block of
reductions, on the bus and then in a ring of hosts, and of updates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from partc.cost.simulation.task_arrays import OWN
from partc.cost.simulation.task_graph import BlockTasks, TaskGraph

PER_HOST = 4
BUS_BYTES_PER_S, OUT_BYTES_PER_S, LATENCY_S = 1e10, 1e10, 1e-5


@dataclass(frozen=True, slots=True)
class Operator:
    """`parameter`: which one it reads, or -1. `forward_s` on one device; backward takes twice that."""

    name: str
    reads: tuple[int, ...]
    parameter: int
    forward_s: float
    output_bytes: float


@dataclass(frozen=True, slots=True)
class Step:
    """Operators in the order of the step, and the bytes of parameters."""

    name: str
    operators: tuple[Operator, ...]
    parameter_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Configuration:
    """The device of each part, and whether parts are of the batch (else of the parameter)."""

    devices: tuple[int, ...]
    by_sample: bool


def layers(count: int) -> Step:
    """A line of operators with a parameter each, as convolutions are."""
    operators = [
        Operator(f"layer{index}", (index - 1,) if index else (), index, 20e-3, 5e7 / (1 + index % 7))
        for index in range(count)
    ]
    return Step(f"{count} layers", tuple(operators), tuple(4e6 * (1 + index % 5) for index in range(count)))


def recurrence(steps: int, depth: int) -> Step:
    """An encoder and a decoder of `depth` layers each, unrolled, attention, and a softmax a step."""
    operators: list[Operator] = []

    def add(name: str, reads: tuple[int, ...], parameter: int, forward_s: float, output_bytes: float) -> int:
        operators.append(Operator(name, reads, parameter, forward_s, output_bytes))
        return len(operators) - 1

    def unroll(first: int, start: list[int]) -> list[int]:
        below: list[int] = []
        for layer in range(depth):
            line: list[int] = []
            for time in range(steps):
                reads = (*below[time : time + 1], *(line[-1:] or start[layer : layer + 1]))
                line.append(add(f"lstm{first + layer}.{time}", reads, first + layer, 4e-3, 2.6e5))
            below = line
            ends.append(line[-1])
        return below

    ends: list[int] = []
    encoded = unroll(0, [])
    memory = add("memory", tuple(encoded), -1, 1e-4, 1e7)
    decoded = unroll(depth, ends[:depth])
    for time in range(steps):
        attended = add(f"attention.{time}", (decoded[time], memory), 2 * depth, 2e-3, 2.6e5)
        add(f"softmax.{time}", (attended,), 2 * depth + 1, 8e-3, 1e3)
    sizes = (*[3.3e7] * (2 * depth), 8e6, 1.3e8)
    return Step(f"{2 * depth} LSTMs x {steps} steps", tuple(operators), sizes)


class Blocks:
    """The blocks of a step on `devices` devices: their numbers, and their contents under a strategy."""

    def __init__(self, step: Step, devices: int) -> None:
        self.step, self.devices = step, devices
        self.hosts = -(-devices // PER_HOST)
        self._number: dict[tuple[str, int, int], int] = {}
        readers: list[list[int]] = [[] for _ in step.operators]
        for index, operator in enumerate(step.operators):
            for source in operator.reads:
                self._append("to", source, index)
                readers[source].append(index)
            self._append("forward", index)
        self._members: list[list[int]] = [[] for _ in step.parameter_bytes]
        for index, operator in reversed(list(enumerate(step.operators))):
            for reader in readers[index]:
                self._append("back", reader, index)
            self._append("backward", index)
            if operator.parameter >= 0:
                self._members[operator.parameter].append(index)
        for parameter in range(len(step.parameter_bytes)):
            self._append("reduce", parameter)
        self._readers = readers

    def _append(self, kind: str, one: int, other: int = -1) -> None:
        self._number[kind, one, other] = len(self._number)

    def graph(self) -> TaskGraph:
        sources = [self._sources(*key) for key in self._number]
        return TaskGraph(sources, self.devices + 2 * self.hosts)

    def _sources(self, kind: str, one: int, other: int) -> list[int]:
        """Return the blocks that a block waits for, by slot."""
        if kind in ("to", "back"):
            return [self._number["forward" if kind == "to" else "backward", one, -1]]
        if kind == "forward":
            return [self._number["to", source, one] for source in self.step.operators[one].reads]
        if kind == "backward":
            readers = [self._number["back", reader, one] for reader in self._readers[one]]
            return [self._number["forward", one, -1], *readers]
        return [self._number["backward", operator, -1] for operator in self._members[one]]

    def data_parallel(self) -> list[Configuration]:
        return [Configuration(tuple(range(self.devices)), True) for _ in self.step.operators]

    def draw(self, rng: np.random.Generator) -> Configuration:
        """Return a power of two of neighbouring devices, by sample or by parameter."""
        parts = 1 << int(rng.integers(0, self.devices.bit_length()))
        first = parts * int(rng.integers(0, self.devices // parts))
        return Configuration(tuple(range(first, first + parts)), bool(rng.random() < 0.5))

    def all_contents(self, strategy: list[Configuration]) -> dict[int, BlockTasks]:
        contents: dict[int, BlockTasks] = {}
        for operator in range(len(strategy)):
            contents |= self.contents(strategy, operator)
        return contents

    def contents(self, strategy: list[Configuration], operator: int) -> Mapping[int, BlockTasks]:
        """Return what depends on an operator's configuration."""
        record = self.step.operators[operator]
        found = {
            self._number["forward", operator, -1]: self._computed(strategy, operator, "forward"),
            self._number["backward", operator, -1]: self._computed(strategy, operator, "backward"),
        }
        for reader in self._readers[operator]:
            found[self._number["forward", reader, -1]] = self._computed(strategy, reader, "forward")
        for source in record.reads:
            found[self._number["backward", source, -1]] = self._computed(strategy, source, "backward")
        edges = [(source, operator) for source in record.reads]
        edges += [(operator, reader) for reader in self._readers[operator]]
        for source, target in edges:
            found[self._number["to", source, target]] = self._sent(strategy, "to", source, target)
            found[self._number["back", target, source]] = self._sent(strategy, "back", target, source)
        if record.parameter >= 0:
            number = self._number["reduce", record.parameter, -1]
            found[number] = self._reduced(strategy, record.parameter)
        return found

    def _computed(self, strategy: list[Configuration], operator: int, kind: str) -> BlockTasks:
        parts = len(strategy[operator].devices)
        seconds = self.step.operators[operator].forward_s / parts * (2 if kind == "backward" else 1)
        rows = []
        others = self.step.operators[operator].reads if kind == "forward" else self._readers[operator]
        if kind == "backward":
            rows = [(0, part, part) for part in range(parts)]
        for slot, other in enumerate(others, start=len(rows) > 0):
            pairs = enumerate(_pairs(strategy[other], strategy[operator]))
            rows += [(slot, number, target) for number, (_, target) in pairs]
        return BlockTasks(
            np.ones(parts, np.int32),
            np.array(strategy[operator].devices, np.int32),
            np.full(parts, seconds + 1e-5),
            np.array(rows, np.int32).reshape(-1, 3),
        )

    def _sent(self, strategy: list[Configuration], kind: str, source: int, target: int) -> BlockTasks:
        """Return a task for each pair of parts, which takes no time where both are on one device."""
        here, there = strategy[source], strategy[target]
        pairs = _pairs(here, there)
        made_by = source if kind == "to" else target
        seconds = LATENCY_S + self.step.operators[made_by].output_bytes / len(pairs) / OUT_BYTES_PER_S
        ways = [self._way(here.devices[i], there.devices[j]) for i, j in pairs]
        is_sent = np.array([here.devices[i] != there.devices[j] for i, j in pairs])
        return BlockTasks(
            is_sent.astype(np.int32),
            np.array(ways, np.int32)[is_sent],
            np.full(int(is_sent.sum()), seconds),
            np.array([(0, i, number) for number, (i, _) in enumerate(pairs)], np.int32),
        )

    def _way(self, source: int, target: int) -> int:
        host = source // PER_HOST
        return self.devices + host + (self.hosts if host != target // PER_HOST else 0)

    def _reduced(self, strategy: list[Configuration], parameter: int) -> BlockTasks:
        users: dict[int, list[tuple[int, int]]] = {}
        for slot, operator in enumerate(self._members[parameter]):
            for part, device in enumerate(strategy[operator].devices):
                users.setdefault(device, []).append((slot, part))
        hosts = sorted({device // PER_HOST for device in users})
        size = self.step.parameter_bytes[parameter]
        devices = sorted(users)
        ring_s = LATENCY_S * len(hosts) + 2 * size * (len(hosts) - 1) / len(hosts) / OUT_BYTES_PER_S
        bus_s = LATENCY_S + size / BUS_BYTES_PER_S / PER_HOST
        resources = [self.devices + device // PER_HOST for device in devices]
        resources += [self.devices + self.hosts + host for host in hosts]
        resources += devices
        seconds = [bus_s] * len(devices) + [ring_s] * len(hosts) + [1e-4] * len(devices)
        rows = []
        for place, device in enumerate(devices):
            rows += [(slot, part, place) for slot, part in users[device]]
            ring = len(devices) + hosts.index(device // PER_HOST)
            rows.append((OWN, place, ring))
            rows.append((OWN, ring, len(devices) + len(hosts) + place))
        return BlockTasks(
            np.ones(len(resources), np.int32),
            np.array(resources, np.int32),
            np.array(seconds),
            np.array(rows, np.int32),
        )


def _pairs(here: Configuration, there: Configuration) -> list[tuple[int, int]]:
    """Return which parts of one operator those of another read."""
    p, q = len(here.devices), len(there.devices)
    if here.by_sample == there.by_sample:
        return [(i, j) for j in range(q) for i in range(j * p // q, max(j * p // q + 1, (j + 1) * p // q))]
    return [(i, j) for j in range(q) for i in range(p)]
