"""Held against the system's own count of pages that it had to supply."""

import subprocess
import sys

import pytest

FILLS = """
import resource
import numpy as np
from partc.runtime.engines.kept_memory import keep_freed_memory
if {kept}:
    keep_freed_memory()
for _ in range({rounds}):
    first, second = np.full({size}, 1, np.uint8), np.full({size}, 2, np.uint8)
    del first, second
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
SIZE = 48 * 2**20


def faults(rounds: int, kept: bool) -> int:
    """Return the pages that a process was given, which fills and frees two large blocks in every round."""
    code = FILLS.format(kept=kept, rounds=rounds, size=SIZE)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_later_rounds_ask_the_system_for_no_more_memory() -> None:
    given = faults(2, kept=False) - faults(1, kept=False)
    kept = faults(12, kept=True) - faults(2, kept=True)

    assert kept < given / 10
