"""The most memory that a process had of its own: getrusage's peak begins at that of whoever started it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

OWN = Path("/proc/self")


@dataclass
class Peak:
    """Bytes that a block of code had at most beyond those before it; known when the block ends."""

    grown_bytes: int = 0


@contextmanager
def peak_of_block() -> Iterator[Peak]:
    """Measure the peak of this process in a block: what it had before does not count."""
    (OWN / "clear_refs").write_text("5")  # the peak begins anew, at what is resident now
    before = peak_bytes()
    peak = Peak()
    yield peak
    peak.grown_bytes = peak_bytes() - before


def peak_bytes() -> int:
    """Return the most memory that was resident in this process, since its peak began."""
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", (OWN / "status").read_text())
    return int(peak_kib) * 1024


def resident_bytes() -> int:
    """Return the memory that is resident in this process now."""
    return int((OWN / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def virtual_bytes() -> int:
    """Return the address space that this process has now."""
    return int((OWN / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
