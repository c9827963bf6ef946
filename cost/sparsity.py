"""How many rows of a table a step touches, measured from data, as JSON beside the strategy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from partc.cost.strategy import SyncFacts
from partc.runtime.errors import BadUsage
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.plan.record import Record

SPARSITY_FORMAT = "partc-sparsity/1"
SPARSITY = "sparsity.json"


class TouchedRows(Record, frozen=True):
    """What the steps of a sample touch of one table, on average.

    `distinct` pairs a number of replicas with the distinct rows that so many neighbouring ones touch
    together in a step: one replica, those of a host, all.
    """

    rows: int
    drawn: float  # ids that one replica reads, repeated ones included
    distinct: tuple[tuple[int, float], ...]  # by number of replicas, ascending; the first is 1
    spread: tuple[int, ...] = ()  # of a host's distinct rows, as row_spread.py has it


class Sparsity(Record, frozen=True):
    """The tables whose ids follow from the data alone."""

    format: str
    sample: str  # the file's name, or MODULE:FUNC
    sample_sha256: str | None  # of the file
    steps: int
    parameters: dict[str, TouchedRows]


def encode_sparsity(sparsity: Sparsity) -> bytes:
    """Return sparsity.json: equal measurements give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(sparsity, order="deterministic"), indent=1) + b"\n"


def read_sparsity(path: Path) -> Sparsity | None:
    """Read what was measured, None where no file is. Raises BadUsage where it is none that partc wrote."""
    if not path.is_file():
        return None
    fix = "take the file that `partc compile` wrote beside strategy.json"
    try:
        sparsity = msgspec.json.decode(path.read_bytes(), type=Sparsity)
    except (OSError, *NOT_DECODED) as error:
        raise BadUsage(f"measured rows cannot be read: {error}", at=str(path), fix=fix) from error
    if sparsity.format != SPARSITY_FORMAT:
        raise BadUsage(f"measurements of format {sparsity.format!r}", at=f"{path}: format", fix=fix)
    for name, touched in sparsity.parameters.items():
        if not touched.distinct:
            raise BadUsage("no number of distinct rows", at=f"{path}: parameters: {name}", fix=fix)
    return sparsity


def with_measured_rows(facts: Sequence[SyncFacts], sparsity: Sparsity) -> tuple[SyncFacts, ...]:
    """Replace the assumed rows touched by measured ones, where there are any."""
    return tuple(
        replace(
            fact, touched_rows=measured.distinct[0][1], distinct=measured.distinct, spread=measured.spread
        )
        if fact.sparse and (measured := sparsity.parameters.get(fact.name))
        else fact
        for fact in facts
    )
