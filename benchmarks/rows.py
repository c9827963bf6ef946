"""What benchmarks found: a figure a row, and the file that keeps them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, and its ratio to another, which the benchmark names; None: there is none."""

    work: str
    system: str
    value: float
    unit: str
    ratio: float | None = None


def print_allowed(rows: Sequence[Row]) -> None:
    """Print figures whose ratios are to what is allowed."""
    for row in rows:
        allowed = f"   {row.ratio:.2f} of what is allowed" if row.ratio else ""
        print(f"{row.work:56}{row.value:10.2f} {row.unit}{allowed}")


def write_rows(rows: Sequence[object], path: Path | None) -> None:
    """Write records or mappings as JSON, where a path is given."""
    if path is not None:
        path.write_text(json.dumps(msgspec.to_builtins(rows), indent=1) + "\n")
