"""JSON that people write, as records: what is said twice is refused, and not taken as said last."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

import msgspec

from partc.runtime.errors import PartcError

Value = TypeVar("Value")
ANY_NAME = "[...]"  # how the decoder writes an entry of an object whose names are the user's
_PLAIN = re.compile(r"[\w./:*-]+")  # names that a path is told with as they are
_STEPS = re.compile(r"\.([^.\[`]+)|\[(\d+|\.{3})\]")


@dataclass(frozen=True)
class _SaidTwice:
    """An object that has a name twice."""

    name: str


def decode_written(text: bytes, kind: type[Value]) -> Value:
    """Return the record that a person's JSON file holds.

    Raises plan_json.NOT_DECODED, of which its why_not_decoded tells: a name that an object has twice, too.
    """
    entries = msgspec.json.decode(text)  # its refusals say where the syntax ends
    read = json.loads(text, object_pairs_hook=_names_once, parse_int=str)
    for place, name in _said_twice(read, "$"):
        raise msgspec.ValidationError(f"the name {name!r} is there twice; write it once - at `{place}`")
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `")
        if ANY_NAME not in place:
            raise
        refusal = str(error)
        path = _path_with_names(entries, place, lambda fewer: _is_refused_so(fewer, kind, refusal))
        raise msgspec.ValidationError(f"{what} - at `{_written(path)}`") from error


def _is_refused_so(entries: object, kind: type, refusal: str) -> bool:
    try:
        msgspec.json.decode(msgspec.json.encode(entries), type=kind)
    except msgspec.ValidationError as error:
        return str(error) == refusal
    except PartcError:  # of a record that is whole now
        return False
    return False


def _path_with_names(entries: object, place: str, is_refused: Callable[[object], bool]) -> list[str | int]:
    """Return the path to what is refused, where the decoder says `[...]` of any object's entry.

    It is the entry without whose neighbours the same is refused.
    """
    path: list[str | int] = []
    for name, number in _STEPS.findall(place):
        if name or number.isdecimal():
            path.append(name or int(number))
            continue
        names: dict[str, object] = reduce(getitem, path, entries)  # type: ignore[arg-type]
        path.append(next(n for n in names if is_refused(_with_one(entries, path, n))))
    return path


def _with_one(entries: Any, path: Sequence[str | int], name: str) -> object:  # whatever JSON holds
    """Return the entries with one name alone in the object at a path."""
    if not path:
        return {name: entries[name]}
    copied = entries.copy()
    copied[path[0]] = _with_one(entries[path[0]], path[1:], name)
    return copied


def _written(path: Sequence[str | int]) -> str:
    return "$" + "".join(map(_step, path))


def _step(step: str | int) -> str:
    is_plain = isinstance(step, str) and _PLAIN.fullmatch(step)
    return f".{step}" if is_plain else f"[{step!r}]"


def _names_once(pairs: Sequence[tuple[str, object]]) -> object:
    entries: dict[str, object] = {}
    for name, value in pairs:
        if name in entries:
            return _SaidTwice(name)
        entries[name] = value
    return entries


def _said_twice(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield where an object has a name twice, and the name."""
    if isinstance(value, _SaidTwice):
        yield place, value.name
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from _said_twice(entry, place + _step(name))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _said_twice(entry, place + _step(number))
