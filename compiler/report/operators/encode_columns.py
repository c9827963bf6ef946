"""Columns in place of records: flattened lists, and numbers that are as exact as a page tells them."""

from collections.abc import Iterable, Sequence
from typing import Any


def flattened(lists: Iterable[Sequence[int]]) -> dict[str, list[int]]:
    """Return lists of numbers as columns: `of` has them one behind the other, `lengths` how many of each."""
    rows = list(map(list, lists))
    return {"of": [number for own in rows for number in own], "lengths": [len(own) for own in rows]}


def shortened(data: Any) -> Any:  # what JSON holds is of any type
    """Shorten numbers: whole ones where they are, else four digits."""
    if isinstance(data, float):
        return int(data) if data.is_integer() else float(f"{data:.4g}")
    if isinstance(data, dict):
        return {key: shortened(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [shortened(value) for value in data]
    return data
