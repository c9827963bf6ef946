"""Note when a rank executed what: an observer that an executor takes.

Executor(..., observe=iter)            its program, passed through as it is: costs nothing
Executor(..., observe=recorder.watch)  the same, with a look at the clock between instructions
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from partc.runtime.plan.program import Instruction
from partc.runtime.plan.record import Record
from partc.runtime.transports.transport import Traffic

# How many of the last steps, or ranges of steps, from 1, their last ones included.
TracedSteps = int | tuple[tuple[int, int], ...]

# A few of the middle: neither the first, which are slow, nor many, which would cost.
MIDDLE: Literal["middle"] = "middle"
MIDDLE_STEPS = 9


def middle_of(first: int, last: int) -> TracedSteps:
    """Return some consecutive steps in the middle of those from `first` to `last`, both included."""
    count = min(MIDDLE_STEPS, last - first + 1)
    begin = first + (last - first + 2 - count) // 2
    return ((begin, begin + count - 1),)


class StepTimes(Record, frozen=True):
    """One step of one rank: an entry per instruction of its program. Times on the rank's own clock."""

    step: int  # from 1
    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]  # supplied to the communication that begins, ids and sizes included
    cpu_s: tuple[float, ...] = ()  # for which the rank's own thread had a core
    cpu_clock_s: tuple[float, float] = (0.0, 0.0)  # of that thread, when the step began and when it ended
    waited_s: tuple[float, float] = (0.0, 0.0)  # for data and checkpoints until then


class RankTimes(Record, frozen=True):
    """The recorded steps of one rank. Its clock plus `offset_s` is the first rank's.

    `machine_threads`: of all ranks on its machine together; `machine_cores`: that they may use, 0 if unknown.
    """

    offset_s: float
    uncertainty_s: float
    steps: tuple[StepTimes, ...]
    machine_threads: int = 0
    machine_cores: int = 0


class Recorder:
    """Records the last steps of one rank."""

    def __init__(
        self,
        traced: TracedSteps,
        traffic: Traffic,
        first_step: int = 0,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`waited_s`: returns how long the rank waited between steps so far."""
        self._traffic = traffic
        self._waited_s = waited_s
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
        cpu_s: list[float] = []
        waited_before_s, cpu_before_s = self._waited_s(), time.thread_time()
        cpu_now_s = cpu_before_s
        for instruction in program:
            before, cpu_begin_s = self._traffic.total_bytes(), cpu_now_s
            begin_s.append(time.perf_counter())
            yield instruction
            end_s.append(time.perf_counter())
            cpu_now_s = time.thread_time()
            cpu_s.append(cpu_now_s - cpu_begin_s)
            sent.append(self._traffic.total_bytes() - before)
        self._steps.append(
            StepTimes(
                self._step,
                tuple(begin_s),
                tuple(end_s),
                tuple(sent),
                tuple(cpu_s),
                (cpu_before_s, cpu_now_s),
                (waited_before_s, self._waited_s()),
            )
        )

    def steps(self) -> tuple[StepTimes, ...]:
        """Return the recorded steps that are complete, in order."""
        return tuple(self._steps)
