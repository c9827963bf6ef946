"""Held against the system's own count of pages that it had to supply."""

import subprocess
import sys

import pytest

FILLS = """
import ctypes
import resource
import numpy as np
from partc.runtime.engines.kept_memory import keep_freed_memory

PR_SET_THP_DISABLE = 41

def fill():
    first, second = np.full({size}, 1, np.uint8), np.full({size}, 2, np.uint8)

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
if {kept}:
    keep_freed_memory()
for _ in range(2):
    fill()
before = pages()
for _ in range({rounds}):
    fill()
print(pages() - before)
"""
SIZE = 48 * 2**20
ROUNDS = 5


def faults(kept: bool) -> int:
    """Return the pages that a process is given in later rounds, which fill and free two large blocks."""
    code = FILLS.format(kept=kept, rounds=ROUNDS, size=SIZE)
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_later_rounds_ask_the_system_for_no_more_memory() -> None:
    assert faults(kept=True) < faults(kept=False) / 10
