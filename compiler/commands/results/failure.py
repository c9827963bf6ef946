"""What every command answers with --json where it fails."""

from partc.runtime.plan.record import Record


class Failure(Record, frozen=True):
    """What went wrong, where, and what to do about it. `error`: the name of the exception in Python."""

    error: str
    what: str
    at: str
    fix: str
