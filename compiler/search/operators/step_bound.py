"""A step's seconds from below, where only some kinds of operators are configured yet.

    path     what a way through the step takes: blocks and what is sent between them, one behind the other,
             each under the configurations that are known, at its least where they are not
    busy     what the busiest worker computes, and the busiest communication or lane sends, so far; and what
             sums of gradients take it, behind the first of them that may begin
    work     all work, at its least where a configuration is not known, divided among all workers

None counts that tasks wait for workers or links that others use, so that no step is shorter. Of a tensor
only one reader counts, and of a bucket of gradients, whose messages are joined, the costliest kind.
Bounds are of many states at once: int[states, kinds] of configurations' numbers; the number behind the
last stands for one that is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from partc.compiler.search.operators.own_space import Kinds
from partc.compiler.search.operators.search_additively import terms_within
from partc.compiler.task_graphs.block_costs import Alone, BlockCosts, Reading
from partc.compiler.task_graphs.step_blocks import ParameterOf
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.cost.simulation.task_arrays import Floats
from partc.passes.search.operators.operator_space import OperatorConfig

States = npt.NDArray[np.int16]
ROUNDING = 1e-9  # of a step: sums in another order


@dataclass(frozen=True, slots=True)
class _Table:
    """Numbers by the configurations of one or two kinds, the least ones last: [.. + 1, (.. + 1,) ...]."""

    kinds: tuple[int, ...]
    values: Floats

    def at(self, states: States) -> Floats:
        """Return what states have, [states, ...]."""
        rows: Floats = self.values[tuple(states[:, kind] for kind in self.kinds)]
        return rows


@dataclass(frozen=True, slots=True)
class _Node:
    """A block's least seconds, and what it waits for behind the first result of each maker, or anyway."""

    seconds: _Table
    edges: tuple[tuple[int | None, _Table], ...]


