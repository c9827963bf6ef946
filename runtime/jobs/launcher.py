"""Start one executor daemon per rank with mpiexec, and watch over them from outside the MPI job."""

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from partc.runtime.errors import BadUsage, RankFailed
from partc.runtime.jobs.job import Progress, first_failure, ranks_of_process
from partc.runtime.log import log as records

RANK_VARIABLES = {
    # Threads of other libraries in the ranks would fight ONNX Runtime's for the cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # MPICH gathers unequal parts in pieces of 32 KB, a poll each: 50 MB took 1.8 s, whole 20 ms.
    "MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE": str(1 << 30),
}
OnProgress = Callable[[Progress], None]

DAEMON = "partc.runtime.jobs.daemon"
_GRACE_S = 5.0  # from a polite end to a kill


def launch(
    hosts: Sequence[str],
    job_folder: Path,
    log: Path,
    addresses: Mapping[str, str],
    on_progress: OnProgress | None,
    timeout_s: float | None,
    daemon: str = DAEMON,
) -> None:
    """Run a job to its end. Raises the error of the rank that failed first.

    `hosts`: each rank's. `addresses`: host -> network name. No line from the ranks for `timeout_s` ends the
    job. `daemon`: the module that every rank runs.
    """
    command = mpiexec_command(hosts, job_folder, addresses, daemon)
    records.info("starting %d ranks: %s", len(hosts), " ".join(command))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=rank_environment(),
        start_new_session=True,
    )
    try:
        _watch(process, log, on_progress, timeout_s)
    finally:
        _end(process)
    if process.returncode == 0:
        return
    raise first_failure(job_folder) or _unexplained(job_folder, log, process.returncode)


def mpiexec_command(
    hosts: Sequence[str], job_folder: Path, addresses: Mapping[str, str], daemon: str = DAEMON
) -> list[str]:
    """Return the command that starts every rank on its host, in rank order."""
    started = [sys.executable, "-m", daemon, str(job_folder)]
    mpiexec = find_mpiexec()
    places = [addresses.get(host, "localhost") for host in hosts]
    if all(place == "localhost" for place in places):
        return [mpiexec, "-n", str(len(hosts)), *started]
    # Ranks fill the hosts in order, one entry for each run of neighbours; the daemons find their rank.
    counted = ",".join(f"{address}:{len(list(ranks))}" for address, ranks in groupby(places))
    return [mpiexec, "-host", counted, "-n", str(len(hosts)), *started]


def find_mpiexec() -> str:
    """Return the mpiexec to use: PARTC_MPIEXEC, the one installed with this Python, or the system's."""
    if chosen := os.environ.get("PARTC_MPIEXEC"):
        found = shutil.which(chosen)
    else:
        beside = Path(sys.executable).parent / "mpiexec"
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise BadUsage(
            "no mpiexec was found",
            at=f"PARTC_MPIEXEC={chosen}" if chosen else str(Path(sys.executable).parent),
            fix="`pip install mpich`, or set PARTC_MPIEXEC to your MPI's mpiexec",
        )
    return found


def rank_environment() -> dict[str, str]:
    """Return the environment that ranks run in."""
    return RANK_VARIABLES | dict(os.environ)


def _watch(
    process: subprocess.Popen[str], log: Path, on_progress: OnProgress | None, timeout_s: float | None
) -> None:
    """Forward progress and log the rest until the job ends."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
    with log.open("w") as stream:
        while True:
            try:
                line = lines.get(timeout=timeout_s)
            except queue.Empty:
                raise RankFailed(
                    f"no rank said anything for {timeout_s:.0f} s",
                    at="the executors",
                    fix=f"read {log}; raise the timeout if steps are this long",
                ) from None
            if line is None:
                break
            progress = progress_in(line)
            if progress is None:
                stream.write(line)
            elif on_progress is not None:
                on_progress(progress)
    process.wait()


def _unexplained(job_folder: Path, log: Path, code: int) -> RankFailed:
    """Return the error of a job whose ranks left no word, from what mpiexec printed."""
    text = log.read_text()
    reason = re.search(r"EXIT STRING: (.*)", text)
    process = re.search(r"PID (\d+)", text)
    ranks = ranks_of_process(job_folder, int(process[1])) if process else []
    return RankFailed(
        f"an executor died: {reason[1] if reason else f'mpiexec ended with code {code}'}",
        at=f"rank {' or '.join(map(str, ranks))}" if ranks else "an unknown rank",
        fix=f"read {log}; a kill without a word is often a lack of memory",
    )


def _read_lines(process: subprocess.Popen[str], lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def progress_in(line: str) -> Progress | None:
    """Return the progress that a line of a rank tells, None if it is some other line."""
    try:
        return msgspec.json.decode(line, type=Progress)
    except msgspec.MsgspecError:
        return None


def _end(process: subprocess.Popen[str]) -> None:
    """End mpiexec and what it started, if they still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        deadline_s = time.monotonic() + _GRACE_S
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
