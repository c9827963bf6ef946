"""Asynchronous plans: one session of a worker with all servers, which every worker has for itself.

    synchronous step of one replica, all variables on servers ─ settle_stores ─ check ─> asynchronous plan

Several sessions share what servers own. A server takes no turns between two waits of a session, so a push
is lost only where an update reads a variable before a wait and writes it behind: such plans are refused.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import onnx

from partc.cost.cluster.cluster import Cluster
from partc.cost.named_strategy import NamedStrategy
from partc.cost.strategy import Batch, Mode, Strategy
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.runtime.asynchronous.servers.commit_point import first_unpushed
from partc.runtime.asynchronous.sessions.session import servers_of
from partc.runtime.errors import BadUsage, UnsupportedModel
from partc.runtime.plan.program import (
    Instruction,
    Plan,
    Rank,
    Run,
    SessionWorker,
    Start,
    Store,
    Wait,
    instructions_of,
)

_SYNCHRONOUS = "train it synchronously: leave --asynchronous out"


def strategy_of_sessions(strategy: Mode | NamedStrategy | Strategy, batch: Batch | None) -> Mode | Strategy:
    """Return the strategy that keeps everything on servers. Raises BadUsage for one that cannot."""
    if batch == "global":
        raise BadUsage(
            "one batch for all workers together, while none waits for the others",
            at="--batch global and --asynchronous",
            fix="leave --batch out: every worker runs the graph on batches of its own",
        )
    if strategy == "auto" or strategy == "ps":
        return "ps"
    if isinstance(strategy, Strategy) and not strategy.has_meshes:
        return strategy
    name = f"the strategy {strategy!r}" if isinstance(strategy, str) else "a strategy on a mesh"
    raise BadUsage(
        f"{name}, under which workers meet",
        at="--strategy and --asynchronous",
        fix="use ps, or leave --strategy out",
    )


def make_sessions(plan: Plan, lowered: LoweredGraph, cluster: Cluster, folder: Path) -> Plan:
    """Return the asynchronous plan of a session's plan. Raises UnsupportedModel."""
    workers = tuple(
        SessionWorker(host.name, device.name, device.kind, device.index, device.threads)
        for host in cluster.hosts
        for device in host.devices
    )
    plan = msgspec.structs.replace(plan, instructions=_settle_stores(plan.instructions), asynchronous=workers)
    _check_server_variables(plan)
    _check_counters(lowered)
    for rank in servers_of(plan):
        _check_updates(plan, rank, folder)
    _check_pushes(plan)
    return plan


