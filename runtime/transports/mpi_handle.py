"""A communication under way over MPI, in one phase or two; never blocking.

Every group has two communicators, and all members must begin the collectives of each in one order. First
phases begin on the first, in the program's order. Second phases begin on the second in that order too,
each when its own first phase is complete and those before it have begun, so that members agree on the
order though first phases end at different times.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from partc.runtime.transports.communication import Part

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Group:
    """The communicators of one group's first and second phases, and who waits for a second phase."""

    first: MPI.Intracomm
    second: MPI.Intracomm
    queue: "deque[MPIHandle]" = field(default_factory=deque)


class MPIHandle(ABC):
    """One communication. What it is made of, it gets from a subclass."""

    def __init__(self, part: Part, group: Group, progress: Callable[[], None]) -> None:
        self.part = part
        self._group = group
        self._progress = progress
        self._complete = False
        self._requests = self._begin_first(group.first)
        self._waits_for_second = self._has_second()
        if self._waits_for_second:
            group.queue.append(self)

    def done(self) -> bool:
        """Move on everything under way; tell whether this is complete."""
        if not self._complete:
            self._progress()
        return self._complete

    def rows(self) -> tuple[Array, ...]:
        """Return one array per write of a row kind. Dense kinds land in their targets."""
        return ()

    def advance(self) -> bool:
        """Take the next step if it is due; tell whether all is done."""
        if not MPI.Request.Testall(self._requests):
            return False
        if self._waits_for_second:
            if self._group.queue[0] is not self:
                return False
            self._group.queue.popleft()
            self._waits_for_second = False
            self._requests = self._begin_second(self._group.second)
            return False
        self._land()
        self._complete = True
        return True

    @abstractmethod
    def _begin_first(self, comm: MPI.Intracomm) -> list[MPI.Request]:
        """Begin the collectives of the first phase."""

    @abstractmethod
    def _has_second(self) -> bool:
        """Tell, once the first phase has begun, whether there is a second."""

    @abstractmethod
    def _begin_second(self, comm: MPI.Intracomm) -> list[MPI.Request]:
        """Begin the collectives of the second phase. Needs: the first is complete."""

    def _land(self) -> None:  # noqa: B027 (rows lie where they belong)
        """Put what arrived where it belongs."""
