"""Put each operator on one device, so that a step is as short as can be found: `--strategy placed`.

    nodes     what a group computes on one way, and its update; a group's nodes share a device
    times     of work, by the prices of the task graph; of transfers, between near devices and far ones
    memory    variables and their followers

cost/placement finds an answer for either time of transfers. Both, and everything on each of the devices, are
then improved by the task graph, which knows every link. The quickest whole plan is taken, and single
operators of it move as long as there is time and a whole plan is quicker.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import itemgetter

import numpy as np

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, run
from partc.compiler.search.operators.climb_plans import GroupChange, climb_plans
from partc.compiler.search.operators.own_space import OwnSpace
from partc.compiler.search.operators.walk_tasks import LEAST_GAIN, StepConfigs
from partc.compiler.search.search_limit import SearchLimit
from partc.compiler.search.whole_steps import Priced, WholeSteps
from partc.compiler.settle_options import begin_compilation
from partc.compiler.task_graphs.block_costs import BlockCosts
from partc.compiler.task_graphs.step_blocks import ParameterOf
from partc.compiler.task_graphs.step_tasks import StepTasks, compile_kernels
from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.cost.placement.latency.latency import MOST_SAT_NODES, list_schedule, place_for_latency
from partc.cost.placement.problems.problem import Node, Problem
from partc.cost.placement.throughput.conflicts import find_conflict
from partc.cost.strategy import MESH_STRATEGY_FORMAT, Strategy
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.search.operators.operator_space import OperatorConfig
from partc.runtime.errors import BadUsage, NoPlacement

SOLVER_SHARE = 0.25  # of the budget: for each of both problems
PICOSECONDS = 10**12  # times are in whole ones
TRIED = 3  # whole plans, besides everything on one device


def place_operators(read: Callable[[], TrainingGraph], cluster: Cluster, options: Options) -> Strategy:
    """Return a strategy of one device for each operator. Raises NoPlacement where none fits, BadUsage."""
    if options.batch == "per-replica":
        raise BadUsage(
            "operators on one device each make one replica of all of them",
            at="--strategy placed with --batch per-replica",
            fix="use --batch global",
        )
    options = replace(options, batch="global")
    limit = SearchLimit(options.search.budget_s, options.search.proposals)
    own = OwnSpace.of(_decided(read(), cluster, options))
    if own is None:
        raise BadUsage(
            "the step has nothing that could have a device of its own: no operator sums products",
            at="--strategy placed",
            fix="use another strategy, such as allreduce",
        )
    with limit.stopped():
        compile_kernels()
    together = _together(own)
    starts = [*_placements(own, options), *(state for state in together if _fits(own.tasks, state))]
    improved = sorted((_improved(own.tasks, start, limit.until_s) for start in starts), key=itemgetter(1))
    best = _BestPlan(own, WholeSteps(read, cluster, options))
    for state in dict.fromkeys((*(state for state, _ in improved[:TRIED]), *starts, *together)):
        best.is_quicker(state)
    if best.priced is None or best.state is None:
        assert best.price.failure is not None
        raise best.price.failure

    def goes_on(priced: int) -> bool:
        return priced < limit.part(1.0) and limit.left_s > best.price.usual_s

    climb_plans(own.tasks, lambda: _moves(own), best.state, best.is_quicker, goes_on, limit.until_s)
    return best.priced.strategy


@dataclass
class _BestPlan:
    """The quickest whole plan so far, and the state that it is of."""

    own: OwnSpace
    price: WholeSteps
    priced: Priced | None = None
    state: StepConfigs | None = None

    def is_quicker(self, state: StepConfigs) -> bool:
        """Price a state, and keep it where it is the quickest."""
        priced = self.price("placed", self.own.strategy(state))
        if priced is None or (self.priced is not None and priced.step_s >= self.priced.step_s):
            return False
        self.priced, self.state = priced, state
        return True


def _decided(training: TrainingGraph, cluster: Cluster, options: Options) -> Compilation:
    """Return the analysis of the step as one replica, of which nothing is split."""
    workers = sum(rank.replica is not None for rank in ranks_of(cluster))
    whole = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh={"data": 1, "tensor": workers})
    decided = replace(options, strategy=whole, strategy_name=options.asked_strategy)
    compilation = begin_compilation(training, cluster, decided)
    run(DECIDE, compilation)
    return compilation


def _on(worker: int) -> OperatorConfig:
    return OperatorConfig((("batch", 1),), (worker,))


def _moves(own: OwnSpace) -> Iterator[GroupChange]:
    """Yield each operator on each worker."""
    for group in range(len(own.groups)):
        for worker in range(own.space.workers):
            yield (group,), _on(worker)


def _together(own: OwnSpace) -> list[StepConfigs]:
    """Return everything on one device, for devices that take different times or have different memory."""
    states: dict[tuple[float | None, float], StepConfigs] = {}
    for worker in range(own.space.workers):
        state = (_on(worker),) * len(own.groups)
        limit_bytes = float(own.tasks.prices.limits_bytes[worker])
        states.setdefault((own.tasks.begin(state), limit_bytes), state)
    return list(states.values())


def _fits(tasks: StepTasks, state: StepConfigs) -> bool:
    return tasks.begin(state) is not None and not tasks.exceeds_memory


def _placements(own: OwnSpace, options: Options) -> Iterator[StepConfigs]:
    """Yield the solver's answers. Raises NoPlacement where variables do not fit."""
    costs = BlockCosts(own.tasks)
    workers = own.space.workers
    for other in dict.fromkeys((1, workers - 1)) if workers > 1 else (0,):
        step = _StepProblem(own, costs, other)
        problem, groups = step.problem(), step.group_of
        _check_fits(own, problem, groups)
        schedule = place_for_latency(
            problem,
            seconds=SOLVER_SHARE * options.search.budget_s,
            seed=options.search.drawn_seed,
            annealed=len(problem.nodes) > MOST_SAT_NODES,
        ).schedule
        device_of = dict(zip(groups, schedule.placement.device_of, strict=True))
        yield tuple(_on(device_of[group]) for group in range(len(own.groups)))


