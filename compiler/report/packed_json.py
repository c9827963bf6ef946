"""Data of a page's scripts as JSON: what repeats is said once, so that reports of large steps stay small.

A long list is written in the shortest of these forms; templates/unpack.js reads them as `unpacked` does here.

    {"repeating": [k, k differences, back, length, k, ...]}   whole numbers by the differences between them:
                                                              new ones, then `length` from `back` before
    {"patterns": [...], "which": .., "numbers": ..}           texts: those that differ in their numbers alone
                                                              share a pattern, with a GAP for each number
    {"columns": [...]}                                        lists of one length: all first items, then all
                                                              second ones, ...
    {"lists": .., "lengths": ..}                              lists of whole numbers, one behind the other
    {"different": [...], "which": ..}                         anything else that occurs more than once

Layers of a network are alike, and so are their columns.
"""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, Generic, TypeVar

from markupsafe import Markup

Item = TypeVar("Item", bound=Hashable)
Json = Any  # JSON is of any type

GAP = "№"
SHORTEST = 24  # of lists that are packed
SHORTEST_REPEAT = 4
NUMBER = re.compile(r"0|[1-9]\d{0,14}")  # JavaScript's numbers hold no more digits
MOST_COLUMNS = 8
FORMS = {"repeating", "patterns", "columns", "lists", "different"}


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


def script_json(data: object) -> Markup:
    """Return packed data as JSON that may stand in a script element whatever its texts are."""
    text = _text(packed(data))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def packed(data: Json) -> Json:
    """Return data, of lists, dicts, texts and numbers, with its long lists packed."""
    if isinstance(data, dict):
        assert not FORMS & data.keys(), f"{FORMS & data.keys()} says how lists are packed"
        return {key: packed(value) for key, value in data.items()}
    if not isinstance(data, list | tuple):
        return data
    if len(data) < SHORTEST:
        return [packed(value) for value in data]
    return min(_forms(data), key=lambda form: len(_text(form)))


def unpacked(data: Json) -> Json:
    """Return what `packed` was given, tuples as lists."""
    if isinstance(data, list):
        return [unpacked(value) for value in data]
    if not isinstance(data, dict):
        return data
    if "repeating" in data:
        return list(accumulate(_differences(data["repeating"])))
    if "patterns" in data:
        numbers = iter(unpacked(data["numbers"]))
        texts = (data["patterns"][number].split(GAP) for number in unpacked(data["which"]))
        return [first + "".join(f"{next(numbers)}{part}" for part in rest) for first, *rest in texts]
    if "columns" in data:
        return [list(row) for row in zip(*map(unpacked, data["columns"]), strict=True)]
    if "lists" in data:
        numbers = iter(unpacked(data["lists"]))
        return [list(islice(numbers, length)) for length in unpacked(data["lengths"])]
    if "different" in data:
        different = [unpacked(value) for value in data["different"]]
        return [different[number] for number in unpacked(data["which"])]
    return {key: unpacked(value) for key, value in data.items()}


def _text(data: Json) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _forms(data: Sequence[Json]) -> Iterator[Json]:
    """Yield a long list in the forms that suit what is in it, as it is at first."""
    kinds = {type(value) for value in data}
    if kinds == {int}:
        yield list(data)
        yield {"repeating": _repeating([data[0], *(b - a for a, b in pairwise(data))])}
    elif kinds == {str}:
        yield list(data)
        if not any(GAP in text for text in data):
            yield _patterns(data)
    elif kinds <= {list, tuple}:
        yield from _forms_of_lists(data)
    else:
        yield [packed(value) for value in data]
        yield from _different(data)


def _forms_of_lists(data: Sequence[Sequence[Json]]) -> Iterator[Json]:
    lengths = [len(value) for value in data]
    if len(set(lengths)) == 1 and 0 < lengths[0] <= MOST_COLUMNS:
        yield {"columns": [packed(column) for column in zip(*data, strict=True)]}
    elif all(type(number) is int for value in data for number in value):
        numbers = [number for value in data for number in value]
        yield {"lists": packed(numbers), "lengths": packed(lengths)}
    else:
        yield [packed(value) for value in data]
    yield from _different(data)


def _different(data: Sequence[Json]) -> Iterator[Json]:
    different = Interned[str]()
    which = [different(_text(value)) for value in data]
    if len(different.items) < len(data) / 2:
        yield {"different": [json.loads(text) for text in different.items], "which": packed(which)}


def _patterns(texts: Iterable[str]) -> Json:
    patterns = Interned[str]()
    which: list[int] = []
    numbers: list[int] = []
    for text in texts:
        which.append(patterns(NUMBER.sub(GAP, text)))
        numbers += map(int, NUMBER.findall(text))
    return {"patterns": patterns.items, "which": packed(which), "numbers": packed(numbers)}


def _repeating(numbers: Sequence[int]) -> list[int]:
    """Return numbers as new ones and repetitions, in turn: of the last place that began with the same few."""
    code: list[int] = []
    last_at: dict[tuple[int, ...], int] = {}
    new: list[int] = []
    at = 0
    while at < len(numbers):
        before = last_at.get(tuple(numbers[at : at + SHORTEST_REPEAT]))
        length = 0 if before is None else _length_of_repeat(numbers, before, at)
        if before is None or length < SHORTEST_REPEAT:
            new.append(numbers[at])
            length = 1
        else:
            code += [len(new), *new, at - before, length]
            new = []
        for place in range(at, at + length):
            last_at[tuple(numbers[place : place + SHORTEST_REPEAT])] = place
        at += length
    return [*code, len(new), *new]


def _length_of_repeat(numbers: Sequence[int], before: int, at: int) -> int:
    length = 0
    while at + length < len(numbers) and numbers[before + length] == numbers[at + length]:
        length += 1
    return length


def _differences(code: Sequence[int]) -> list[int]:
    numbers: list[int] = []
    at = 0
    while at < len(code):
        new = code[at]
        numbers += code[at + 1 : at + 1 + new]
        at += 1 + new
        if at < len(code):
            back, length = code[at : at + 2]
            for _ in range(length):
                numbers.append(numbers[-back])
            at += 2
    return numbers
