"""Turn option texts into values; each error says what, where and how to mend it."""

import math
import re
from collections.abc import MutableMapping, Sequence
from typing import Literal, TypeVar, get_args

from partc.compiler.differentiation.updates.check_settings import NOT_NEGATIVE, POSITIVE, check_setting
from partc.cost.strategy import Mechanism
from partc.runtime.errors import BadUsage, one_of
from partc.runtime.execution.recorder import TracedSteps
from partc.runtime.plan.program import Aggregation

Value = TypeVar("Value")


def name_once(found: MutableMapping[str, Value], name: str, value: Value, option: str) -> None:
    """Note what an option says of a name. Raises BadUsage where it says two things."""
    if found.setdefault(name, value) != value:
        raise BadUsage(
            f"{option} says two things of {name}: {found[name]} and {value}",
            at=option,
            fix=f"name {name} once",
        )


def refuse_without(option: str, value: object, other: str, is_given: bool) -> None:
    """Refuse an option that is told, but not the other one that gives it a meaning. Raises BadUsage."""
    if value is not None and not is_given:
        raise BadUsage(
            f"{option} says nothing without {other}",
            at=f"{option} {value}",
            fix=f"leave it out, or give {other} as well",
        )


def refuse_with(option: str, is_given: bool, other: str) -> None:
    """Refuse a switch beside another that leaves it no meaning. Raises BadUsage."""
    if is_given:
        raise BadUsage(
            f"{option} says nothing with {other}", at=f"{option} with {other}", fix="leave one of the two out"
        )


def parse_pairs(text: str, option: str) -> dict[str, str] | None:
    """Parse `a=b,c=d`; empty text is None. Raises BadUsage."""
    if not text:
        return None
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise BadUsage(f"{part!r} is not NAME=NAME", at=option, fix=f"write {option} W=W_next,b=b_next")
        name_once(pairs, key, value, option)
    return pairs


def parse_axes(texts: Sequence[str]) -> dict[str, int | None]:
    """Parse `name=axis` texts; the axis may be none. Raises BadUsage."""
    axes: dict[str, int | None] = {}
    for text in texts:
        name, equals, axis = text.partition("=")
        is_number = axis.isdigit()
        if not (name and equals and (is_number or axis == "none")):
            raise BadUsage(
                f"{text!r} is not NAME=AXIS",
                at="--sample-axis",
                fix="write x=0 (axes count from 0), or rate=none",
            )
        name_once(axes, name, int(axis) if is_number else None, "--sample-axis")
    return axes


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Parse `name=size` texts. Raises BadUsage."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, equals, size = text.partition("=")
        if not (name and equals and size.isdigit() and int(size) > 0):
            raise BadUsage(f"{text!r} is not NAME=N", at="--size", fix="write --size batch=16")
        name_once(sizes, name, int(size), "--size")
    return sizes


def parse_bytes(text: str, option: str) -> int | None:
    """Parse `2.5GB`, `800MB`, `64kB` or a number of bytes; empty text is None. Raises BadUsage."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text)
    size = int(float(match[1]) * 1000 ** " kMG".index(match[2] or " ")) if match else 0
    if size < 1:
        raise BadUsage(f"{text!r} is no size", at=option, fix="write 2.5GB, 800MB, or a number of bytes")
    return size


def parse_seconds(text: str, option: str) -> float:
    """Parse `60s`, `1.5min`, `2h` or a number of seconds. Raises BadUsage."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|)", text)
    found_s = float(match[1]) * {"": 1, "s": 1, "min": 60, "h": 3600}[match[2]] if match else 0.0
    if found_s <= 0:
        raise BadUsage(f"{text!r} is no time", at=option, fix="write 60s, 1.5min, or a number of seconds")
    return found_s


def parse_interval(text: str, option: str) -> tuple[int | None, float | None]:
    """Parse a number of steps, or `90s`, `10min`: steps and seconds, one of them or none. Raises BadUsage."""
    if not text:
        return None, None
    if text.isdigit() and int(text):
        return int(text), None
    if text.endswith(("s", "min", "h")):
        return None, parse_seconds(text, option)
    raise BadUsage(f"{text!r} is no interval", at=option, fix="write 1000 for steps, or 90s, 10min, 2h")


def parse_steps(text: str, option: str) -> TracedSteps:
    """Parse `3`, the last three steps, or `100-105,500`, these; one step is `500-500`. Raises BadUsage."""
    if text.isdigit() and int(text):
        return int(text)
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last:
            fix = f"write {option} 100-105,500 for these steps, or {option} 3 for the last three"
            raise BadUsage(f"{text!r} are no steps", at=option, fix=fix)
        ranges.append((first, last))
    return tuple(ranges)


def parse_endpoint(text: str, option: str) -> tuple[str, int] | None:
    """Parse `9400` or `0.0.0.0:9400`: address (else this machine alone) and port. Raises BadUsage."""
    if not text:
        return None
    address, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise BadUsage(f"{text!r} is no port", at=option, fix=f"write {option} 9400, or 0.0.0.0:9400")
    return address.strip("[]") or "127.0.0.1", int(port)


def parse_batch_size(text: str) -> int | Literal["dynamic"] | None:
    """Parse --batch-size: a number or `dynamic`; empty text is None. Raises BadUsage."""
    if not text:
        return None
    if text == "dynamic":
        return "dynamic"
    if not text.isdigit() or int(text) < 1:
        raise BadUsage(f"{text!r} is not a batch size", at="--batch-size", fix="give a number, or 'dynamic'")
    return int(text)


def parse_learning_rate(text: str, at: str = "--lr", *, may_be_zero: bool = False) -> float | Literal["fed"]:
    """Parse a rate: a positive number, 0 where that says something, or `fed`. Raises BadUsage."""
    if text == "fed":
        return "fed"
    requirement = NOT_NEGATIVE if may_be_zero else POSITIVE
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (0 < rate < math.inf or (may_be_zero and rate == 0)):
        raise BadUsage(f"{text!r} is not {requirement}", at=at, fix="give a number, or 'fed'")
    check_setting(at, rate, requirement)
    return rate


def choose_aggregation(sum_dense: bool, sum_sparse: bool, fetched: str) -> Aggregation | None:
    """Return how gradients become one; None where nothing was asked: as the strategy says."""
    names = tuple(filter(None, (name.strip() for name in fetched.split(","))))
    if not (sum_dense or sum_sparse or names):
        return None
    return Aggregation(not sum_dense, not sum_sparse, names)


def parse_mechanisms(names: Sequence[str]) -> tuple[Mechanism, ...]:
    """Return the mechanisms of those names. Raises BadUsage."""
    mechanisms: tuple[Mechanism, ...] = get_args(Mechanism)
    if unknown := set(names) - set(mechanisms):
        wrong = min(unknown)
        raise BadUsage(f"no mechanism {wrong!r}", at="--without", fix=one_of(mechanisms, wrong))
    return tuple(mechanism for mechanism in mechanisms if mechanism in names)