class _StepProblem:
    """A step as a placement problem: a node for each block, and for each variable that another group reads.

    `group_of`: each node's. Tensors that cross take what they do from the first worker to `other`.
    """

    def __init__(self, own: OwnSpace, costs: BlockCosts, other: int) -> None:
        self._own, self._costs = own, costs
        self._here, self._there = _on(0), _on(other)
        self.group_of: list[int] = []
        self._seconds: list[float] = []
        self._edges: dict[tuple[int, int], None] = {}
        self._sent_s: dict[tuple[int, object], float] = {}  # by node, and what is sent
        self._memory = np.zeros(len(own.groups))
        self._computing = {
            number: self._add(block.group, costs.compute(number, self._here).seconds)
            for number, block in costs.computing.items()
        }
        self._add_readings()
        for number in costs.updates:
            self._add_updates(number)

    def problem(self) -> Problem:
        """Return the nodes, a colour for each group, and the devices."""
        cost = np.zeros(len(self.group_of))
        for (source, _), seconds in self._sent_s.items():
            cost[source] += seconds
        first = {group: node for node, group in reversed(list(enumerate(self.group_of)))}
        nodes = []
        for node, (group, seconds) in enumerate(zip(self.group_of, self._seconds, strict=True)):
            size = Fraction(int(self._memory[group]) if first[group] == node else 0)
            name, ticks = self._own.groups[group].node, _ticks(seconds)
            nodes.append(Node(name, ticks, ticks, _ticks(cost[node]), size, group))
        limits = [Fraction(int(limit)) for limit in self._own.tasks.prices.limits_bytes]
        own_memory = tuple(limits) if len(set(limits)) > 1 else None
        return Problem(tuple(nodes), tuple(self._edges), len(limits), 0, max(limits), own_memory)

    def _add(self, group: int, seconds: float) -> int:
        self.group_of.append(group)
        self._seconds.append(seconds)
        return len(self.group_of) - 1

    def _add_readings(self) -> None:
        node_of_variable: dict[int, int] = {}  # variable -> its node
        for reading in self._costs.readings:
            group, reader = reading.groups
            if reading.maker is not None:
                source = self._computing[reading.maker]
            elif group == reader:
                continue
            else:
                if reading.tensor not in node_of_variable:
                    node_of_variable[reading.tensor] = self._add(group, 0.0)
                source = node_of_variable[reading.tensor]
            self._edges[source, self._computing[reading.reader]] = None
            if group != reader:
                sent = self._costs.send(reading, self._here, self._there)
                self._sent_s[source, reading.tensor] = sent.seconds

    def _add_updates(self, number: int) -> None:
        update = self._costs.updates[number]
        for parameter in update.parameters:
            home = parameter.home
            applied = ParameterOf(parameter.name, parameter.place, home, ())
            alone = self._costs.update(number, [applied], {home: self._here})
            self._memory[home] += alone.memory[0]
            node = self._add(home, alone.seconds)
            for term in parameter.terms:
                source = self._computing[update.sources[term.slot]]
                self._edges[source, node] = None
                if term.group != home:
                    configs = {home: self._there, term.group: self._here}
                    moved = self._costs.update(number, [replace(applied, terms=(term,))], configs)
                    self._sent_s[source, term.name] = moved.seconds - alone.seconds


