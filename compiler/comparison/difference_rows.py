"""Differences between two steps as rows of a table, for pages and terminals."""

from collections.abc import Sequence
from dataclasses import dataclass

from partc.compiler.report.units import NO_BREAK, seconds, size
from partc.cost.step_account import RATED_BYTES, Difference

LEAST_S = 1e-8  # less is what sums of floats leave
KINDS = {
    "compute": "computing",
    "core": "waiting for a core:",
    "sharing": "fewer cores than cluster.json says:",
    "transfer": "waiting for",
}


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """What one thing adds to two steps."""

    what: str
    before: str
    after: str
    difference: str
    remark: str


def difference_rows(differences: Sequence[Difference], sides: tuple[str, str]) -> tuple[DifferenceRow, ...]:
    """Return differences in words. `sides`: what the two steps are called."""
    return tuple(
        DifferenceRow(
            " ".join(filter(None, (KINDS.get(difference.kind, ""), difference.what))),
            seconds(difference.before_s),
            seconds(difference.after_s),
            signed(difference.seconds),
            _remark(difference, sides),
        )
        for difference in differences
    )


def signed(difference_s: float) -> str:
    """Print a difference of times: +3.20 ms, -410 µs."""
    if abs(difference_s) < LEAST_S:
        return seconds(0.0)
    sign = "+" if difference_s > 0 else "\u2212"
    return f"{sign}{seconds(abs(difference_s))}"


def _remark(difference: Difference, sides: tuple[str, str]) -> str:
    if difference.kind != "transfer":
        return f"rank{NO_BREAK}{difference.rank}" if difference.kind in ("compute", "core") else ""
    rates = [
        f"{size(rate)}/s{NO_BREAK}{side}"
        for rate, side in zip(
            (difference.before_bytes_per_s, difference.after_bytes_per_s), sides, strict=True
        )
        if rate is not None and difference.bytes >= RATED_BYTES
    ]
    return ", ".join(filter(None, (difference.link, *rates)))


def sum_row(what: str, differences: Sequence[Difference]) -> DifferenceRow:
    """Return several differences as one."""
    before_s, after_s = sum(d.before_s for d in differences), sum(d.after_s for d in differences)
    return DifferenceRow(what, seconds(before_s), seconds(after_s), signed(after_s - before_s), "")


def total_row(before_s: float, after_s: float) -> DifferenceRow:
    """Return what all differences come to."""
    return DifferenceRow("the step", seconds(before_s), seconds(after_s), signed(after_s - before_s), "")
