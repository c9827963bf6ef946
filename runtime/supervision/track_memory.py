"""Memory that a member shares with its keeper, and that outlives it: where it is, to the instruction.

What a member says a few times a second is old when it is killed: small models take hundreds of steps between.

    int64   step << 24 | place       one word: what is read is never half of one note and half of another
    int64   unused
    lines   place 1, place 2, ..     a letter, A where it awaits others there, and what a person calls it

The keeper makes it before it forks its member, so that it needs neither a name nor a descriptor; it loads
nothing for it.
"""

import mmap
import sys

SIZE_BYTES = 1 << 22  # of address space: memory is only what is written to
HEAD_BYTES = 16
PLACE_BITS = 24
AWAITS, GOES_ON = "A", "-"
_MADE: list[mmap.mmap] = []  # by this process, or by the one that it was forked from


def share_memory() -> mmap.mmap:
    """Make the memory of the member that this process is to fork."""
    _MADE.append(mmap.mmap(-1, SIZE_BYTES))
    return _MADE[-1]


def own_memory() -> mmap.mmap:
    """Return the memory in which this process notes where it is; nobody else's where it has no keeper."""
    return _MADE[-1] if _MADE else share_memory()


def read_note(memory: mmap.mmap) -> tuple[int, str, bool] | None:
    """Return a member's step, its place, and whether it awaits others there; None where it noted nothing."""
    word = int.from_bytes(memory[:8], sys.byteorder)
    place = word & ((1 << PLACE_BITS) - 1)
    if not place:
        return None
    lines = memory[HEAD_BYTES : memory.find(b"\0", HEAD_BYTES)].split(b"\n")
    line = lines[place - 1].decode(errors="replace")
    return word >> PLACE_BITS, line[1:], line[0] == AWAITS
