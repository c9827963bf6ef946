"""Compact JSON for a page: columns in place of records, and what repeats said once.

Interned      a list of different things; elsewhere their numbers stand for them
flattened     lists of lists of numbers as one list, and the length of each
"""

import json
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from markupsafe import Markup

Item = TypeVar("Item", bound=Hashable)


class Interned(Generic[Item]):
    """Different things in the order in which they were first met."""

    def __init__(self) -> None:
        self._number: dict[Item, int] = {}

    def __call__(self, item: Item) -> int:
        """Return the number of a thing."""
        return self._number.setdefault(item, len(self._number))

    @property
    def items(self) -> list[Item]:
        """Return the things in the order of their numbers."""
        return list(self._number)


def flattened(lists: Iterable[Sequence[int]]) -> dict[str, list[int]]:
    """Return lists of numbers as columns: `of` has them one behind the other, `lengths` how many of each."""
    found = list(map(list, lists))
    return {"of": [number for own in found for number in own], "lengths": [len(own) for own in found]}


def script_json(data: object) -> Markup:
    """Return data as JSON that may stand in a script element whatever its texts are."""
    text = json.dumps(_plain(data), ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _plain(data: Any) -> Any:  # JSON is of any type
    """Shorten numbers: whole ones where they are, else four digits."""
    if isinstance(data, float):
        return int(data) if data.is_integer() else float(f"{data:.4g}")
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return data