def _settle_stores(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Move what servers store to where it is made, or behind the last reader of what it replaces."""
    program = [i for i in instructions if not (isinstance(i, Store) and i.site == "server")]
    for store in instructions:
        if isinstance(store, Store) and store.site == "server":
            touching = [at for at, i in enumerate(program) if {store.source, store.target} & set(_values(i))]
            last = max(touching, default=len(program) - 1)
            previous = program[last]
            if isinstance(previous, Start):
                last = program.index(Wait(previous.tag_id))
            program.insert(last + 1, store)
    return tuple(program)


def _values(instruction: Instruction) -> Iterator[str]:
    match instruction:
        case Run(site="server", reads=reads, writes=writes):
            yield from (value for _, value in (*reads, *writes))
        case Start(reads=names, writes=results):
            yield from (*names, *results)


def _check_server_variables(plan: Plan) -> None:
    """Refuse parameters, and slots of theirs, that workers hold; and a step that has no others."""
    replicated = {h.variable for rank in plan.ranks for h in rank.pieces if h.box is None}
    if not any(h.box is not None for rank in plan.ranks for h in rank.pieces):
        raise UnsupportedModel(
            "no variable is updated by a gradient that could be pushed to a server",
            at=plan.model,
            fix=f"see what `partc inspect` takes for parameters, or {_SYNCHRONOUS}",
        )
    for variable in plan.variables:
        if variable.name in replicated and variable.role != "other":
            raise UnsupportedModel(
                f"{variable.name!r} cannot live on servers, where asynchronous training keeps what it trains",
                at=f"variable {variable.name!r} ({variable.role})",
                fix=f"let its update work on rows, or {_SYNCHRONOUS}",
            )


def _check_counters(lowered: LoweredGraph) -> None:
    """Refuse what is made of a whole variable of the servers and crosses to workers, or back.

    Such a variable, a counter of steps, counts all pushes on servers but a worker's own steps there.
    """
    whole = {s.variable for s in lowered.states if s.site == "server" and not lowered.is_in_rows(s.value)}
    dependents = {state.value: state.variable for state in lowered.states if state.variable in whole}
    for node in lowered.nodes:
        variables = [dependents[tensor.name] for tensor in node.inputs if tensor.name in dependents]
        if variables and is_communication(node) and node.op != "AllReduce":
            raise UnsupportedModel(
                f"{variables[0]!r} changes with every push, and a worker computes with it",
                at=f"variable {variables[0]!r}, read before {node.op}",
                fix=_SYNCHRONOUS,
            )
        if variables:
            outputs = (tensor.name for tensor in node.outputs if not lowered.is_in_rows(tensor.name))
            dependents.update(dict.fromkeys(outputs, variables[0]))


def _check_updates(plan: Plan, rank: Rank, folder: Path) -> None:
    """Refuse an update under which a push of another session may be lost."""
    program = instructions_of(plan, rank)
    turns: list[int] = []  # instruction -> how many waits came before
    for instruction in program:
        turns.append(turns[-1] + isinstance(instruction, Wait) if turns else 0)
    variables = {owned_piece.value: owned_piece.variable for owned_piece in rank.pieces}
    for at, new_value, value in _updates(program, variables):
        made_at = next((i for i in range(at, -1, -1) if new_value in _outputs_of(program[i])), None)
        if made_at is None:
            continue
        run = program[made_at]
        assert isinstance(run, Run)
        in_one_turn = turns[made_at] == turns[at]
        if in_one_turn and (
            not _reads_early(program, turns, made_at, value) or _reads_now(run, value, new_value, folder)
        ):
            continue
        raise UnsupportedModel(
            f"the update of {variables[value]!r} reads it, waits for other ranks, and writes it: "
            "what others push meanwhile would be lost",
            at=f"variable {variables[value]!r}",
            fix=_SYNCHRONOUS,
        )


def _check_pushes(plan: Plan) -> None:
    """Refuse a step whose push servers could not hold back until all of them have all of it."""
    if (start := first_unpushed(plan)) is not None:
        raise UnsupportedModel(
            "a worker computes with what the same step writes to a variable of the servers",
            at=f"communication {start.label or start.kind}, which needs it",
            fix=_SYNCHRONOUS,
        )


def _updates(program: Sequence[Instruction], variables: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """Yield where a variable is written, the value that is written, and the variable's value."""
    for at, instruction in enumerate(program):
        match instruction:
            case Run(writes=writes):
                yield from ((at, value, value) for _, value in writes if value in variables)
            case Store(source=source, target=target) if target in variables:
                yield at, source, target


def _outputs_of(instruction: Instruction) -> tuple[str, ...]:
    return tuple(value for _, value in instruction.writes) if isinstance(instruction, Run) else ()


def _reads_early(program: Sequence[Instruction], turns: Sequence[int], made_at: int, value: str) -> bool:
    """Tell whether an update works on something that this rank made of the variable in an earlier turn."""
    stale: set[str] = set()
    for at in range(made_at):
        instruction = program[at]
        if isinstance(instruction, Run):
            reads = {name for _, name in instruction.reads}
            if reads & stale or (value in reads and turns[at] < turns[made_at]):
                stale.update(_outputs_of(instruction))
    stale.discard(value)
    last = program[made_at]
    return isinstance(last, Run) and any(name in stale for _, name in last.reads)


def _reads_now(run: Run, value: str, new_value: str, folder: Path) -> bool:
    """Tell whether a segment computes what is written from the variable as it is."""
    dependents = {name for name, source in run.reads if source == value}
    for node in onnx.load(folder / run.segment).graph.node:
        if dependents.intersection(node.input):
            dependents.update(node.output)
    return any(name in dependents for name, target in run.writes if target == new_value)
