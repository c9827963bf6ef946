"""Why a step takes as long as it does: what follows on what, from its end back to its beginning.

    rank 0   [ run ]·[ start ]┄┄┄┄┄┄[ wait ]──[ run ]   end        the path: run of rank 0, transfer of the
    rank 1   [    run    ]·[ start ]┘                              sum, start and run of rank 1

A rank that waits for a communication which another member began later waits for that member: the path goes
on there, and what is between is the transfer. Where all had begun before it waited, all of the waiting is
transfer, and the path stays. Every moment between the end and the beginning is counted once, so parts add up
to the step; in a run over several steps, to all of them, with what lies between. When instructions begin and
end is enough, whether that is predicted (instruction_times.py) or measured (recorder.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partc.runtime.execution.recorder import StepTimes
from partc.runtime.plan.program import Instruction, Plan, Run, Start, Wait, instructions_of, members_of

# compute    a segment, with a core
# core       a segment, or what is done between steps, that waits for a core
# transfer   of a communication that is waited for
# start      beginning one
# store      copying a value
# data       waiting for data and checkpoints
# between    what else is done between instructions, or steps
PartKind = Literal["compute", "core", "transfer", "start", "store", "data", "between"]


@dataclass(frozen=True, slots=True)
class PathPart:
    """Time of the critical path, and the instruction of `rank` that it went to; None between instructions.

    `begun_s`: of a transfer, when the last of its members had begun it.
    """

    kind: PartKind
    rank: int
    instruction: Instruction | None
    begin_s: float
    end_s: float
    begun_s: float | None = None

    @property
    def seconds(self) -> float:
        """Return how long it lasts."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class _Moment:
    """An instruction that a rank executed, in which of the steps."""

    step: int
    instruction: Instruction
    begin_s: float
    end_s: float
    cpu_s: float | None


def critical_path(plan: Plan, steps: Mapping[int, Sequence[StepTimes]]) -> tuple[PathPart, ...]:
    """Return the parts of a step, or of several in sequence, first part first.

    `steps`: of every rank, on one clock. Of several the last tells only when it begins: what lies between a
    step and the next belongs to it.
    """
    walk = _Walk(plan, steps)
    return tuple(reversed(list(walk.parts())))


class _Walk:
    def __init__(self, plan: Plan, steps: Mapping[int, Sequence[StepTimes]]) -> None:
        self._plan = plan
        self._ranks = {rank.rank: rank for rank in plan.ranks}
        self._moments = {
            rank.rank: list(_moments(instructions_of(plan, rank), steps[rank.rank])) for rank in plan.ranks
        }
        self._starts = {i.tag_id: i for i in plan.instructions if isinstance(i, Start)}
        self._started = {
            (rank, moment.step, moment.instruction.tag_id): at
            for rank, moments in self._moments.items()
            for at, moment in enumerate(moments)
            if isinstance(moment.instruction, Start)
        }
        self._steps = steps
        self._last = max(len(of_rank) for of_rank in steps.values()) - 1

    def parts(self) -> Iterator[PathPart]:
        """Yield the parts from the end to the beginning."""
        rank, at, until_s = self._end()
        while at >= 0:
            moment = self._moments[rank][at]
            end_s = min(moment.end_s, until_s)
            if end_s < until_s:
                yield from self._between(rank, at, end_s, until_s)
            begin_s = min(moment.begin_s, end_s)
            if isinstance(moment.instruction, Wait):
                start = self._starts[moment.instruction.tag_id]
                begun_s, member, started = self._begun(rank, moment.step, start)
                if begin_s < begun_s <= end_s and member != rank:
                    yield PathPart("transfer", rank, start, begun_s, end_s, begun_s)
                    rank, at, until_s = member, started, begun_s
                    continue
                yield PathPart("transfer", rank, start, begin_s, end_s, begun_s)
            else:
                yield from self._spent(rank, moment, begin_s, end_s)
            at, until_s = at - 1, begin_s

    def _end(self) -> tuple[int, int, float]:
        """Return the rank that ends last, or begins the last of several steps; its last moment, and when."""
        if self._last:
            begins = {
                rank: next((at for at, m in enumerate(moments) if m.step == self._last), len(moments))
                for rank, moments in self._moments.items()
            }
            rank = max(
                (rank for rank in begins if begins[rank] < len(self._moments[rank])),
                key=lambda rank: self._moments[rank][begins[rank]].begin_s,
            )
            return rank, begins[rank] - 1, self._moments[rank][begins[rank]].begin_s
        rank = max(
            self._moments, key=lambda rank: self._moments[rank][-1].end_s if self._moments[rank] else 0.0
        )
        moments = self._moments[rank]
        return rank, len(moments) - 1, moments[-1].end_s if moments else 0.0

    def _between(self, rank: int, at: int, begin_s: float, end_s: float) -> Iterator[PathPart]:
        """Yield what passed after a moment: behind a step data is read, and a core may be waited for."""
        moments, of_rank = self._moments[rank], self._steps[rank]
        step = moments[at].step
        is_of_step = at + 1 < len(moments) and moments[at + 1].step == step
        if is_of_step or step == self._last or not of_rank[step].cpu_s or self._ranks[rank].kind == "gpu":
            yield PathPart("between", rank, None, begin_s, end_s)
            return
        before, after = of_rank[step], of_rank[step + 1]
        own_s = min(after.cpu_clock_s[0] - before.cpu_clock_s[1], end_s - begin_s)
        data_s = min(after.waited_s[0] - before.waited_s[1], end_s - begin_s - own_s)
        yield PathPart("core", rank, None, begin_s + own_s + data_s, end_s)
        yield PathPart("data", rank, None, begin_s + own_s, begin_s + own_s + data_s)
        yield PathPart("between", rank, None, begin_s, begin_s + own_s)

    def _begun(self, rank: int, step: int, start: Start) -> tuple[float, int, int]:
        """Return when the last member had begun a communication, who that is, and its moment then."""
        members = members_of(self._plan, start.group, self._ranks[rank])
        begun = [
            (self._moments[member][at].end_s, member, at)
            for member in members
            if (at := self._started.get((member, step, start.tag_id))) is not None
        ]
        return max(begun)

    def _spent(self, rank: int, moment: _Moment, begin_s: float, end_s: float) -> Iterator[PathPart]:
        """Yield what an instruction's own time went to, the later part first."""
        instruction = moment.instruction
        match instruction:
            case Run():
                is_shared = moment.cpu_s is not None and self._ranks[rank].kind == "cpu"
                cpu_s = min(moment.cpu_s or 0.0, end_s - begin_s) if is_shared else end_s - begin_s
                yield PathPart("core", rank, instruction, begin_s + cpu_s, end_s)
                yield PathPart("compute", rank, instruction, begin_s, begin_s + cpu_s)
            case Start():
                yield PathPart("start", rank, instruction, begin_s, end_s)
            case _:
                yield PathPart("store", rank, instruction, begin_s, end_s)


def _moments(program: Sequence[Instruction], steps: Sequence[StepTimes]) -> Iterator[_Moment]:
    for number, step in enumerate(steps):
        cpus_s: Sequence[float | None] = step.cpu_s or (None,) * len(program)
        for instruction, begin_s, end_s, cpu_s in zip(program, step.begin_s, step.end_s, cpus_s, strict=True):
            yield _Moment(number, instruction, begin_s, end_s, cpu_s)
