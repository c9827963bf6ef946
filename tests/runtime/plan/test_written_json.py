"""Records from JSON that people write: what is said twice is refused, and a refusal says where."""

import re

import msgspec
import pytest

from partc.runtime.plan.record import Record
from partc.runtime.plan.written_json import decode_written


class Part(Record, frozen=True):
    axis: int


class Whole(Record, frozen=True):
    name: str = ""
    parts: dict[str, dict[str, Part]] = msgspec.field(default_factory=dict)
    groups: tuple[dict[str, int], ...] = ()


def test_what_is_said_once_is_read() -> None:
    text = b'{"name": "n", "parts": {"W": {"t": {"axis": 0}}, "V": {"t": {"axis": 0}}}, "groups": [{"a": 1}]}'

    whole = decode_written(text, Whole)

    assert whole == Whole("n", {"W": {"t": Part(0)}, "V": {"t": Part(0)}}, ({"a": 1},))


@pytest.mark.parametrize(
    ("text", "name", "place"),
    [
        (b'{"name": "n", "groups": [], "name": "n"}', "name", "$"),
        (b'{"parts": {"W": {}, "V": {}, "W": {}}}', "W", "$.parts"),
        (b'{"parts": {"W": {"data": {"axis": 0, "axis": 1}}}}', "axis", "$.parts.W.data"),
        (b'{"groups": [{"a": 1}, {"b": 1, "\\u0062": 1}]}', "b", "$.groups[1]"),
        (b'{"parts": {"W\\n": {"t": {"axis": 0, "axis": 1}}}}', "axis", "$.parts['W\\n'].t"),
    ],
)
def test_a_name_that_is_there_twice_is_refused_by_its_place(text: bytes, name: str, place: str) -> None:
    refusal = f"the name '{name}' is there twice; write it once - at `{place}`"
    with pytest.raises(msgspec.ValidationError, match=re.escape(refusal)):
        decode_written(text, Whole)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            b'{"parts": {"V": {"t": {"axis": 0}}, "W.b": {"t": {"axis": 1}, "u": {"axis": "x"}}}}',
            "$.parts.W.b.u.axis",
        ),
        (b'{"parts": {"V": {}, "W": 3}}', "$.parts.W"),
        (b'{"groups": [{"a": 1}, {"a": 1, "b": 1.5}]}', "$.groups[1].b"),
        (b'{"name": 3}', "$.name"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_names_that_lead_to_it(text: bytes, place: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(f" - at `{place}`")):
        decode_written(text, Whole)