def _ticks(seconds: float) -> Fraction:
    return Fraction(round(seconds * PICOSECONDS), PICOSECONDS)


def _check_fits(own: OwnSpace, problem: Problem, groups: list[int]) -> None:
    """Raise NoPlacement where no placement fits, with the smallest set of operators that conflict."""
    if list_schedule(problem) is not None:
        return
    conflict = find_conflict(problem, contiguous=False)
    if conflict is None:
        return
    operators = [own.groups[group].node for group in dict.fromkeys(groups[node] for node in conflict.nodes)]
    size = sum((problem.nodes[node].size for node in conflict.nodes), Fraction(0))
    changes = []
    if conflict.least_memory is not None:
        changes.append(f"devices of {_gigabytes(conflict.least_memory)} for variables")
    if conflict.least_accelerators is not None:
        changes.append(f"{conflict.least_accelerators} devices")
    changes.append("divide operators: --strategy search, tensor=K or fsdp")
    raise NoPlacement(
        f"no placement fits: variables of {len(operators)} operators take {_gigabytes(size)} together, and "
        f"{_told_memories(problem)}",
        at=f"--strategy placed: {', '.join(map(repr, operators[:8]))}{' ...' * (len(operators) > 8)}",
        fix="use " + ", or ".join(changes),
    )


def _told_memories(problem: Problem) -> str:
    least, most = min(problem.memories), max(problem.memories)
    if least == most:
        return f"{problem.accelerators} devices have {_gigabytes(most)} each"
    return f"{problem.accelerators} devices have from {_gigabytes(least)} to {_gigabytes(most)}"


def _gigabytes(nbytes: Fraction) -> str:
    return f"{float(nbytes) / 1e9:.3g} GB"


def _improved(tasks: StepTasks, start: StepConfigs, until_s: float) -> tuple[StepConfigs, float]:
    """Return a state no slower for any one operator elsewhere, if there is time; and its seconds."""
    state, step_s = list(start), tasks.begin(start)
    assert step_s is not None, "an operator on one device can be"
    workers = len(tasks.prices.workers)
    is_better = True
    while is_better and time.monotonic() < until_s:
        is_better = False
        for group in range(len(state)):
            for worker in range(workers):
                if state[group] == _on(worker) or time.monotonic() > until_s:
                    continue
                found_s = tasks.move({group: _on(worker)}, step_s)
                if found_s is None:
                    continue
                if found_s < step_s * (1 - LEAST_GAIN):
                    state[group], step_s, is_better = _on(worker), found_s, True
                else:
                    tasks.undo()
    return tuple(state), step_s
