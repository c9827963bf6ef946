"""Two steps side by side: records with a JSON form."""

from typing import Literal

from partc.cost.step_account import Difference, StepAccount
from partc.runtime.plan.record import Record

COMPARISON_FORMAT = "partc-comparison/1"

SideKind = Literal["predicted", "measured"]


class ComparedSide(Record, frozen=True):
    """One of two steps: predicted of a plan, or measured of its run.

    memory_bytes  of the fullest device
    """

    name: str
    kind: SideKind
    account: StepAccount
    samples: int | None
    memory_bytes: int


class Moved(Record, frozen=True):
    """Variables or operators that are otherwise in the second plan, all alike."""

    names: tuple[str, ...]
    before: str
    after: str


class Amount(Record, frozen=True):
    """How many communications of a kind there are and what they move; or what a link carries."""

    what: str
    before_bytes: float
    after_bytes: float
    before_count: int = 0
    after_count: int = 0


class Comparison(Record, frozen=True):
    """What differs between two steps. `differences` add up to that of their times; `reason`: in words."""

    format: str
    before: ComparedSide
    after: ComparedSide
    reason: str
    differences: tuple[Difference, ...]
    variables: tuple[Moved, ...]
    operators: tuple[Moved, ...]
    communications: tuple[Amount, ...]
    links: tuple[Amount, ...]
