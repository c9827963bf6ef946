"""One server's part in the checkpoints of asynchronous training.

The chief says when: all servers have applied the same pushes then. Each copies what it owns and goes on; a
thread of each writes the copy, and the chief's completes the checkpoint when all have written.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from partc.runtime.asynchronous.sessions.session import plan_of_data, servers_of
from partc.runtime.asynchronous.sessions.worker_variables import worker_variables
from partc.runtime.checkpoints.manifest import StoredPiece, TrainingPosition
from partc.runtime.checkpoints.not_saved import Unsaved, number_of, probe_folder, repair_of
from partc.runtime.checkpoints.write_checkpoint import CheckpointWriter, PiecesOfRanks
from partc.runtime.data.batches import samples_of_step
from partc.runtime.data.feeds import is_stream, shards_of
from partc.runtime.errors import BadData
from partc.runtime.jobs.job import Checkpoints, Job, notify, tell_saved
from partc.runtime.jobs.results import owners_of, pieces_among
from partc.runtime.plan.program import Plan

Array = np.ndarray[Any, np.dtype[Any]]

_KEPT = "kept by workers: "  # before a variable's name, as a value of the chief


def pieces_of_servers(plan: Plan) -> PiecesOfRanks:
    """Return what each server writes; the chief what workers keep, too."""
    servers = [rank.rank for rank in servers_of(plan)]
    pieces: dict[int, list[tuple[str, StoredPiece]]] = {server: [] for server in servers}
    for name, owners in owners_of(plan).items():
        for owner in pieces_among([owner for owner in owners if owner.rank in pieces]):
            pieces[owner.rank].append((owner.piece.value, StoredPiece(name, owner.piece.box)))
    for variable in worker_variables(plan):
        pieces[servers[0]].append((_KEPT + variable.name, StoredPiece(variable.name)))
    return pieces


class ServerSaving:
    """Saves what one server owns. `told`: takes what was wrong with its part, once that is written."""

    def __init__(
        self,
        options: Checkpoints,
        plan: Plan,
        rank: int,
        job: Job,
        folder: Path,
        report: Callable[[str], None],
    ) -> None:
        self._asked = options
        self._plan = plan
        self._rank = rank
        self._job = job
        self._told = report
        pieces = pieces_of_servers(plan)
        probe_folder(Path(options.folder))  # also as this server's host sees it
        self._writer = CheckpointWriter(plan, rank, Path(options.folder), options.keep, pieces, folder)
        self._begun_s = time.monotonic()
        self._begun = job.first_step  # the step of the checkpoint under way, or of the last
        self._is_told = True
        self.saved = 0  # the step of the last complete one
        self.unsaved: Unsaved | None = None  # the last one of all
        self.waited_s = 0.0  # how long the server was busy with copies

    def is_due(self, step: int) -> bool:
        """Tell whether it is time to save, `step` being the mean of all workers'."""
        every_steps, every_s = self._asked.every_steps, self._asked.every_s
        if every_steps is not None:
            return step // every_steps > self._begun // every_steps
        return every_s is not None and time.monotonic() - self._begun_s >= every_s

    def begin(
        self, steps: tuple[int, ...], values: Mapping[str, Array], local_values: Mapping[str, Array]
    ) -> None:
        """Copy what this server owns and begin to write it. `steps`: how many of each worker are in it."""
        begun_s = time.monotonic()
        all_values = {**values, **{_KEPT + name: value for name, value in local_values.items()}}
        position = self._position(steps)
        self._begun, self._begun_s = position.step, begun_s
        self._writer.begin(all_values.__getitem__, position)
        self._is_told = False
        self.waited_s += time.monotonic() - begun_s

    def look(self) -> None:
        """See whether this server's part is written."""
        if self._is_told or not self._writer.has_written:
            return
        self._is_told = True
        fault = self._writer.fault
        if self._rank != servers_of(self._plan)[0].rank:
            self._writer.finish(is_given_up=False)
        self._told(_why(self._rank, fault))

    def complete(self, faults: Sequence[str], is_last: bool) -> None:
        """Complete a checkpoint, on the chief, when all servers have written."""
        fault = "; ".join(faults)
        if self._writer.finish(is_given_up=bool(faults)):
            self.saved = self._begun
            tell_saved(self._begun)
            return
        fault = f"the checkpoint of step {self._begun} could not be written: " + (
            fault or _why(self._rank, self._writer.fault)
        )
        if not is_last:
            notify(f"{fault}; training goes on")
            return
        self.unsaved = Unsaved(
            fault,
            self._asked.folder,
            repair_of(number_of(self._writer.fault))
            + (f"; the last checkpoint is of step {self.saved}" if self.saved else ""),
        )

    def _position(self, steps: tuple[int, ...]) -> TrainingPosition:
        before = self._job.worker_steps
        trained = max(steps) - max(before)
        samples = self._samples_after(trained)
        return TrainingPosition(
            step=sum(steps) // len(steps),
            seed=self._job.seed,
            batches=self._job.first_batch + trained,
            samples=samples,
            data=self._job.data_name,
            is_shuffled=self._job.is_shuffled,
            workers=steps,
            file_samples=self._job.file_samples,
            training=self._job.training,
            shards=self._shards_of_function() if samples is None else self._job.shards,
        )

    def _shards_of_function(self) -> int | None:
        """Return of how many shards a function gives batches; None where only workers have its module."""
        with suppress(BadData):
            return shards_of(self._job.data, len(self._plan.asynchronous))
        return None

    def _samples_after(self, batches: int) -> int | None:
        """Return how many samples were used after so many further batches; None where only workers know."""
        job, plan = self._job, plan_of_data(self._plan, self._job.sizes)
        known = msgspec.structs.replace(plan, sizes={}) if is_stream(job.data) else plan
        samples = samples_of_step(known)
        return None if samples is None or job.first_samples is None else job.first_samples + batches * samples


def _why(rank: int, fault: Exception | None) -> str:
    return "" if fault is None else f"server {rank}: {getattr(fault, 'strerror', None) or fault}"
