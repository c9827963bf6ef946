"""The executor daemon of a job that is stepped from outside.

    python -m partc.runtime.interactive.daemon JOB_FOLDER

It is the daemon of runtime/jobs/daemon.py, but for who decides what comes next.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from partc.runtime.data.feeds import Shares
from partc.runtime.data.not_finite import Index, element
from partc.runtime.execution.row_hashes import row_hashes
from partc.runtime.interactive.channel import CHANNEL_FILE, Channel, RankEnd
from partc.runtime.interactive.messages import (
    Close,
    Done,
    Found,
    Hash,
    Read,
    Ready,
    Step,
    Write,
    Written,
    describe,
)
from partc.runtime.jobs.daemon import Daemon, play
from partc.runtime.plan.boxes import columns_of
from partc.runtime.plan.program import Rank
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run this process's rank of a job that is stepped from outside."""
    return play(InteractiveDaemon, argv)


class FedShares:
    """What the stepper feeds this rank: it sends every rank its own share."""

    def __init__(self) -> None:
        self.fed: dict[str, Array] = {}

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what came with the step."""
        return self.fed

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say which element of what was fed it is."""
        replica = 0 if rank is None else rank.replica
        return f"what replica {replica} was fed in step {step + 1}: {element(data_input.name, index)}"


class InteractiveDaemon(Daemon):
    """One rank of a job that is stepped from outside."""

    def __init__(self, folder: Path, world: MPI.Intracomm) -> None:
        self._fed = FedShares()
        super().__init__(folder, world)
        self._boxes = {piece.value: piece.box for piece in self._rank.pieces}
        # What this rank sends may need its help to leave while it waits to be asked again.
        self._help_messages = world.Iprobe
        channel = msgspec.json.decode((folder / CHANNEL_FILE).read_bytes(), type=Channel)
        self._stepper = RankEnd(channel, self._rank.host, self._rank.rank, folder)

    def train(self) -> None:
        """Do what is asked until nothing more is."""
        self._variables.barrier()
        self._stepper.send(Ready(), {})
        while True:
            message, arrays = self._stepper.receive(self._help_messages)
            match message:
                case Step():
                    self._train(message, arrays)
                case Write(path=path):
                    self._variables.write(Path(path))
                    self._stepper.send(Written(), {})
                case Read(value=value):
                    self._send_rows(value, arrays)
                case Hash(value=value):
                    columns = columns_of(self._boxes[value])
                    hashes = {value: row_hashes(self._executor.environment.array(value), columns)}
                    self._stepper.send(Found(describe(hashes)), hashes)
                case Close(saves=saves):
                    self._end(saves)
                    break
        self._variables.barrier()
        self._stepper.close()

    def _open_source(self) -> Shares:
        return super()._open_source() if self._job.data else self._fed

    def _train(self, step: Step, arrays: dict[str, Array]) -> None:
        self.step = step.step
        self._fed.fed = arrays
        self._train_step()
        values = {output.name: output.value for output in self._plan.outputs}
        fetched = {name: self._executor.environment.array(values[name]) for name in step.fetches}
        if self._saving is not None:
            self._saving.look()
            if step.saves:
                self._saving.begin(self._training_position())
        self._stepper.send(Done(step.step, describe(fetched)), fetched)

    def _end(self, saves: bool) -> None:
        """Write what remains of a training: its last checkpoint, and when this rank executed what."""
        if self._saving is not None:
            if saves:
                self._saving.begin(self._training_position())
            if (fault := self._saving.finish()) is not None:
                raise fault.error()
        if self._recorder is not None:
            self._write_times(self._recorder)

    def _send_rows(self, value: str, places: dict[str, Array]) -> None:
        array = self._executor.environment.array(value)
        rows = {value: array[places["rows"]] if places else array}
        self._stepper.send(Found(describe(rows)), rows)


if __name__ == "__main__":
    sys.exit(main())
