"""What a checkpoint holds. It speaks of variables and boxes, not of ranks: any plan of the model can go on.

    step-0000001200/
      rank-0.safetensors      pieces of variables, "NAME" -> the local tensor of its box
      rank-0.json             what is in that file
      manifest.json           step, position in the data, variables, files with their hashes
      COMMIT                  the hash of manifest.json: written last, so that what has it is complete

While it is written its folder is called .step-0000001200.part.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from partc.runtime.errors import BadCheckpoint, BadUsage
from partc.runtime.plan.boxes import cover_fault, describe_box, fault_of
from partc.runtime.plan.plan_folder import outside, sha256_of_file
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.plan.record import Record
from partc.runtime.plan.variables import Box

CHECKPOINT_FORMAT = "partc-checkpoint/1"
MANIFEST_FILE = "manifest.json"
COMMIT_FILE = "COMMIT"
FOLDER = "checkpoints"  # of a plan's folder
_PREFIX = "step-"


class StoredPiece(Record, frozen=True, omit_defaults=True):
    """A part of a variable in one file, under the variable's name."""

    variable: str
    box: Box | None = None  # None: the whole variable


class StoredVariable(Record, frozen=True):
    """A variable of the single device."""

    dtype: str
    shape: tuple[int, ...]


class StoredFile(Record, frozen=True):
    """What one rank wrote: its size in bytes, SHA-256, and the pieces in it."""

    size: int
    sha256: str
    pieces: tuple[StoredPiece, ...]


class TrainingPosition(Record, frozen=True, omit_defaults=True):
    """Where a training is: what a run that goes on must know besides variables.

    Random numbers of a step follow from `seed` and the step's number alone (runtime/data/step_draws.py).
    Workers of asynchronous training are each in a step of its own.
    """

    step: int  # steps that are done; in the mean of asynchronous workers
    seed: int
    batches: int  # of the data that were used, by the worker that is furthest
    samples: int | None  # in these batches; None: nobody has counted them
    data: str  # as it was named
    workers: tuple[int, ...] = ()  # steps that each worker of asynchronous training has done
    is_shuffled: bool | None = None  # the samples of files; None: a checkpoint that does not tell
    file_samples: int | None = None  # that files held; None: not told
    training: str = ""  # which training it is, with all that went on with it; empty: not told
    shards: int | None = None  # whose batches were read, one of each a step; 0: total batches; None: not told


class Manifest(Record, frozen=True):
    """A checkpoint's table of contents."""

    format: str
    position: TrainingPosition
    model_sha256: str  # of the training graph
    plan_sha256: str
    written_at: str  # ISO 8601, UTC
    versions: dict[str, str]  # package -> version
    variables: dict[str, StoredVariable]
    files: dict[str, StoredFile]  # name in the checkpoint's folder -> what it holds


def folder_of(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"{_PREFIX}{step:010d}"


def steps_in(checkpoints: Path) -> list[int]:
    """Return the steps of which there are checkpoints, whole or damaged, ascending."""
    if not checkpoints.is_dir():
        return []
    names = [path.name.removeprefix(_PREFIX) for path in checkpoints.glob(f"{_PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdigit())


def write_manifest(folder: Path, manifest: Manifest) -> bytes:
    """Write manifest.json and return what COMMIT is to hold."""
    text = msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"
    (folder / MANIFEST_FILE).write_bytes(text)
    return hashlib.sha256(text).hexdigest().encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read a complete checkpoint's manifest and check all but the files' contents. Raises BadCheckpoint."""
    text = _read(folder / MANIFEST_FILE)
    if _read(folder / COMMIT_FILE).strip() != hashlib.sha256(text).hexdigest().encode():
        raise _damaged("the manifest is not the one that was committed", folder / MANIFEST_FILE)
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except NOT_DECODED as error:
        raise _damaged(f"no manifest: {error}", folder / MANIFEST_FILE) from error
    if manifest.format != CHECKPOINT_FORMAT:
        raise BadCheckpoint(
            f"a checkpoint of format {manifest.format!r}, this version of partc reads {CHECKPOINT_FORMAT!r}",
            at=str(folder / MANIFEST_FILE),
            fix="go on with the version of partc that wrote it",
        )
    for name, stored in manifest.files.items():
        if why := outside(folder, name):
            raise _damaged(f"file {name!r} {why}", folder / MANIFEST_FILE)
        path = folder / name
        if not path.is_file() or path.stat().st_size != stored.size:
            raise _damaged(f"not a file of {stored.size} bytes", path)
    _check_boxes(folder, manifest)
    return manifest


def verify_checkpoint(folder: Path) -> Manifest:
    """Read a checkpoint, the contents of its files too, and return its manifest. Raises BadCheckpoint."""
    manifest = read_manifest(folder)
    for name, stored in manifest.files.items():
        if sha256_of_file(folder / name) != stored.sha256:
            raise _damaged("another SHA-256 than when it was written", folder / name)
    return manifest


def refuse_others(checkpoints: Path) -> None:
    """Refuse a folder that has checkpoints of a training that is not gone on with. Raises BadUsage."""
    if steps := steps_in(checkpoints):
        raise BadUsage(
            f"checkpoints of another training, the last of step {steps[-1]}: two would be mixed",
            at=str(checkpoints),
            fix="go on from them with --resume, name another folder with --checkpoints, or remove them",
        )


def newest_checkpoint(checkpoints: Path) -> tuple[Path | None, list[BadCheckpoint]]:
    """Return the last checkpoint that is whole, and what is wrong with later ones."""
    faults: list[BadCheckpoint] = []
    for step in reversed(steps_in(checkpoints)):
        folder = checkpoints / folder_of(step)
        try:
            verify_checkpoint(folder)
        except BadCheckpoint as error:
            faults.append(error)
        else:
            return folder, faults
    return None, faults


def _check_boxes(folder: Path, manifest: Manifest) -> None:
    """Check that files hold every variable once."""
    places: dict[str, dict[Box | None, str]] = {name: {} for name in manifest.variables}
    for name, piece in _pieces(manifest):
        variable = manifest.variables.get(piece.variable)
        fault = "no such variable" if variable is None else fault_of(variable.shape, piece.box)
        if variable is not None and piece.box in places[piece.variable]:
            fault = f"{describe_box(piece.box)} is also in {places[piece.variable][piece.box]}"
        if fault:
            raise _damaged(f"variable {piece.variable!r} in {name}: {fault}", folder / MANIFEST_FILE)
        places[piece.variable][piece.box] = name
    for owned, boxes in places.items():
        if fault := cover_fault(manifest.variables[owned].shape, boxes):
            raise _damaged(f"variable {owned!r}: {fault}", folder / MANIFEST_FILE)


def _pieces(manifest: Manifest) -> Iterator[tuple[str, StoredPiece]]:
    for name, stored in manifest.files.items():
        for piece in stored.pieces:
            yield name, piece


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _damaged(f"cannot be read: {error.strerror}", path) from error


def _damaged(what: str, path: Path) -> BadCheckpoint:
    return BadCheckpoint(f"a damaged checkpoint: {what}", at=str(path), fix="use an earlier checkpoint")
