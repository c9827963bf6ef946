"""What else operator groups could be, or why that is not priced."""

from dataclasses import dataclass

from partc.passes.search.operators.operator_space import SplitDegrees

TOO_LARGE = (
    "What else an operator could be is not priced in this report: {}, and pricing more than {} would keep "
    "you waiting. partc search prices it."
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A configuration of a group: what it divides, on how many workers, and its price alone."""

    split: SplitDegrees
    workers: int
    computing_s: float
    updating_s: float
    memory_bytes: float
    taken: bool


@dataclass(frozen=True)
class Alternatives:
    """By group as find_groups has them: configurations, the quickest first, or why there are none."""

    of_groups: tuple[tuple[Alternative, ...], ...]
    why_none: str


def too_large(what: str, most: str) -> Alternatives:
    """Return that nothing is priced, and why."""
    return Alternatives((), TOO_LARGE.format(what, most))
