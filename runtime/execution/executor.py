"""One rank's executor: carries out its program, step after step.

It never blocks: `step` yields the communication that it waits for, and whoever drives it decides how to
wait. So one process can drive all ranks in lockstep, and a daemon can sleep between tests.

It tells the loss as one rank sees it, and what the loss is made of: which rank spoilt one that all share.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from partc.runtime.errors import Diverged
from partc.runtime.execution.cuda_graphs import ReplayedRun, can_be_recorded
from partc.runtime.execution.device import BoundRun, Sessions
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.static_memory import allocate, declared_sizes
from partc.runtime.plan.last_readers import last_readers
from partc.runtime.plan.members import has_outputs
from partc.runtime.plan.program import (
    Instruction,
    Plan,
    Rank,
    Run,
    Start,
    Store,
    Wait,
    instructions_of,
    members_of,
    place_of,
)
from partc.runtime.transports.communication import ROW_KINDS, Part, part_of, stays_the_same
from partc.runtime.transports.sum_levels import by_host
from partc.runtime.transports.transport import Handle, Transport


def loss_terms(plan: Plan) -> frozenset[str]:
    """Return the values that each rank contributes to the loss, as they are before ranks meet.

    A reduced loss is not finite on any rank as soon as one rank's term is not. The search goes back
    from the loss through communications, through what is computed of reduced scalars, and through
    values that lie in one place.
    """
    terms = {output.value for output in plan.outputs if output.name == plan.loss}
    places = {piece.value: (piece.buffer, piece.offset) for piece in plan.slices}
    reduced = _reduced_scalars(plan)
    for instruction in reversed(plan.instructions):
        match instruction:
            case Start(reads=reads, writes=writes):
                terms |= {read for read, write in zip(reads, writes, strict=False) if write in terms}
            case Run(reads=reads, writes=writes) if any(value in terms for _, value in writes):
                if origins := {value for _, value in reads} & reduced:
                    terms = terms - {value for _, value in writes} | origins
        taken = {places[term] for term in terms if term in places}
        terms |= {value for value, place in places.items() if place in taken}
    return frozenset(terms)


def _reduced_scalars(plan: Plan) -> set[str]:
    written = {write for start in plan.instructions if isinstance(start, Start) for write in start.writes}
    return {
        piece.value
        for piece in plan.slices
        if all(size == 1 for size in piece.shape) and {piece.value, piece.buffer} & written
    }


Array = np.ndarray[Any, np.dtype[Any]]
# Is told the number of an instruction that begins; behind the last one, that the step ends.
Enter = Callable[[int], None]
NoteProgram = Callable[[Sequence[Instruction]], Enter]  # makes one for a program
# Is handed the program at every step and passes it on, and so sees when each instruction begins and ends.
Observe = Callable[[Iterable[Instruction]], Iterator[Instruction]]


def nowhere(index: int) -> None:
    """Take no note: nobody asks where this rank is."""


class Executor:
    """Executes one rank's program on its environment."""

    def __init__(
        self,
        plan: Plan,
        rank: Rank,
        environment: Environment,
        sessions: Sessions,
        transport: Transport,
        observe: Observe = iter,
        enter: Enter = nowhere,
    ) -> None:
        self._rank = rank
        self._members = {group: members_of(plan, group, rank) for group in rank.groups}
        host_of = {rank.rank: rank.host for rank in plan.ranks}
        self._hosts = {group: by_host(members, host_of) for group, members in self._members.items()}
        self._observe = observe
        self._enter = enter
        self.environment = environment
        self._transport = transport
        self._program = instructions_of(plan, rank)
        self._under_way: dict[int, tuple[Part, Handle]] = {}
        self._parts: dict[int, Part] = {}  # of instructions, those that stay the same
        lasting = {output.value for output in plan.outputs} | environment.fixed.keys()
        self._last_read_by = last_readers(self._program, lasting)
        if environment.device.kind == "gpu":
            self._fix_memory(sessions)
        self._runs = {
            index: self._bind(instruction, sessions)
            for index, instruction in enumerate(self._program)
            if isinstance(instruction, Run)
        }
        self._terms = loss_terms(plan)
        self.loss_terms: dict[str, Array] = {}  # of the last step, as this rank computed them

    def _fix_memory(self, sessions: Sessions) -> None:
        """Give values memory that they keep, as far as their sizes are known."""
        environment = self.environment
        runs = [each for each in self._program if isinstance(each, Run)]
        sizes = declared_sizes((run, sessions.session(run, environment.device)) for run in runs)
        unplaced = {value: known for value, known in sizes.items() if value not in environment.fixed}
        environment.fix(allocate(unplaced, self._program, self._last_read_by, environment.arrays))

    def _bind(self, run: Run, sessions: Sessions) -> Callable[[], None]:
        device = self.environment.device

        def node_by_node() -> BoundRun:
            return BoundRun(run, sessions.session(run, device), device, self.environment)

        session = sessions.recording_session(run, device)
        if session is None or not can_be_recorded(run, session, self.environment):
            return node_by_node()
        return ReplayedRun(run, session, self.environment, node_by_node)

    @property
    def program(self) -> tuple[Instruction, ...]:
        """Return the instructions of a step."""
        return self._program

    def step(self, feeds: Mapping[str, Array]) -> Iterator[Start]:
        """Execute one training step; yield the communication waited for as long as it is not complete."""
        self.environment.feed(feeds)
        yield from self._execute(enumerate(self._observe(self._program)))
        yield from self._end_step()

    def step_until(self, feeds: Mapping[str, Array], stop: int) -> Iterator[Start]:
        """Execute a step's instructions before number `stop`, as `step` does."""
        self.environment.feed(feeds)
        yield from self._execute(enumerate(self._program[:stop]))

    def step_from(self, start: int) -> Iterator[Start]:
        """Execute the other instructions of the step, from number `start` on."""
        yield from self._execute(enumerate(self._program[start:], start))
        yield from self._end_step()

    def _execute(self, numbered: Iterable[tuple[int, Instruction]]) -> Iterator[Start]:
        for index, instruction in numbered:
            self._enter(index)
            match instruction:
                case Run():
                    self.environment.arrays.wait()
                    with self._transport.beside():
                        self._runs[index]()
                    self._keep_loss_terms(instruction)
                    self._transport.progress()
                case Start():
                    part = self._part_of(index, instruction)
                    self._under_way[instruction.tag_id] = (part, self._transport.start(part))
                case Wait(tag_id=tag_id):
                    yield from self._wait(tag_id)
                case Store(source=source, target=target):
                    self.environment.put(target, self.environment.held(source))
            self.environment.drop(self._last_read_by[index])

    def _part_of(self, index: int, start: Start) -> Part:
        if index in self._parts:
            return self._parts[index]
        group = start.group
        part = part_of(start, self._rank, self._members[group], self.environment, self._hosts[group])
        if stays_the_same(part, self.environment):
            self._parts[index] = part
        return part

    def _end_step(self) -> Iterator[Start]:
        if self._under_way:
            self._enter(len(self._program))
        for tag_id in tuple(self._under_way):
            yield from self._wait(tag_id)

    def _keep_loss_terms(self, run: Run) -> None:
        # A reduction in place overwrites them.
        for _, value in run.writes:
            if value in self._terms:
                self.loss_terms[value] = self.environment.array(value).copy()

    def _wait(self, tag_id: int) -> Iterator[Start]:
        part, handle = self._under_way[tag_id]
        while not handle.done():
            yield part.start
        del self._under_way[tag_id]
        if part.lands:
            for name, array in _unplaced(part, handle):
                self.environment.put(name, array)


