"""What members tell each other before rows travel: how many, of which type and trailing shape.

    header  int64[1 + 8 k]   rows, then for each of k values: type code, trailing rank, 6 trailing sizes

A member that does not send leaves its header zero: whoever receives learns the trailing shapes from those
who do send. Nothing is believed before it is checked, and no memory is taken before.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partc.runtime.errors import BadPlan, RankFailed

Array = np.ndarray[Any, np.dtype[Any]]

_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
_TRAILING = 6
_PER_VALUE = 2 + _TRAILING


@dataclass(frozen=True, slots=True)
class RowType:
    """One row of a value."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def header_size(values: int) -> int:
    """Return the length of a header for `values` values."""
    return 1 + _PER_VALUE * values


def write_header(header: Array, count: int, rows: Sequence[Array]) -> None:
    """Fill a header: `count` rows of every array of `rows`."""
    header[:] = 0
    header[0] = count
    for index, array in enumerate(rows):
        if array.ndim - 1 > _TRAILING or array.dtype.name not in _DTYPES:
            raise BadPlan(
                f"rows of type {array.dtype} and rank {array.ndim} cannot travel",
                at="rows",
                fix=f"use one of {_DTYPES} and at most {_TRAILING + 1} axes",
            )
        first = 1 + _PER_VALUE * index
        header[first] = 1 + _DTYPES.index(array.dtype.name)
        header[first + 1] = array.ndim - 1
        header[first + 2 : first + 1 + array.ndim] = array.shape[1:]


def read_headers(headers: Array, at: str) -> tuple[tuple[int, ...], tuple[RowType, ...]]:
    """Return the rows from every member and the values' types. Raises RankFailed.

    headers  int64[members, header]. No member sends: no types.
    """
    counts = tuple(int(count) for count in headers[:, 0])
    sending = headers[headers[:, 1] != 0] if headers.shape[1] > 1 else headers[:0]
    if min(counts, default=0) < 0 or sum(counts) != int(sending[:, 0].sum()):
        raise _refused(f"row counts {list(counts)}", at)
    if not len(sending):
        return counts, ()
    if (sending[:, 1:] != sending[0, 1:]).any():
        raise _refused("members send rows of different types or shapes", at)
    types = tuple(_read_type(fields, at) for fields in sending[0, 1:].reshape(-1, _PER_VALUE))
    total_bytes = sum(counts) * sum(row.row_bytes for row in types)
    if total_bytes > _machine_bytes():
        raise _refused(f"{total_bytes} bytes announced, the machine has {_machine_bytes()}", at)
    return counts, types


def _read_type(fields: Array, at: str) -> RowType:
    code, rank = int(fields[0]), int(fields[1])
    if not (0 < code <= len(_DTYPES) and 0 <= rank <= _TRAILING and (fields[2:] >= 0).all()):
        raise _refused(f"a header of {fields.tolist()}", at)
    return RowType(np.dtype(_DTYPES[code - 1]), tuple(int(size) for size in fields[2 : 2 + rank]))


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _refused(what: str, at: str) -> RankFailed:
    return RankFailed(f"a message does not fit the plan: {what}", at=at, fix="compile the model again")