class StepBound:
    """Bounds for the kinds of a step."""

    def __init__(self, tasks: StepTasks, kinds: Kinds) -> None:
        self._kinds = kinds
        self._costs = BlockCosts(tasks)
        self._kind_of = kinds.of_group
        self._nodes: dict[int, _Node] = {}
        self._updates: list[tuple[int, _Table]] = []
        self._computing: list[Floats] = [np.zeros(0)] * len(kinds.groups)
        self._sending: dict[tuple[int, ...], Floats] = {}  # what adds up
        self._joined: list[
            tuple[list[int], list[_Table]]
        ] = []  # of each bucket: its makers, and what does not
        self._add_computing()
        self._add_readings()
        for number in self._costs.updates:
            self._add_update(number)
        self._work = [_least_last((k,), own.sum(axis=1)) for k, own in enumerate(self._computing)]
        self._busy = [_least_last((k,), own, 0.0) for k, own in enumerate(self._computing)]
        self._sent = [_least_last(ends, values) for ends, values in self._sending.items()]

    def __call__(self, states: States) -> Floats:
        """Return what no step is below, float64[states]."""
        ends: dict[int | None, Floats] = {None: np.zeros(len(states))}
        longest = np.zeros(len(states))
        for number, node in self._nodes.items():
            begin = np.zeros(len(states))
            for source, seconds in node.edges:
                np.maximum(begin, ends[source] + seconds.at(states), out=begin)
            ends[number] = begin + node.seconds.at(states)
            np.maximum(longest, ends[number], out=longest)
        for source, seconds in self._updates:
            np.maximum(longest, ends[source] + seconds.at(states), out=longest)
        busy_s = sum(table.at(states) for table in self._busy)
        work_s = sum(table.at(states) for table in self._work)
        assert isinstance(busy_s, np.ndarray) and isinstance(work_s, np.ndarray), "there are kinds"
        np.maximum(longest, busy_s.max(axis=1), out=longest)
        np.maximum(longest, work_s / busy_s.shape[1], out=longest)
        sending_s = np.zeros((len(states), self._resources))
        for table in self._sent:
            sending_s += table.at(states)
        behind_s, ready_s = np.zeros_like(sending_s), np.full(len(states), np.inf)
        for makers, joined in reversed(self._joined):
            behind_s += np.maximum.reduce([table.at(states) for table in joined])
            np.minimum(ready_s, np.minimum.reduce([ends[maker] for maker in makers]), out=ready_s)
            np.maximum(longest, ready_s + behind_s.max(axis=1), out=longest)
        np.maximum(longest, (sending_s + behind_s).max(axis=1), out=longest)
        return longest * (1 - ROUNDING)

    @property
    def _resources(self) -> int:
        prices = self._costs.tasks.prices
        return prices.resources - len(prices.workers)

    def _add_computing(self) -> None:
        for number, block in self._costs.computing.items():
            kind = self._kind_of[block.group]
            alone = [self._costs.compute(number, config) for config in self._kinds.configs[kind]]
            self._occupy(kind, alone)
            self._add_sending((kind,), np.array([each.sending_s for each in alone]))
            first_s = _least_last((kind,), np.array([each.first_s for each in alone]))
            self._nodes[number] = _Node(first_s, ())

    def _occupy(self, kind: int, alone: Sequence[Alone]) -> None:
        own = np.array([each.computing_s for each in alone])
        self._computing[kind] = own if not self._computing[kind].size else self._computing[kind] + own

    def _add_sending(self, kinds: tuple[int, ...], sending_s: Floats) -> None:
        self._sending[kinds] = self._sending.get(kinds, 0.0) + sending_s

    def _add_readings(self) -> None:
        counted: dict[tuple[int, tuple[int, ...]], Floats] = {}
        edges: dict[tuple[int, int | None, tuple[int, ...]], Floats] = {}
        for reading in self._costs.readings:
            kinds, waited_s, sending_s = self._read(reading)
            edge = reading.reader, reading.maker, kinds
            edges[edge] = np.maximum(edges.get(edge, 0.0), waited_s)
            count = reading.tensor, kinds
            counted[count] = np.maximum(counted.get(count, 0.0), sending_s)
        for (reader, maker, kinds), seconds in edges.items():
            node = self._nodes[reader]
            table = _least_last(kinds, seconds)
            self._nodes[reader] = _Node(node.seconds, (*node.edges, (maker, table)))
        most: dict[int, tuple[float, tuple[int, ...]]] = {}
        for (tensor, kinds), sending_s in counted.items():
            most[tensor] = max(most.get(tensor, (-1.0, ())), (float(sending_s.mean()), kinds))
        for tensor, (_, kinds) in most.items():
            self._add_sending(kinds, counted[tensor, kinds])

    def _read(self, reading: Reading) -> tuple[tuple[int, ...], Floats, Floats]:
        """Return the kinds of a tensor's ends, and by their configurations what is waited and occupied."""
        j, k = (self._kind_of[group] for group in reading.groups)
        ours, theirs = self._kinds.configs[j], self._kinds.configs[k]
        if j == k:
            sent = [self._costs.send(reading, config, config) for config in ours]
            return (j,), np.array([s.seconds for s in sent]), np.array([s.sending_s for s in sent])
        rows = [[self._costs.send(reading, one, other) for other in theirs] for one in ours]
        waited = np.array([[s.seconds for s in row] for row in rows])
        return (j, k), waited, np.array([[s.sending_s for s in row] for row in rows])

    def _add_update(self, number: int) -> None:
        """Add what a bucket's parameters of one kind take whose gradients come from one kind."""
        costs, update = self._costs, self._costs.updates[number]
        joined, makers_of = [], set[int]()
        groups_of = [frozenset(groups) for groups in self._kinds.groups]
        for home, makers in product(range(len(groups_of)), repeat=2):
            own = terms_within(update, groups_of[home], groups_of[makers])
            if not own:
                continue
            if home == makers:
                applied = [ParameterOf(p.name, p.place, p.home, ()) for p in own]
                configs = self._kinds.configs[home]
                every = [costs.update(number, applied, dict.fromkeys(groups_of[home], c)) for c in configs]
                self._occupy(home, every)
            kinds, summed = self._summed(number, own, home, makers)
            seconds = _least_last(kinds, _each(summed, "seconds"))
            sources = {update.sources[term.slot] for parameter in own for term in parameter.terms}
            self._updates += [(source, seconds) for source in sorted(sources)]
            makers_of |= sources
            joined.append((kinds, _each(summed, "sending_s")))
        if len(joined) > 1:  # more bytes take longer, but may go over other lanes
            workers = len(costs.tasks.prices.workers)
            for _, sending_s in joined:
                sending_s[..., workers:] = 0.0
        if joined and makers_of:
            tables = [_least_last(kinds, sending_s) for kinds, sending_s in joined]
            self._joined.append((sorted(makers_of), tables))

    def _summed(
        self, number: int, own: Sequence[ParameterOf], home: int, makers: int
    ) -> tuple[tuple[int, ...], list[Alone] | list[list[Alone]]]:
        """Return the kinds of parameters and of their gradients, and what these take by configurations."""
        ours, theirs = (dict.fromkeys(self._kinds.groups[kind]) for kind in (home, makers))

        def taken(one: OperatorConfig, other: OperatorConfig) -> Alone:
            return self._costs.update(number, own, dict.fromkeys(ours, one) | dict.fromkeys(theirs, other))

        configs = self._kinds.configs
        if home == makers:
            return (home,), [taken(config, config) for config in configs[home]]
        return (home, makers), [[taken(one, other) for other in configs[makers]] for one in configs[home]]


def _each(alone: list[Alone] | list[list[Alone]], name: str) -> Floats:
    """Return one number of each, or several, by configurations."""
    rows = [[getattr(each, name) for each in (row if isinstance(row, list) else [row])] for row in alone]
    values: Floats = np.array(rows)
    return values if isinstance(alone[0], list) else values[:, 0]


def _least_last(kinds: tuple[int, ...], values: Floats, least: float | None = None) -> _Table:
    """Return a table with its least values, or others, behind the last configuration of each kind."""
    for axis in range(len(kinds)):
        below = values.min(axis=axis, keepdims=True)
        values = np.concatenate((values, below if least is None else np.full_like(below, least)), axis=axis)
    return _Table(kinds, values)
