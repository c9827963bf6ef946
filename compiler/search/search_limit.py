"""When a search ends: after a time, or after a number of proposals, which is the same on every machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf


@dataclass
class SearchLimit:
    """A budget in seconds; or of proposals, and then of no time."""

    budget_s: float
    proposals: int | None = None
    begun_s: float = field(default_factory=time.monotonic)
    _stood_s: float | None = None  # since when the clock stands

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the clock stand meanwhile: what is done inside takes nothing of the budget."""
        self._stood_s = time.monotonic()
        try:
            yield
        finally:
            self.begun_s += time.monotonic() - self._stood_s
            self._stood_s = None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since it began."""
        return time.monotonic() - self.begun_s

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.until_s - time.monotonic()

    @property
    def until_s(self) -> float:
        """Return when it ends, on the monotonic clock."""
        stood_s = 0.0 if self._stood_s is None else time.monotonic() - self._stood_s
        return inf if self.proposals is not None else self.begun_s + self.budget_s + stood_s

    def early_until_s(self, share: float) -> float:
        """Return when the first share of the budget ends."""
        return inf if self.proposals is not None else self.begun_s + share * self.budget_s

    def part_until_s(self, share: float, reserve_s: float = 0.0) -> float:
        """Return when a share of what is left ends, apart from a reserve."""
        return time.monotonic() + share * (self.left_s - reserve_s)

    def part(self, share: float) -> float:
        """Return a share of the proposals."""
        return inf if self.proposals is None else share * self.proposals
