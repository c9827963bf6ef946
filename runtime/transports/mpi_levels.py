"""Sums by levels over MPI: one collective behind the other, none of which the program waits for.

Each level of each group of members has communicators of its own, on which sums begin in the program's order:
a sum takes its next level when the one before is complete, and those before it have begun theirs. So members
agree on the order though levels end at different times, and one sum is handed on within hosts while the next
goes among them.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from partc.runtime.plan.program import Kind
from partc.runtime.transports.communication import Part
from partc.runtime.transports.mpi_dense import DenseHandle
from partc.runtime.transports.mpi_handle import Group, MovedHandle
from partc.runtime.transports.sum_levels import Members, level_parts


@dataclass(frozen=True, slots=True)
class LevelGroup:
    """The communicators of one level of a group, and the sums that are still to begin there."""

    group: Group
    queue: deque["LevelsHandle"] = field(default_factory=deque)


class LevelsHandle(MovedHandle):
    """A sum that goes level by level."""

    def __init__(
        self, part: Part, groups: Mapping[tuple[Kind, Members], LevelGroup], progress: Callable[[], None]
    ) -> None:
        super().__init__(part, progress)
        self._levels = deque((level, groups[level.start.kind, level.members]) for level in level_parts(part))
        for _, group in self._levels:
            group.queue.append(self)
        self._under_way: DenseHandle | None = None
        self.advance()

    def advance(self) -> bool:
        """Take the next level if it is due; tell whether all is done."""
        if self._under_way is not None and not self._under_way.advance():
            return False
        self._under_way = None
        if not self._levels:
            self._complete = True
            return True
        level, group = self._levels[0]
        if group.queue[0] is self:
            group.queue.popleft()
            self._levels.popleft()
            self._under_way = DenseHandle(level, group.group, self._progress)
        return False
