"""Write checkpoints while training goes on.

At a step's end every rank copies its pieces, and trains on; a thread of each writes them. Each part of a
variable is written by one of the ranks that hold it. The first rank's thread waits for the files of all,
writes the table of contents, commits, and removes what is too old. Everything is on disk before its name is.

A generation writes in folders of its own, and commits nothing once its job's folder is gone: a rank that was
stopped, given up and then goes on cannot spoil what its successors write.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort

from partc.runtime.checkpoints.manifest import (
    CHECKPOINT_FORMAT,
    COMMIT_FILE,
    Manifest,
    StoredFile,
    StoredPiece,
    StoredVariable,
    TrainingPosition,
    folder_of,
    steps_in,
    write_manifest,
)
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.jobs.results import Owner, copies_of, owners_of
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.plan_folder import sha256_of_file
from partc.runtime.plan.program import Plan

Array = np.ndarray[Any, np.dtype[Any]]
ReadValue = Callable[[str], Array]  # a value of the rank's environment, in host memory
PiecesOfRanks = Mapping[
    int, Sequence[tuple[str, StoredPiece]]
]  # rank -> values, and what part of which variable each is

_LOOK_S = 0.02


def part_folder(checkpoints: Path, step: int, job: Path) -> Path:
    """Return the folder of a checkpoint that a job's ranks are writing. `job`: the job's own folder."""
    return checkpoints / f".{folder_of(step)}.{job.name.lstrip('.')}.part"


def remove_parts(checkpoints: Path) -> None:
    """Remove what runs that were ended in the middle of a checkpoint left behind."""
    for left in checkpoints.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)


def writers_of(plan: Plan) -> dict[str, tuple[Owner, ...]]:
    """Return who writes which part of each variable: of copies one, so that ranks write alike in bytes."""
    written = dict.fromkeys((rank.rank for rank in plan.ranks), 0)
    shapes = {variable.name: (variable.shape, np.dtype(variable.dtype)) for variable in plan.variables}
    writers: dict[str, tuple[Owner, ...]] = {}
    for name, owners in owners_of(plan).items():
        shape, dtype = shapes[name]
        chosen = [
            min(same, key=lambda owner: (written[owner.rank], owner.rank)) for same in copies_of(owners)
        ]
        for owner in chosen:
            written[owner.rank] += int(np.prod(local_shape(shape, owner.piece.box))) * dtype.itemsize
        writers[name] = tuple(chosen)
    return writers


def pieces_of_ranks(plan: Plan) -> PiecesOfRanks:
    """Return what each rank writes: of copies one writes all."""
    pieces: dict[int, list[tuple[str, StoredPiece]]] = {rank.rank: [] for rank in plan.ranks}
    for name, owners in writers_of(plan).items():
        for owner in owners:
            pieces[owner.rank].append((owner.piece.value, StoredPiece(name, owner.piece.box)))
    return pieces


class CheckpointWriter:
    """One rank's part in checkpoints, one at a time.

    `pieces`: of all ranks; the first of them completes a checkpoint. `keep`: how many complete ones stay.
    `job`: the job's folder, there for as long as the job may write.
    """

    def __init__(
        self, plan: Plan, rank: int, checkpoints: Path, keep: int, pieces: PiecesOfRanks, job: Path
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._checkpoints = checkpoints
        self._keep = keep
        self._job = job
        self._thread: threading.Thread | None = None
        self._has_written = threading.Event()
        self._is_given_up = threading.Event()
        self._ranks = tuple(pieces)
        self._pieces = pieces[rank]
        self._copies: dict[str, Array] = {}
        self.fault: Exception | None = None  # of the last one, on this rank

    def begin(self, read: ReadValue, position: TrainingPosition) -> None:
        """Copy this rank's pieces and begin to write them. An earlier checkpoint must have ended."""
        assert self._thread is None, "one at a time"
        for value, piece in self._pieces:
            array = read(value)
            # Kept from one to the next: fresh memory takes longer than what is written to it.
            np.copyto(self._copies.setdefault(piece.variable, np.empty(array.shape, array.dtype)), array)
        self.fault = None
        self._has_written.clear()
        self._is_given_up.clear()
        self._thread = threading.Thread(target=self._write, args=(position,), name="checkpoint")
        self._thread.start()

    @property
    def has_written(self) -> bool:
        """Tell whether this rank's pieces of the checkpoint under way are written, or could not be."""
        return self._thread is not None and self._has_written.is_set()

    @property
    def is_complete(self) -> bool:
        """Tell whether this rank has done its part in the checkpoint under way, and well."""
        return self._thread is not None and not self._thread.is_alive() and self.fault is None

    def wait_for_own(self) -> bool:
        """Wait until this rank's pieces are written, if there are any; tell whether they could be."""
        if self._thread is not None:
            self._has_written.wait()
        return self.fault is None

    def finish(self, is_given_up: bool) -> bool:
        """End the checkpoint under way; return whether it is complete, as far as this rank knows."""
        if is_given_up:
            self._is_given_up.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.fault is not None and not isinstance(self.fault, OSError):
            raise self.fault  # a mistake of ours
        return self.fault is None and not is_given_up

    def _write(self, position: TrainingPosition) -> None:
        folder = part_folder(self._checkpoints, position.step, self._job)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_pieces(folder)
            self._has_written.set()
            if self._rank == self._ranks[0]:
                self._commit(folder, position)
        except Exception as error:
            self.fault = error
        finally:
            self._has_written.set()

    def _write_pieces(self, folder: Path) -> None:
        file = folder / f"rank-{self._rank}.safetensors"
        write_arrays(file, self._copies)
        pieces = tuple(piece for _, piece in self._pieces)
        stored = StoredFile(file.stat().st_size, sha256_of_file(file), pieces)
        _write_durably(folder / f"rank-{self._rank}.json", msgspec.json.encode(stored))

    def _commit(self, folder: Path, position: TrainingPosition) -> None:
        files = {f"rank-{rank}": folder / f"rank-{rank}.json" for rank in self._ranks}
        while not all(path.exists() for path in files.values()):
            if self._is_given_up.wait(_LOOK_S):
                return
        manifest = Manifest(
            format=CHECKPOINT_FORMAT,
            position=position,
            model_sha256=self._plan.files.get(self._plan.model, ""),
            plan_sha256=self._plan.sha256,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"onnxruntime": ort.__version__, "numpy": np.__version__},
            variables={v.name: StoredVariable(v.dtype, v.shape) for v in self._plan.variables},
            files={
                f"{name}.safetensors": msgspec.json.decode(path.read_bytes(), type=StoredFile)
                for name, path in files.items()
            },
        )
        committed = write_manifest(folder, manifest)
        _write_durably(folder / COMMIT_FILE, committed)
        if not self._job.exists():
            raise FileNotFoundError(errno.ENOENT, "the job is over", str(self._job))
        complete = self._checkpoints / folder_of(position.step)
        shutil.rmtree(complete, ignore_errors=True)  # of an earlier run, damaged: a whole one is gone on from
        folder.rename(complete)
        _sync_folder(self._checkpoints)
        for step in steps_in(self._checkpoints)[: -self._keep]:
            shutil.rmtree(self._checkpoints / folder_of(step), ignore_errors=True)


def _write_durably(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, with all that was written in its folder before."""
    part = path.with_name(path.name + ".part")
    with _opened(path.parent) as folder:  # kept open: whoever sees the file may rename its folder at once
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        os.fsync(folder)


def _sync_folder(folder: Path) -> None:
    with _opened(folder) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
