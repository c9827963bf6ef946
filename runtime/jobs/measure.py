"""Start a measurement on a cluster's hosts, and collect what its ranks found.

What is asked and what was found are files: read where there is no MPI, too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from partc.runtime.engines.machines import Machines
from partc.runtime.jobs.job_folder import held_folder
from partc.runtime.jobs.launcher import launch
from partc.runtime.plan.record import Record

PROBE_FILE = "probe.json"


class Probe(Record, frozen=True):
    """What to measure: of every rank the threads that compute, 0 where none do; rounds of pairs (rank, rank),
    and sizes in bytes. `product`: the ONNX model of a product of two inputs, float32.
    """

    threads: tuple[int, ...]
    product: bytes
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    message_bytes: tuple[int, ...]
    together_bytes: tuple[int, ...]  # of a sum over all ranks, and of all parts of a gathering
    repeats: int


class Timing(Record, frozen=True):
    """Seconds that something took.

    message     from `ends[0]` to `ends[1]`
    alone       a product on one thread of rank `ends[0]`, while nothing else runs
    crowded     the same while all threads of all ranks compute
    all_reduce, all_gather  among all ranks
    """

    kind: Literal["message", "alone", "crowded", "all_reduce", "all_gather"]
    ends: tuple[int, int]
    nbytes: int
    seconds: float


def samples_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes its samples."""
    return folder / f"samples.rank-{rank}.json"


MODULE = "partc.runtime.jobs.probe"
TIMEOUT_S = 120.0


def measure(probe: Probe, hosts: Sequence[str], machines: Machines, shared: Path) -> list[Timing]:
    """Return the samples of all ranks. `hosts`: each rank's. `shared`: a folder that all hosts see.

    Raises RankFailed, and leaves measure.log in the shared folder then.
    """
    log = shared / "measure.log"
    with held_folder(shared, ".measure-") as folder:
        (folder / PROBE_FILE).write_bytes(msgspec.json.encode(probe))
        launch(hosts, folder, log, machines, None, TIMEOUT_S, MODULE)
        log.unlink()
        return [
            sample
            for rank in range(len(hosts))
            for sample in msgspec.json.decode(samples_file(folder, rank).read_bytes(), type=list[Timing])
        ]
