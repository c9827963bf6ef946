"""Note when a rank executed what: an observer that an executor takes.

Executor(..., observe=iter)            its program, passed through as it is: costs nothing
Executor(..., observe=recorder.watch)  the same, with a look at the clock between instructions
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator

from partc.runtime.plan.program import Instruction
from partc.runtime.plan.record import Record
from partc.runtime.transports.transport import Traffic

# How many of the last steps, or ranges of steps, from 1, their last ones included.
TracedSteps = int | tuple[tuple[int, int], ...]


class StepTimes(Record, frozen=True):
    """One step of one rank: an entry per instruction of its program. Times on the rank's own clock."""

    step: int  # from 1
    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]  # supplied to the communication that begins, ids and sizes included


class RankTimes(Record, frozen=True):
    """The recorded steps of one rank. Its clock plus `offset_s` is the first rank's."""

    offset_s: float
    uncertainty_s: float
    steps: tuple[StepTimes, ...]


class Recorder:
    """Records the last steps of one rank."""

    def __init__(self, traced: TracedSteps, traffic: Traffic, first_step: int = 0) -> None:
        self._traffic = traffic
        self._step = first_step
        self._chosen = None if isinstance(traced, int) else traced
        self._steps: deque[StepTimes] = deque(maxlen=traced if isinstance(traced, int) else None)

    def watch(self, program: Iterable[Instruction]) -> Iterator[Instruction]:
        """Pass one step's program through; its end is when the last instruction is done."""
        self._step += 1
        if self._chosen is not None and not any(first <= self._step <= last for first, last in self._chosen):
            yield from program
            return
        begin_s: list[float] = []
        end_s: list[float] = []
        sent: list[int] = []
        for instruction in program:
            before = self._traffic.total_bytes()
            begin_s.append(time.perf_counter())
            yield instruction
            end_s.append(time.perf_counter())
            sent.append(self._traffic.total_bytes() - before)
        self._steps.append(StepTimes(self._step, tuple(begin_s), tuple(end_s), tuple(sent)))

    def steps(self) -> tuple[StepTimes, ...]:
        """Return the recorded steps that are complete, in order."""
        return tuple(self._steps)
