"""A communication under way over MPI, in one phase or two; never blocking.

Every group has two communicators, and all members must begin the collectives of each in one order. First
phases begin on the first, in the program's order. Second phases begin on the second in that order too,
each when its own first phase is complete and those before it have begun, so that members agree on the
order though first phases end at different times. What is cut into chunks is a pipeline: the second phase of
one beside the first phase of the next.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from partc.runtime.transports.communication import Part
from partc.runtime.transports.host_levels import HostLevels

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True, eq=False)
class PendingCollectives:
    """Collectives under way, and how to begin those that follow when they are complete."""

    requests: Sequence[MPI.Request]
    begin_second: Callable[[MPI.Intracomm], Sequence[MPI.Request]] | None = None
    incomplete: int = field(init=False, default=0)  # of the requests


class Requests:
    """The requests of all communications under way, which one call of MPI tests.

    MPICH goes through everything under way whenever it is asked for a request that is not complete: asked for
    each of eighty by itself, it does so eighty times (docs/decisions/063).
    """

    def __init__(self) -> None:
        self._requests: list[MPI.Request] = []
        self._chunks: list[PendingCollectives] = []
        self._any_complete = False

    def add(self, chunk: PendingCollectives) -> None:
        """Watch a chunk's requests, which have just begun."""
        chunk.incomplete = len(chunk.requests)
        self._requests += chunk.requests
        self._chunks += [chunk] * len(chunk.requests)
        self._any_complete |= not chunk.requests

    def move(self) -> bool:
        """Move all on; tell whether a chunk may have become complete since the last call."""
        complete = MPI.Request.Testsome(self._requests) if self._requests else None
        for index in complete or ():
            self._chunks[index].incomplete -= 1
        any_complete, self._any_complete = self._any_complete or bool(complete), False
        if complete:
            pending = [index for index, request in enumerate(self._requests) if request]
            self._requests = [self._requests[index] for index in pending]
            self._chunks = [self._chunks[index] for index in pending]
        return any_complete


@dataclass(frozen=True, slots=True)
class Group:
    """The communicators of one group's first and second phases, and what waits for a second phase.

    `levels`: those by which long values are summed and scattered, None where that is done at once.
    """

    first: MPI.Intracomm
    second: MPI.Intracomm
    requests: Requests
    levels: HostLevels | None = None
    queue: deque[PendingCollectives] = field(default_factory=deque)


class MovedHandle(ABC):
    """A communication under way, which is moved on together with all others."""

    def __init__(self, part: Part, progress: Callable[[], None]) -> None:
        self.part = part
        self._progress = progress
        self._complete = False

    def done(self) -> bool:
        """Move on everything under way; tell whether this is complete."""
        if not self._complete:
            self._progress()
        return self._complete

    def rows(self) -> tuple[Array, ...]:
        """Return one array per write of a row kind. Dense kinds land in their targets."""
        return ()

    @abstractmethod
    def advance(self) -> bool:
        """Take the next steps that are due; tell whether all is done."""


class MPIHandle(MovedHandle):
    """One communication in collectives. What it is made of, it gets from a subclass."""

    def __init__(self, part: Part, group: Group, progress: Callable[[], None]) -> None:
        super().__init__(part, progress)
        self._group = group
        self._chunks = self._begin(group.first)
        for chunk in self._chunks:
            group.requests.add(chunk)
        group.queue.extend(chunk for chunk in self._chunks if chunk.begin_second)

    def advance(self) -> bool:
        """Take the next steps that are due; tell whether all is done."""
        complete = [self._advance(chunk) for chunk in self._chunks]
        if not all(complete):
            return False
        self._land()
        self._complete = True
        return True

    def _advance(self, chunk: PendingCollectives) -> bool:
        if chunk.incomplete:
            return False
        if chunk.begin_second is None:
            return True
        if self._group.queue[0] is chunk:
            self._group.queue.popleft()
            begin, chunk.begin_second = chunk.begin_second, None
            chunk.requests = begin(self._group.second)
            self._group.requests.add(chunk)
        return False

    @abstractmethod
    def _begin(self, comm: MPI.Intracomm) -> Sequence[PendingCollectives]:
        """Begin the collectives of all first phases."""

    def _land(self) -> None:
        """Put what arrived where it belongs."""
