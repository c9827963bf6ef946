"""What a measurement is asked to do and what its ranks found, as files: read where there is no MPI, too."""

from pathlib import Path
from typing import Literal

from partc.runtime.program import Record

PROBE_FILE = "probe.json"


class Probe(Record, frozen=True):
    """What to measure: rounds of pairs (rank, rank), and sizes in bytes."""

    rounds: tuple[tuple[tuple[int, int], ...], ...]
    message_bytes: tuple[int, ...]
    together_bytes: tuple[int, ...]  # of a sum over all ranks, and of all parts of a gathering
    repeats: int


class Sample(Record, frozen=True):
    """Seconds that one transfer took: from `ends[0]` to `ends[1]`, or among all ranks."""

    kind: Literal["message", "all_reduce", "all_gather"]
    ends: tuple[int, int]
    nbytes: int
    seconds: float


def samples_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes its samples."""
    return folder / f"samples.rank-{rank}.json"
