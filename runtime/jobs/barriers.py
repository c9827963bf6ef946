"""When ranks agree on what to do after a step: rarely enough that it costs nothing.

A signal reaches some ranks in some step, and time passes on the first rank's clock; but all ranks must save,
or stop, after the same step. So they have a barrier after a step that they agreed on at the last one: one
small AllReduce, every half second or so, and every tenth step at least. There they also learn who keeps the
others waiting: whoever waited least itself.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from partc.runtime.jobs.job import Straggler

EVERY_S = 0.5
STEPS_APART = 10  # at most: a straggler is known within two barriers
UNEQUAL_WAITING = 0.2  # of the time
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Waits for a request without keeping a core busy.
CompleteRequest = Callable[[MPI.Request], None]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks do after a step."""

    stops: bool = False
    saves: bool = False
    straggler: Straggler | None = None


NOTHING = Agreement()
_MILLE = 1_000
_RANKS = 1 << 32


class Barriers:
    """One rank's part in the barriers of a job.

    `works`: it has something to do, which others may wait for.
    """

    def __init__(self, world: MPI.Intracomm, complete: CompleteRequest, works: bool) -> None:
        self._world = world
        self._complete = complete
        self._works = works
        self._next = 1
        self._last_s = time.monotonic()
        self._last_step = 0
        self._waited_s = 0.0
        self.is_asked_to_stop = False

    def listen(self) -> None:
        """Take signals as a wish to stop after a step, as often as they come.

        A batch system signals all processes of a job, and the keeper then asks as well. Who is in a hurry has
        the keeper end this process.

        One that was ignored, as nohup has it of SIGHUP, still is.
        """
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hear)

    def after(self, step: int, wants_to_save: bool, waited_s: float) -> Agreement:
        """Return what all ranks do after a step (from 1). Only the first rank's wish to save counts.

        `waited_s`: how long this rank has waited for others in all.
        """
        if step < self._next:
            return NOTHING
        waited = self._share_waited(waited_s)
        worked = self._works * ((_MILLE - waited) * _RANKS + self._world.rank)
        wishes = np.array(
            (self.is_asked_to_stop, wants_to_save, self._steps_apart(step), waited, worked), np.int64
        )
        if self._world.rank != 0:
            wishes[1:3] = 0
        self._complete(self._world.Iallreduce(MPI.IN_PLACE, wishes, MPI.MAX))
        stops, saves, steps_apart, most, worked = (int(wish) for wish in wishes)
        self._next = step + steps_apart
        return Agreement(stops > 0, saves > 0, _straggler(most, _MILLE - worked // _RANKS, worked % _RANKS))

    def _share_waited(self, waited_s: float) -> int:
        """Return how much of the time since the last barrier this rank waited, in thousandths."""
        passed_s = max(time.monotonic() - self._last_s, 1e-9)
        share = (waited_s - self._waited_s) / passed_s
        self._waited_s = waited_s
        return min(_MILLE, max(0, round(share * _MILLE)))

    def _steps_apart(self, step: int) -> int:
        """Return how many steps take EVERY_S, as many as took the time since the last barrier."""
        now_s = time.monotonic()
        step_s = (now_s - self._last_s) / max(1, step - self._last_step)
        self._last_s, self._last_step = now_s, step
        return min(STEPS_APART, max(1, int(EVERY_S / max(step_s, 1e-9))))

    def _hear(self, number: int, frame: object) -> None:
        self.is_asked_to_stop = True


def _straggler(most: int, least: int, rank: int) -> Straggler | None:
    """Return who keeps others waiting, None if all wait about alike. Shares are in thousandths."""
    if most - least < UNEQUAL_WAITING * _MILLE:
        return None
    return Straggler(rank, least / _MILLE, most / _MILLE)
