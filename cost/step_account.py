"""What a step's time goes to, and what makes another one longer: records that have a JSON form.

An account's terms add up to its step, and so the differences of two accounts' terms add up to the difference
of their steps.
"""

from collections.abc import Callable
from typing import Literal

from partc.runtime.plan.record import Record

RUN_FORMAT = "partc-run/1"

RATED_BYTES = 64e3  # a transfer of less is held up by its messages, so that its rate says nothing

# As in simulation/critical_path.py.
TermKind = Literal["compute", "core", "transfer", "start", "store", "data", "between"]

DifferenceKind = TermKind | Literal["sharing"]  # of cores that are fewer than the cluster file says


class Term(Record, frozen=True):
    """What one thing adds to a step on its critical path.

    group        what it is in any plan: forward and backward, the update, AllReduce
    name         what it is in this plan: a segment, a communication; empty where there is nothing to name
    rank         where on the path it took most
    link         of a transfer: the direction of a link, or the memory, that is occupied longest
    bytes        of a transfer: what passes that link in a step
    bytes_per_s  of a transfer: what passed that link from when all members had begun until it was complete
    """

    kind: TermKind
    group: str
    name: str
    seconds: float
    rank: int = 0
    link: str = ""
    bytes: float = 0.0
    bytes_per_s: float | None = None


class StepAccount(Record, frozen=True):
    """A step: `terms` add up to `step_s`. `steps`: how many it is the mean of."""

    step_s: float
    terms: tuple[Term, ...]
    steps: int = 1


class Difference(Record, frozen=True):
    """What one thing adds to two steps."""

    kind: DifferenceKind
    what: str
    before_s: float
    after_s: float
    link: str = ""
    rank: int = 0
    bytes: float = 0.0
    before_bytes_per_s: float | None = None
    after_bytes_per_s: float | None = None

    @property
    def seconds(self) -> float:
        """Return by how much the second step is longer for it."""
        return self.after_s - self.before_s


class MeasuredRun(Record, frozen=True):
    """measured.json: what a run's step took beside what was predicted.

    first_step, last_step   that were timed, instruction by instruction
    reason                  the largest cause of the difference, in words; empty where there is hardly any
    differences             by instruction, the largest first; they add up to the difference of the steps.
                            Where ranks had fewer cores than cluster.json says, one of kind `sharing` is what
                            that adds to the prediction, and the others begin there
    """

    format: str
    plan_sha256: str
    first_step: int
    last_step: int
    predicted: StepAccount
    measured: StepAccount
    differences: tuple[Difference, ...]
    reason: str


def differences_of(
    before: StepAccount, after: StepAccount, named: Callable[[Term], str]
) -> tuple[Difference, ...]:
    """Return what differs between two steps, the largest first; terms of one kind and name are one thing."""
    keys = {(term.kind, named(term)): None for term in (*before.terms, *after.terms)}
    differences = [
        _difference(kind, what, _sum(before, kind, what, named), _sum(after, kind, what, named))
        for kind, what in keys
    ]
    return tuple(sorted(differences, key=lambda difference: -abs(difference.seconds)))


def _sum(account: StepAccount, kind: TermKind, what: str, named: Callable[[Term], str]) -> list[Term]:
    return [term for term in account.terms if (term.kind, named(term)) == (kind, what)]


def _difference(kind: TermKind, what: str, before: list[Term], after: list[Term]) -> Difference:
    largest = max((*after, *before), key=lambda term: term.seconds)
    return Difference(
        kind,
        what,
        sum(term.seconds for term in before),
        sum(term.seconds for term in after),
        largest.link,
        max(after or before, key=lambda term: term.seconds).rank,
        sum(term.bytes for term in after or before),
        _rate(before),
        _rate(after),
    )


def _rate(terms: list[Term]) -> float | None:
    """Return the rate of the term that takes longest, of those that have one."""
    rated = [term for term in terms if term.bytes_per_s is not None]
    return max(rated, key=lambda term: term.seconds).bytes_per_s if rated else None
