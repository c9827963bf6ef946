"""Variables of a checkpoint, read in whatever boxes a plan asks for."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.checkpoints.manifest import Manifest, StoredPiece, read_manifest
from partc.runtime.data.checkpoint import TensorFile, map_array
from partc.runtime.errors import BadCheckpoint
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import Box

Array = np.ndarray[Any, np.dtype[Any]]


class StoredValues:
    """The variables of one checkpoint. Of its files only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)

    def part(self, name: str, box: Box | None = None) -> Array:
        """Return a fresh local tensor of a part of a variable, in C order."""
        variable = self.manifest.variables[name]
        local = np.empty(local_shape(variable.shape, box), variable.dtype)
        part_indices = _indices(variable.shape, box)
        for file, piece in self._pieces[name]:
            had = _indices(variable.shape, piece.box)
            common = [np.intersect1d(w, h, True, True) for w, h in zip(part_indices, had, strict=True)]
            if all(len(indices) for indices, _, _ in common):
                source = map_array(self.folder / file, name)
                targets = [_run(places) for _, places, _ in common]
                sources = [_run(places) for _, _, places in common]
                _copy(local, targets, source, sources)
        return local

    def whole(self) -> list[TensorFile]:
        """Return all variables, each of which is read when its only piece is asked for."""
        stored = self.manifest.variables.items()
        return [TensorFile(name, v.dtype, v.shape, map(self.part, (name,))) for name, v in stored]

    def check(self, plan: Plan) -> None:
        """Check that a plan trains these variables. Raises BadCheckpoint."""
        stored = {name: (v.dtype, v.shape) for name, v in self.manifest.variables.items()}
        needed = {variable.name: (variable.dtype, variable.shape) for variable in plan.variables}
        if faults := list(_differences(stored, needed)):
            raise BadCheckpoint(
                f"a checkpoint of another model: {'; '.join(faults[:3])}{'; ...' if len(faults) > 3 else ''}",
                at=str(self.folder),
                fix="go on with a plan of the model, loss and optimizer that it was trained with",
            )

    @cached_property
    def _pieces(self) -> dict[str, list[tuple[str, StoredPiece]]]:
        pieces: dict[str, list[tuple[str, StoredPiece]]] = {name: [] for name in self.manifest.variables}
        for file, stored in self.manifest.files.items():
            for piece in stored.pieces:
                pieces[piece.variable].append((file, piece))
        return pieces


def _indices(shape: tuple[int, ...], box: Box | None) -> list[Array]:
    """Return a box's index vector int64[n] of every axis, ascending."""
    if box is None:
        return [np.arange(size) for size in shape]
    return [_axis_indices(*axis) for axis in zip(box.factored, box.ranges, strict=True)]


def _axis_indices(sizes: tuple[int, ...], ranges: tuple[tuple[int, int], ...]) -> Array:
    indices = np.zeros(1, np.int64)
    for size, (start, stop) in zip(sizes, ranges, strict=True):
        indices = (indices[:, None] * size + np.arange(start, stop)).reshape(-1)
    return indices


def _run(places: Array) -> slice | Array:
    """Return places as a slice where they are neighbours: slices are copied without an index."""
    first, count = int(places[0]), len(places)
    return slice(first, first + count) if int(places[-1]) - first + 1 == count else places


def _copy(target: Array, targets: list[slice | Array], source: Array, sources: list[slice | Array]) -> None:
    if not target.shape:
        target[...] = source
    elif all(isinstance(places, slice) for places in (*targets, *sources)):
        target[tuple(targets)] = source[tuple(sources)]
    else:
        target[np.ix_(*map(_places, targets))] = source[np.ix_(*map(_places, sources))]


def _places(run: slice | Array) -> Array:
    return np.arange(run.start, run.stop) if isinstance(run, slice) else run


def _differences(
    stored: Mapping[str, tuple[str, tuple[int, ...]]], needed: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Iterator[str]:
    for name in sorted(needed.keys() - stored.keys()):
        yield f"it lacks variable {name!r}"
    for name in sorted(stored.keys() - needed.keys()):
        yield f"the plan lacks variable {name!r}"
    for name in sorted(needed.keys() & stored.keys()):
        if needed[name] != stored[name]:
            (dtype, shape), (other, others) = stored[name], needed[name]
            yield f"{name!r} is {dtype}{list(shape)} in it, {other}{list(others)} in the plan"
