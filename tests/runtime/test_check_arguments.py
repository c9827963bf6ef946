"""Public functions and records are given Python's own numbers, which are written as JSON."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest

from partc.runtime.check_arguments import public, public_record
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job import Checkpoints

Numbers = Mapping[str, int | None] | Literal["none"]


@public
def taken(
    number: float | None = None,
    numbers: Collection[int] = (),
    ranges: int | tuple[tuple[int, int], ...] = 0,
    named: Numbers = "none",
    listed: list[float] | None = None,
    iterated: Iterable[int] = (),
    arrays: Mapping[str, np.ndarray[Any, np.dtype[Any]]] | None = None,
) -> Any:
    return number, numbers, ranges, named, listed, iterated, arrays


@public_record
@dataclass(frozen=True)
class Record:
    count: int | None = None
    rates: Sequence[float] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


def kinds_of(value: object) -> object:
    """Return a value with the type in the place of each number."""
    if isinstance(value, Mapping):
        return {kinds_of(key): kinds_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(kinds_of, value))
    return value if value is None or isinstance(value, str) else type(value)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"number": np.float64(2.5)}, float),
        ({"number": np.float32(2.5)}, float),
        ({"number": Fraction(1, 2)}, float),
        ({"number": np.int64(2)}, int),
        ({"number": None}, None),
        ({"numbers": np.arange(2)}, (int, int)),
        ({"numbers": {np.int8(1)}}, (int,)),
        ({"ranges": np.uint8(3)}, int),
        ({"ranges": [[np.int64(1), 2]]}, ((int, int),)),
        ({"named": {"x": np.int64(0), "rate": None}}, {"x": int, "rate": None}),
        ({"named": "none"}, "none"),
        ({"listed": [np.float64(1), 2]}, [float, int]),
    ],
)
def test_arguments_have_numbers_of_pythons_own(given: Mapping[str, Any], plain: object) -> None:
    name = next(iter(given))
    place = ("number", "numbers", "ranges", "named", "listed").index(name)

    assert kinds_of(taken(**given)[place]) == plain


def test_what_holds_no_numbers_or_can_be_read_once_is_handed_on_as_it_is() -> None:
    arrays, iterated = {"x": np.arange(3)}, iter([np.int64(1)])

    *_, handed_iterated, handed_arrays = taken(iterated=iterated, arrays=arrays)

    assert handed_iterated is iterated
    assert handed_arrays is arrays


@pytest.mark.parametrize("ranges", [((1, 2, 3),), ((1,),), ((1, "x"),), ((1, 2), 3)])
def test_tuples_are_of_their_types_one_by_one(ranges: Any) -> None:
    with pytest.raises(BadUsage, match="a tuple of a whole number and a whole number"):
        taken(ranges=ranges)


@pytest.mark.parametrize(
    ("given", "what", "place"),
    [
        ({"arrays": {"x": np.zeros(1), "y": [1]}}, "[1] is not an array", "taken(arrays=...)['y']"),
        ({"arrays": {3: np.zeros(1)}}, "3 is not text", "taken(arrays=...), key 3"),
        ({"named": {"rate": "much"}}, "'much' is not a whole number or None", "taken(named=...)['rate']"),
        ({"listed": [1, 2, None]}, "None is not a number", "taken(listed=...)[2]"),
        ({"ranges": ((1, 2), (1, "x"))}, "a tuple of a whole number and", "taken(ranges=...)[1]"),
        ({"listed": (1, 2)}, "(1, 2) is not a list of a number", "taken(listed=...)"),
    ],
)
def test_what_is_wrong_in_a_container_is_named(given: Mapping[str, Any], what: str, place: str) -> None:
    with pytest.raises(BadUsage) as refused:
        taken(**given)

    assert what in refused.value.what
    assert refused.value.at == place


def test_records_have_numbers_of_pythons_own() -> None:
    record = Record(np.int64(3), rates=[np.float32(1)], sizes={"batch": np.int64(4)})  # type: ignore[arg-type]

    assert kinds_of((record.count, record.rates, record.sizes)) == (int, (float,), {"batch": int})


def test_checkpoints_have_numbers_of_pythons_own() -> None:
    saved = Checkpoints("here", every_steps=np.int64(2), every_s=np.float64(1.0))  # type: ignore[arg-type]

    assert kinds_of((saved.every_steps, saved.every_s, saved.keep)) == (int, float, int)
    with pytest.raises(BadUsage, match="'two' is not a whole number"):
        Checkpoints("here", keep="two")  # type: ignore[arg-type]
