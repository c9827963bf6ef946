"""Put each operator on one device, so that a step is as short as can be found: `--strategy placed`.

    nodes     what a group computes on one way, and its update; a group's nodes share a device
    times     of work, by the prices of the task graph; of transfers, between near devices and far ones
    memory    variables and their followers

cost/placement finds an answer for either time of transfers. Both, and everything on each of the devices, are
then improved by the task graph, which knows every link, and the quickest whole plan is taken.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, run
from partc.compiler.planning.block_costs import BlockCosts
from partc.compiler.planning.own_space import OwnSpace
from partc.compiler.planning.step_blocks import ParameterOf
from partc.compiler.planning.step_tasks import StepTasks
from partc.compiler.planning.walk_tasks import LEAST_GAIN, State
from partc.compiler.planning.whole_steps import Priced, WholeSteps
from partc.compiler.settle_options import settle_options
from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.cost.placement.conflicts import find_conflict
from partc.cost.placement.latency import MOST_SAT_NODES, list_schedule, place_for_latency
from partc.cost.placement.problem import Node, Problem
from partc.cost.strategy import MESH_STRATEGY_FORMAT, Strategy
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.search.operator_space import OperatorConfig
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
    until_s = time.monotonic() + options.search.budget_s
    own = OwnSpace.of(_decided(read(), cluster, options))
    if own is None:
        raise BadUsage("the step has no operators", at="--strategy placed", fix="use another strategy")
    together = [(_on(worker),) * len(own.groups) for worker in range(own.space.workers)]
    states = {state: _improved(own.tasks, state, until_s) for state in _placements(own, options)}
    states |= {
        state: _improved(own.tasks, state, until_s) for state in together[:1] if _fits(own.tasks, state)
    }
    price = WholeSteps(read, cluster, options)
    best: Priced | None = None
    found = sorted(set(states.values()), key=lambda each: each[1])
    for state in dict.fromkeys((*(state for state, _ in found[:TRIED]), *states, *together)):
        priced = price("placed", own.strategy(state))
        if priced is not None and (best is None or priced.step_s < best.step_s):
            best = priced
    if best is None:
        assert price.failure is not None
        raise price.failure
    return best.strategy


def _decided(training: TrainingGraph, cluster: Cluster, options: Options) -> Compilation:
    """Return the analysis of the step as one replica, of which nothing is split."""
    workers = sum(rank.replica is not None for rank in ranks_of(cluster))
    whole = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh={"data": 1, "tensor": workers})
    settled = settle_options(replace(options, strategy=whole), training)
    compilation = Compilation(training, cluster, settled)
    run(DECIDE, compilation)
    return compilation


def _on(worker: int) -> OperatorConfig:
    return OperatorConfig((("batch", 1),), (worker,))


def _fits(tasks: StepTasks, state: State) -> bool:
    return tasks.begin(state) is not None and not tasks.exceeds_memory


def _placements(own: OwnSpace, options: Options) -> Iterator[State]:
    """Yield the solver's answers. Raises NoPlacement where variables do not fit."""
    costs = BlockCosts(own.tasks)
    workers = own.space.workers
    for other in dict.fromkeys((1, workers - 1)) if workers > 1 else (0,):
        problem, groups = _problem(own, costs, other)
        _check_fits(own, problem, groups)
        schedule = place_for_latency(
            problem,
            seconds=SOLVER_SHARE * options.search.budget_s,
            seed=options.search.seed,
            annealed=len(problem.nodes) > MOST_SAT_NODES,
        ).schedule
        device_of = dict(zip(groups, schedule.placement.device_of, strict=True))
        yield tuple(_on(device_of[group]) for group in range(len(own.groups)))


def _problem(own: OwnSpace, costs: BlockCosts, other: int) -> tuple[Problem, list[int]]:
    """Return the placement problem, and the group of each node. `other`: the worker that tensors go to."""
    tasks, here, there = own.tasks, _on(0), _on(other)
    limits = tasks.prices.limits_bytes
    seconds: list[float] = []
    groups: list[int] = []
    number_of: dict[object, int] = {}

    def add(name: object, group: int, taken_s: float) -> int:
        number_of[name] = len(groups)
        groups.append(group)
        seconds.append(taken_s)
        return number_of[name]

    for number, block in costs.computing.items():
        add(number, block.group, costs.compute(number, here).seconds)
    edges: dict[tuple[int, int], None] = {}
    sent: dict[tuple[int, int], float] = {}
    for reading in costs.readings:
        group, reader = reading.groups
        if reading.maker is None and group == reader:
            continue
        kept = reading.tensor, "kept"
        source = number_of[reading.maker] if reading.maker is not None else number_of.get(kept)
        if source is None:
            source = add(kept, group, 0.0)
        edges[source, number_of[reading.reader]] = None
        if group != reader:
            sent[source, reading.tensor] = costs.send(reading, here, there).seconds
    memory = np.zeros(len(own.groups))
    for number, update in costs.updates.items():
        for parameter in update.parameters:
            applied = ParameterOf(parameter.name, parameter.place, parameter.home, ())
            alone = costs.update(number, [applied], {parameter.home: here})
            memory[parameter.home] += alone.memory[0]
            node = add((number, parameter.name), parameter.home, alone.seconds)
            for term in parameter.terms:
                source = number_of[update.sources[term.slot]]
                edges[source, node] = None
                if term.group != parameter.home:
                    configs = {parameter.home: there, term.group: here}
                    one = replace(applied, terms=(term,))
                    moved_s = costs.update(number, [one], configs).seconds - alone.seconds
                    sent[source, number] = max(sent.get((source, number), 0.0), moved_s)
    cost = [0.0] * len(groups)
    for (source, _), moved_s in sent.items():
        cost[source] += moved_s
    first = {group: node for node, group in reversed(list(enumerate(groups)))}
    nodes = tuple(
        Node(
            own.groups[group].node,
            _ticks(taken_s),
            _ticks(taken_s),
            _ticks(moved_s),
            Fraction(int(memory[group]) if first[group] == node else 0),
            group,
        )
        for node, (group, taken_s, moved_s) in enumerate(zip(groups, seconds, cost, strict=True))
    )
    problem = Problem(nodes, tuple(edges), len(limits), 0, Fraction(int(limits.max())))
    return problem, groups


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
    size = sum(problem.nodes[node].size for node in conflict.nodes)
    changes = []
    if conflict.least_memory is not None:
        changes.append(f"devices of {_gigabytes(conflict.least_memory)} for variables")
    if conflict.least_accelerators is not None:
        changes.append(f"{conflict.least_accelerators} devices")
    changes.append("divide operators: --strategy search, tensor=K or fsdp")
    raise NoPlacement(
        f"no placement fits: variables of {len(operators)} operators take {_gigabytes(size)} together, and "
        f"{problem.accelerators} devices have {_gigabytes(problem.accelerator_memory)} each",
        at=f"--strategy placed: {', '.join(map(repr, operators[:8]))}{' ...' * (len(operators) > 8)}",
        fix="use " + ", or ".join(changes),
    )


def _gigabytes(nbytes: Fraction) -> str:
    return f"{float(nbytes) / 1e9:.3g} GB"


def _improved(tasks: StepTasks, start: State, until_s: float) -> tuple[State, float]:
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
