"""Count the bytes that a rank sends to others and receives from them, row ids apart.

A piece counts as if it went straight from the member that has it to each that wants it, and a sum as if
it were made where it ends up. n members, w bytes of a value, own: this member's piece:

    kind              sent                          received
    all_reduce        2 w (n-1) / n                 2 w (n-1) / n
    reduce            w (all but the root)          w (n-1) (root only)
    broadcast         w (n-1) (root only)           w (all but the root)
    reduce_scatter    w - own                       own (n-1)
    all_gather        own (n-1)                     w - own
    shift_ahead       w (all but the last)          w (all but the first)
    shift_back        w (all but the first)         w (all but the last)
    exchange          what it has and others take   what it takes of others
    gather_rows       own (all but the root)        the others' (root only)
    scatter_rows      the others' (root only)       own (all but the root)
    all_gather_rows   own (n-1)                     the others'
    all_to_all_rows   the others'                   what the others cut for it

Algorithms that relay pieces or sums (rings, trees) move the same bytes over all ranks together, and the
same per rank where pieces are equal: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) 117-124.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partc.runtime.transports.communication import ROW_KINDS, Part
from partc.runtime.transports.rounded_sums import sent_bytes

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class Exchanged:
    """Bytes of one rank since it began. Ids are integers that travel with rows; headers are left out."""

    values_sent: int = 0
    values_received: int = 0
    ids_sent: int = 0
    ids_received: int = 0

    @property
    def values(self) -> int:
        """Return what went out and came in, without ids: what table 3 of the Parallax paper counts."""
        return self.values_sent + self.values_received

    @property
    def ids(self) -> int:
        """Return the ids that went out and came in."""
        return self.ids_sent + self.ids_received

    def add(self, part: Part, landed: Sequence[Array]) -> None:
        """Add a communication that is complete; `landed` is what a row kind brought."""
        if len(part.members) == 1:
            return
        if part.start.kind == "exchange":
            self.values_sent += part.sent_bytes
            self.values_received += part.received_bytes
            return
        if part.start.kind not in ROW_KINDS:
            for dense in part.dense:
                sizes = sent_bytes(part, dense.source), sent_bytes(part, dense.target)
                sent, received = _dense_bytes(part, *sizes)
                self.values_sent += sent
                self.values_received += received
            return
        for array, nbytes in zip(part.rows, _rows_sent(part), strict=True):
            if _are_ids(array):
                self.ids_sent += nbytes
            else:
                self.values_sent += nbytes
        for array, nbytes in _rows_received(part, landed):
            if _are_ids(array):
                self.ids_received += nbytes
            else:
                self.values_received += nbytes


def _dense_bytes(part: Part, source_bytes: int, target_bytes: int) -> tuple[int, int]:
    """Return what one value sends and receives."""
    others = len(part.members) - 1
    match part.start.kind:
        case "all_reduce":
            shared = 2 * source_bytes * others // len(part.members)
            return shared, shared
        case "reduce":
            return (0, source_bytes * others) if part.is_root else (source_bytes, 0)
        case "broadcast":
            return (source_bytes * others, 0) if part.is_root else (0, source_bytes)
        case "reduce_scatter":
            return source_bytes - target_bytes, target_bytes * others
        case "shift_ahead" | "shift_back":
            sent = 0 if part.shifts_to is None else source_bytes
            return sent, 0 if part.shifts_from is None else target_bytes
        case _:
            return source_bytes * others, target_bytes - source_bytes


def _rows_sent(part: Part) -> list[int]:
    """Return the bytes that leave with each array of rows."""
    sizes = [array.nbytes for array in part.rows]
    if part.counts:
        total = sum(part.counts)
        leaving = total - part.counts[part.position]
        return [size * leaving // total if total else 0 for size in sizes]
    if part.start.kind == "all_gather_rows":
        return [size * (len(part.members) - 1) for size in sizes]
    return [0] * len(sizes) if part.is_root else sizes


def _rows_received(part: Part, landed: Sequence[Array]) -> list[tuple[Array, int]]:
    """Return arrays that landed, and the bytes of each that others sent."""
    match part.start.kind:
        case "scatter_rows":
            return [] if part.is_root else [(array, array.nbytes) for array in landed]
        case "gather_rows" if not part.is_root:
            return []
    if not landed:
        return []
    *arrays, counts = landed
    total = int(counts.sum())
    others = total - int(counts[part.position])
    return [(array, array.nbytes * others // total if total else 0) for array in arrays]


def _are_ids(array: Array) -> bool:
    return array.dtype.kind in "iu"
