"""Place rows on servers longest first: the solver's starting point.

Source: Graham, SIAM J. Appl. Math. 17 (1969) 416-429: at most 4/3 of the best for whole items.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partc.cost.assignment.row_spread import Spread


@dataclass(frozen=True, slots=True)
class Rows:
    """One variable's rows, to be stored whole on one server or split."""

    name: str
    rows: int
    stored_row_bytes: int
    moved_row_bytes: float  # in a step, of all its rows on average: of a table's bias far less than one
    is_split: bool
    fixed: tuple[int, ...] | None = None  # rows per server, where the user has decided
    spread: Spread = ()  # of its traffic over its rows

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all rows with their slots."""
        return self.rows * self.stored_row_bytes


def place_longest_first(items: Sequence[Rows], rooms: Sequence[int], most: float) -> list[list[int]]:
    """Return rows per [item][server]: whole items longest first, split ones poured on top to level.

    A server gets at most the share `most` of a split item. Where memory is tight the result may
    exceed a room: it is a hint.
    """
    load = [0] * len(rooms)
    rows_per_server = [[0] * len(rooms) for _ in items]
    # sorted() is stable, so equal items stay in the given order.
    order = sorted(range(len(items)), key=lambda i: _order_key(items[i]))
    for i in order:
        item = items[i]
        rows_per_server[i] = _place(item, rooms, load, most)
        load = [
            before + count * item.stored_row_bytes
            for before, count in zip(load, rows_per_server[i], strict=True)
        ]
    return rows_per_server


def _order_key(item: Rows) -> tuple[bool, bool, int]:
    return item.fixed is None, item.is_split, -item.stored_bytes


def _place(item: Rows, rooms: Sequence[int], load: Sequence[int], most: float) -> list[int]:
    if item.fixed is not None:
        return list(item.fixed)
    return _pour(item, rooms, load, most) if item.is_split else _whole(item, rooms, load)


def _whole(item: Rows, rooms: Sequence[int], load: Sequence[int]) -> list[int]:
    fitting = [s for s, room in enumerate(rooms) if load[s] + item.stored_bytes <= room]
    chosen = min(fitting or range(len(rooms)), key=lambda s: (load[s], s))
    return [item.rows if s == chosen else 0 for s in range(len(rooms))]


def _pour(item: Rows, rooms: Sequence[int], load: Sequence[int], most: float) -> list[int]:
    """Find by bisection the level of bytes up to which every server is filled with the item's rows."""
    low, high = 0, max(load) + item.stored_bytes
    while low < high:
        level = (low + high) // 2
        if sum(_rows_up_to(level, item, rooms, load, most)) >= item.rows:
            high = level
        else:
            low = level + 1
    rows = _rows_up_to(low, item, rooms, load, most)
    surplus = sum(rows) - item.rows
    for s in reversed(range(len(rows))):
        returned = min(rows[s], max(0, surplus), 1)
        rows[s] -= returned
        surplus -= returned
    rows[0] -= surplus  # what did not fit anywhere, so that all rows are placed
    return rows


def _rows_up_to(level: int, item: Rows, rooms: Sequence[int], load: Sequence[int], most: float) -> list[int]:
    cap = math.ceil(item.rows * most)
    return [
        min(cap, max(0, min(level, room) - used) // max(1, item.stored_row_bytes))
        for room, used in zip(rooms, load, strict=True)
    ]
