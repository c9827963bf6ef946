"""Files of samples: what lies uncompressed in them is mapped, not read.

    FILE.npz               an array for each input
    FILE.parquet           a column for each input: numbers, or lists of them that are all alike
    FOLDER/NAME.npy        an array for each input
    FOLDER/*.npz           shards: arrays that follow each other along the sample axis, in the order of names
    FOLDER/*.parquet       the same

A column of a Parquet file has samples first; they are put along the input's sample axis.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.data.column import Column
from partc.runtime.data.npz import map_npy, map_npz, shape_in_npz
from partc.runtime.errors import BadData, BadUsage

Array = np.ndarray[Any, np.dtype[Any]]
Axes = Mapping[str, int | None]  # input -> its sample axis

_KINDS = ".npz, .npy or .parquet files"


def is_of_samples(data: str) -> bool:
    """Tell whether `--data` names files of samples."""
    return data.endswith((".npz", ".parquet")) or (data != "" and Path(data).is_dir())


def open_samples(path: Path, axes: Axes) -> dict[str, Column]:
    """Open what a path holds: name -> samples. Raises BadData."""
    if path.suffix == ".parquet":
        return _columns(_parquet([path], axes), axes)
    if not path.is_dir():
        return _columns([map_npz(path)], axes)
    if files := sorted(path.glob("*.npy")):
        return _columns([{file.stem: map_npy(file) for file in files}], axes)
    if files := sorted(path.glob("*.npz")):
        return _columns([map_npz(file) for file in files], axes)
    if files := sorted(path.glob("*.parquet")):
        return _columns(_parquet(files, axes), axes)
    raise BadData("a folder without data", at=str(path), fix=f"give a folder of {_KINDS}")


def count_samples(path: Path, name: str, axis: int) -> int:
    """Return how many samples of an input a path holds, without reading them. Raises BadData."""
    if not path.is_dir():
        files = [path]
    elif (array := path / f"{name}.npy").exists():
        return _length(map_npy(array).shape, axis, array)
    else:
        files = sorted(path.glob("*.npz")) or sorted(path.glob("*.parquet"))
    if any(file.suffix == ".parquet" for file in files):
        return sum(_rows(file) for file in files)
    return sum(_length(shape_in_npz(file, name), axis, file) for file in files)


def _length(shape: tuple[int, ...], axis: int, path: Path) -> int:
    if axis < len(shape):
        return shape[axis]
    raise BadData(f"an array of shape {list(shape)}", at=str(path), fix=f"put samples on its axis {axis}")


def _columns(shards: Sequence[Mapping[str, Array]], axes: Axes) -> dict[str, Column]:
    first = shards[0]
    for shard in shards:
        if missing := first.keys() ^ shard.keys():
            raise BadData(
                f"array {min(missing)!r} is in some files and not in others",
                at="data",
                fix="let all files hold the same arrays",
            )
    return {
        name: Column(
            [shard[name] for shard in (shards if axes.get(name) is not None else shards[:1])],
            axes.get(name),
            name,
        )
        for name in first
    }


def _rows(path: Path) -> int:
    with _reading_parquet(path) as parquet:
        return int(parquet.read_metadata(path).num_rows)


@contextmanager
def _reading_parquet(path: Path) -> Iterator[Any]:  # pyarrow's module, which has no types to check against
    """Give what reads Parquet files, and let what it raises be refused as data."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise BadUsage(
            "reading Parquet needs pyarrow, which is not installed",
            at=str(path),
            fix="pip install 'partc[parquet]'",
        ) from error
    try:
        yield pyarrow.parquet
    except (OSError, pyarrow.ArrowException) as error:
        raise BadData(f"no table can be read: {error}", at=str(path), fix="give a Parquet file") from error


def _parquet(paths: Sequence[Path], axes: Axes) -> list[dict[str, Array]]:
    """Read tables that have rows: an empty list column does not tell how long lists are."""
    filled = [_arrays(table, path, axes) for path in paths if (table := _table(path)).num_rows]
    return filled or [_arrays(_table(paths[0]), paths[0], axes)]


def _arrays(table: Any, path: Path, axes: Axes) -> dict[str, Array]:
    arrays = {name: _numbers(table[name].combine_chunks(), f"{path}: {name}") for name in table.column_names}
    return {name: np.moveaxis(array, 0, axes.get(name) or 0) for name, array in arrays.items()}


def _table(path: Path) -> Any:
    with _reading_parquet(path) as parquet:
        return parquet.read_table(path)


def _numbers(column: Any, at: str) -> Array:  # pyarrow's arrays, which have no types to check against
    """Return a column as an array; nested lists become axes."""
    lengths: list[int] = []
    rows = len(column)
    _refuse_missing(column, rows, at)
    while hasattr(column.type, "value_type"):
        inner = column.flatten()
        outer = rows * int(np.prod(lengths, dtype=np.int64))
        length, rest = divmod(len(inner), max(1, outer))
        same = hasattr(column.type, "list_size") or bool(
            (np.diff(column.offsets.to_numpy(zero_copy_only=False)) == length).all()
        )
        if rest or not same:
            raise BadData("lists of unequal length", at=at, fix="pad them to one length")
        lengths.append(length)
        column = inner
        _refuse_missing(column, rows, at)
    numbers: Array = column.to_numpy(zero_copy_only=False)
    if numbers.dtype == object:
        raise BadData(f"values of type {column.type}", at=at, fix="give numbers, or lists of numbers")
    return numbers.reshape(rows, *lengths)


def _refuse_missing(column: Any, rows: int, at: str) -> None:
    """Refuse nulls, of rows or within their lists, which are equally long. Raises BadData."""
    if not column.null_count:
        return
    first = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
    row = first * rows // len(column)
    what = f"values are missing: {column.null_count}, the first in row {row}"
    raise BadData(what, at=at, fix="leave such rows out, or fill them")
