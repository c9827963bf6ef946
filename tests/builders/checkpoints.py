"""Checkpoints made by hand: variables in whatever pieces."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from partc.runtime.checkpoints.manifest import (
    CHECKPOINT_FORMAT,
    COMMIT_FILE,
    Manifest,
    StoredFile,
    StoredPiece,
    StoredVariable,
    TrainingPosition,
    folder_of,
    write_manifest,
)
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.plan.boxes import take
from partc.runtime.plan.plan_folder import sha256_of_file
from partc.runtime.plan.variables import Box


def stored_checkpoint(
    checkpoints: Path,
    step: int,
    variables: Mapping[str, np.ndarray],
    boxes: Mapping[str, Sequence[Box | None]] | None = None,
    position: TrainingPosition | None = None,
) -> Path:
    """Write a checkpoint in which a rank more has each next box of a variable."""
    folder = checkpoints / folder_of(step)
    folder.mkdir(parents=True)
    parts = {name: list((boxes or {}).get(name, [None])) for name in variables}
    files = {}
    for rank in range(max(map(len, parts.values()))):
        here = {name: of_name[rank] for name, of_name in parts.items() if rank < len(of_name)}
        path = folder / f"rank-{rank}.safetensors"
        write_arrays(path, {name: take(variables[name], box) for name, box in here.items()})
        pieces = tuple(StoredPiece(name, box) for name, box in here.items())
        files[path.name] = StoredFile(path.stat().st_size, sha256_of_file(path), pieces)
    manifest = Manifest(
        format=CHECKPOINT_FORMAT,
        position=position or TrainingPosition(step, 0, step, None, ""),
        model_sha256="",
        plan_sha256="",
        written_at="2026-01-01T00:00:00+00:00",
        versions={},
        variables={name: StoredVariable(array.dtype.name, array.shape) for name, array in variables.items()},
        files=files,
    )
    (folder / COMMIT_FILE).write_bytes(write_manifest(folder, manifest))
    return folder
