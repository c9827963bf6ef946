"""Memory that a rank frees stays with it, for the next step asks for as much again."""

import ctypes
from typing import Any

# glibc's malloc.h. No memory is trimmed off a heap, and none is mapped for a single allocation.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0


def keep_freed_memory() -> None:
    """Let this process keep what it frees. Nothing happens where the C library is not glibc.

    glibc gives large blocks back to the system, so that every page of the next is one that the system must
    clear first. MPI and NumPy free some blocks each step: a rank that summed 25 MB in 33 ms had 4,600 such
    pages a step, 12 ms (docs/decisions/061-freed-memory-is-kept.md).
    """
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_M_MMAP_MAX, _NONE)
