"""JSON that people write, as records: what is said twice is refused, and not taken as said last."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

Value = TypeVar("Value")


@dataclass(frozen=True)
class _SaidTwice:
    """An object that has a name twice."""

    name: str


def decode_written(text: bytes, kind: type[Value]) -> Value:
    """Return the record that a person's JSON file holds.

    Raises plan_json.NOT_DECODED, of which its why_not_decoded tells: a name that an object has twice, too.
    """
    msgspec.json.decode(text)  # its refusals say where the syntax ends
    read = json.loads(text, object_pairs_hook=_names_once, parse_int=str)
    for place, name in _said_twice(read, "$"):
        raise msgspec.ValidationError(f"the name {name!r} is there twice; write it once - at `{place}`")
    return msgspec.json.decode(text, type=kind)


def _names_once(pairs: Sequence[tuple[str, object]]) -> object:
    entries = dict(pairs)
    if len(entries) == len(pairs):
        return entries
    names = [name for name, _ in pairs]
    return _SaidTwice(next(name for name in names if names.count(name) > 1))


def _said_twice(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield where an object has a name twice, and the name."""
    if isinstance(value, _SaidTwice):
        yield place, value.name
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from _said_twice(entry, f"{place}.{name}")
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _said_twice(entry, f"{place}[{number}]")
