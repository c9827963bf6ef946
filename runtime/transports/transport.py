"""What an executor asks of a communication engine, and the count of what went through it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from partc.runtime.transports.communication import ROW_KINDS, SHIFTS, Part
from partc.runtime.transports.exchanged import Exchanged
from partc.runtime.transports.rounded_sums import sent_bytes
from partc.runtime.transports.sum_levels import level_parts

Array = np.ndarray[Any, np.dtype[Any]]


class Handle(Protocol):
    """A communication under way."""

    def done(self) -> bool:
        """Move it on without blocking, and tell whether it is complete."""

    def rows(self) -> tuple[Array, ...]:
        """Return one array per write of a row kind, once done. Dense kinds land in their targets."""


class Transport(Protocol):
    """Begins communications for one rank."""

    def start(self, part: Part) -> Handle:
        """Begin a communication. Returns at once."""

    def progress(self) -> None:
        """Move on every communication under way."""

    def beside(self) -> AbstractContextManager[None]:
        """Return a context in which communications move on while the caller computes."""


@dataclass(slots=True)
class Traffic:
    """Bytes that one rank supplied to its communications, by kind.

    Payload is values; `ids_bytes` are integer values that travel with rows; `counts_bytes` are sizes
    that the transport exchanges. A rank's piece to itself is not counted, nor what others merely relay.
    `exchanged` counts what thereby goes out to all others and comes in from them.
    """

    payload_bytes: Counter[str] = field(default_factory=Counter)
    ids_bytes: Counter[str] = field(default_factory=Counter)
    counts_bytes: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    exchanged: Exchanged = field(default_factory=Exchanged)

    def total_bytes(self) -> int:
        """Return all bytes so far, values, ids and sizes together."""
        return self.payload_bytes.total() + self.ids_bytes.total() + self.counts_bytes.total()

    def count(self, part: Part) -> None:
        """Add one communication that begins."""
        if part.hosts:
            for level in level_parts(part):
                self.count(level)
            return
        kind = part.start.kind
        self.messages[kind] += 1
        if len(part.members) == 1 or not part.sends:
            return
        if kind in SHIFTS and part.shifts_to is None:
            return
        if kind == "exchange":
            self.payload_bytes[kind] += part.sent_bytes
            return
        if kind not in ROW_KINDS:
            self.payload_bytes[kind] += sum(sent_bytes(part, dense.source) for dense in part.dense)
            return
        share = _share_to_others(part)
        for array in part.rows:
            where = self.ids_bytes if array.dtype.kind in "iu" else self.payload_bytes
            where[kind] += int(array.nbytes * share)

    def count_complete(self, part: Part, landed: Sequence[Array]) -> None:
        """Add one communication that is complete; `landed` is what a row kind brought."""
        for each in level_parts(part) if part.hosts else (part,):
            self.exchanged.add(each, landed)


def _share_to_others(part: Part) -> float:
    """Return the share of a member's rows that leaves it."""
    if part.counts:
        total = sum(part.counts)
        return 1 - part.counts[part.position] / total if total else 0.0
    return 0.0 if part.start.kind == "gather_rows" and part.is_root else 1.0