def _unplaced(part: Part, handle: Handle) -> Iterator[tuple[str, Array]]:
    """Yield the results that do not lie where the values live."""
    if part.start.kind in ROW_KINDS:
        yield from zip(part.start.writes, handle.rows(), strict=True)
    for name, dense in zip(part.start.writes, part.dense, strict=False):
        if not dense.is_placed:
            yield name, dense.target


def loss_of(plan: Plan, environment: Environment) -> float | None:
    """Return the loss that a worker holds, None if the plan has none."""
    for output in plan.outputs:
        if output.name == plan.loss:
            return float(environment.array(output.value).mean())
    return None


def is_finite(plan: Plan, rank: Rank, executor: Executor) -> bool:
    """Tell whether a rank's loss is a number; servers, and stages before the loss, have none."""
    loss = loss_of(plan, executor.environment) if has_outputs(plan, rank) else None
    return loss is None or bool(np.isfinite(loss))


def spoils_loss(executor: Executor) -> bool:
    """Tell whether a rank's own share of the last step's loss is not finite."""
    return not all(np.isfinite(term).all() for term in executor.loss_terms.values())


def diverged(plan: Plan, rank: Rank, executor: Executor, step: int) -> Diverged:
    """Return the error of a rank whose loss is not finite. Steps count from 1."""
    return Diverged(
        f"the loss is {loss_of(plan, executor.environment)} in step {step}",
        at=f"rank {rank.rank} (replica {rank.replica} on {place_of(rank.host, rank.device)})",
        fix="lower the learning rate or check the data; `--on-nan continue` goes on regardless",
    )
