"""When a rank saves, and what becomes of a checkpoint that cannot be written."""

import os
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from partc.runtime.checkpoints.manifest import TrainingPosition
from partc.runtime.checkpoints.not_saved import Unsaved, number_of, probe_folder, repair_of
from partc.runtime.checkpoints.write_checkpoint import CheckpointWriter, ReadValue, pieces_of_ranks
from partc.runtime.jobs.barriers import CompleteRequest
from partc.runtime.jobs.job import Checkpoints, notify, tell_saved
from partc.runtime.plan.program import Plan


class Saving:
    """One rank's part in saving a training.

    A checkpoint that cannot be written is told, and training goes on with the one before; the next is tried
    in its time. Only the last of a run must succeed, or the run has failed when it is done.
    """

    def __init__(
        self,
        options: Checkpoints,
        plan: Plan,
        read: ReadValue,
        world: MPI.Intracomm,
        complete: CompleteRequest,
        job: Path,
    ) -> None:
        self._asked = options
        self._read = read
        self._world = world
        self._complete = complete
        pieces = pieces_of_ranks(plan)
        probe_folder(Path(options.folder))  # also as this rank's host sees it
        self._writer = CheckpointWriter(plan, world.rank, Path(options.folder), options.keep, pieces, job)
        self._begun_s = time.monotonic()
        self._begun = 0  # the step of the checkpoint under way
        self._is_told = True  # that it is complete
        self.saved = 0  # of the last complete one
        self.waited_s = 0.0  # how long training waited for copies, and for earlier checkpoints

    def is_due_by_time(self) -> bool:
        """Tell whether this rank's clock says that it is time to save."""
        return self._asked.every_s is not None and time.monotonic() - self._begun_s >= self._asked.every_s

    def is_due_after(self, step: int, is_last: bool) -> bool:
        """Tell whether the step is one to save after: also the last, where saving was asked for."""
        every = self._asked.every_steps
        return (every is not None and step % every == 0) or (is_last and self._is_asked)

    @property
    def _is_asked(self) -> bool:
        return self._asked.every_steps is not None or self._asked.every_s is not None

    def begin(self, position: TrainingPosition) -> None:
        """Begin a checkpoint. All ranks must call it."""
        if (fault := self._settle()) is not None and self._world.rank == 0:
            notify(f"{fault.what}; training goes on")
        begun_s = time.monotonic()
        self._writer.begin(self._read, position)
        self._begun, self._begun_s = position.step, time.monotonic()
        self._is_told = False
        self.waited_s += self._begun_s - begun_s

    def look(self) -> None:
        """Tell of a checkpoint that has become complete; the first rank completes them."""
        if not self._is_told and self._world.rank == 0 and self._writer.is_complete:
            self._is_told = True
            tell_saved(self._begun)

    def finish(self) -> Unsaved | None:
        """End the last checkpoint; return what was wrong with it. All ranks must call it."""
        return self._settle()

    def _settle(self) -> Unsaved | None:
        """End the checkpoint under way, on all ranks alike; return what was wrong with it."""
        begun_s = time.monotonic()
        self._writer.wait_for_own()
        failed = np.array([number_of(self._writer.fault)], np.int64)
        self.waited_s += time.monotonic() - begun_s
        self._complete(self._world.Iallreduce(MPI.IN_PLACE, failed, MPI.MAX))
        is_complete = self._writer.finish(is_given_up=bool(failed[0]))
        if is_complete:
            if not self._is_told and self._world.rank == 0:
                self._is_told = True
                tell_saved(self._begun)
            self.saved = self._begun
            return None
        fault = self._writer.fault
        number = number_of(fault) or int(failed[0])
        who = f"rank {self._world.rank}" if fault else "another rank"
        return Unsaved(
            f"the checkpoint of step {self._begun} could not be written: {who}: {os.strerror(number)}",
            self._asked.folder,
            repair_of(number) + (f"; the last checkpoint is of step {self.saved}" if self.saved else ""),
        )
