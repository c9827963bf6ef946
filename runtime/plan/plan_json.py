"""plan.json: a plan as bytes and back, sealed with its own hash."""

import hashlib
import re
from pathlib import Path

import msgspec

from partc.runtime.errors import BadPlan
from partc.runtime.plan.program import PLAN_FORMAT, Plan

_NOT_FINITE = re.compile(rb"-?(?:Infinity|NaN)")  # as Python's json writes them
# What decoding a damaged JSON file raises: of strings that are no UTF-8, and of endless nesting, too.
NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def why_not_decoded(error: Exception, text: bytes) -> str:
    """Return what is wrong with a JSON file: with the line, where the decoder names a byte."""
    found = re.search(r"\(byte (\d+)\)$", str(error))
    if found is None:
        return str(error) if isinstance(error, msgspec.ValidationError) else f"not JSON: {error}"
    place = int(found[1])
    line = text.count(b"\n", 0, place) + 1
    if _NOT_FINITE.match(text, place) or _NOT_FINITE.match(text, max(place - 1, 0)):
        return f"line {line}: a number that is not finite, which JSON has none of"
    return f"not JSON: {error}, line {line}"


def encode_plan(plan: Plan) -> bytes:
    """Return plan.json with its own hash: equal plans give equal bytes."""
    sealed = msgspec.structs.replace(plan, sha256=sha256_of_plan(plan))
    return msgspec.json.format(msgspec.json.encode(sealed, order="deterministic"), indent=1) + b"\n"


def sha256_of_plan(plan: Plan) -> str:
    """Return the hash of all that a plan says but its hash; spaces and the order of keys do not count."""
    bare = msgspec.structs.replace(plan, sha256="")
    return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()


def decode_plan(text: bytes, at: Path) -> Plan:
    """Parse plan.json, whether or not its hash fits. Raises BadPlan."""
    try:
        # First the format alone: a plan of another one may have other keys.
        _check_format(msgspec.json.decode(text, type=_Format).format, at)
        return msgspec.json.decode(text, type=Plan)
    except NOT_DECODED as error:
        raise BadPlan(f"not a plan: {error}", at=str(at), fix="compile the model again") from error


class _Format(msgspec.Struct):
    format: str


def _check_format(plan_format: str, at: Path) -> None:
    if plan_format != PLAN_FORMAT:
        raise BadPlan(
            f"a plan of format {plan_format!r}",
            at=f"{at}: format",
            fix=f"this version of partc reads {PLAN_FORMAT!r}: compile the model again",
        )
