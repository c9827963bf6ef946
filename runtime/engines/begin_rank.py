"""How every rank begins, before it becomes the daemon of its job.

    python -m partc.runtime.engines.begin_rank started|joined DAEMON JOB_FOLDER

It learns of the job by MPI, if others have started it, and sees with all others whether their hosts have what
the job needs. Nothing that the daemon needs is loaded before: a host may lack it.
"""

import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mpi4py
import msgspec
import numpy as np

mpi4py.rc.initialize = False  # not before this host is known to have room for it
mpi4py.rc.finalize = True
from mpi4py import MPI  # noqa: E402

from partc.runtime.engines.host_check import HostFindings, check_shared_memory, judge, look_around  # noqa: E402
from partc.runtime.engines.kept_memory import keep_freed_memory  # noqa: E402
from partc.runtime.engines.place import own_place  # noqa: E402
from partc.runtime.engines.rank_command import UNTOLD  # noqa: E402
from partc.runtime.errors import HostLacks, PartcError, RankFailed  # noqa: E402
from partc.runtime.jobs.job import JOB_FILE, read_job  # noqa: E402
from partc.runtime.supervision.process_state import PULSE  # noqa: E402
from partc.runtime.supervision.pulse import Pulse, failure_of  # noqa: E402

_LONGEST_PATH = 4096
_POLL_S = 1e-3
_AFTER_WORD_S = 30.0  # that a rank waits to be ended, once another has told what is lacking


def main(argv: Sequence[str] | None = None) -> int:
    """Be a rank."""
    how, daemon, job_folder = sys.argv[1:] if argv is None else argv
    keep_freed_memory()
    world = MPI.COMM_WORLD
    try:
        check_shared_memory()
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _check_world(world)
        folder = _share_folder(job_folder, world) if how == "joined" else job_folder
        if folder == UNTOLD:
            return 0
        _check_hosts(Path(folder), world)
    except PartcError as error:
        Pulse.of_process().fail(failure_of(error, "before it began"))
        if MPI.Is_initialized():
            world.Abort(1)
        return 1
    sys.argv = [daemon, folder]
    runpy.run_module(daemon, run_name="__main__", alter_sys=True)
    return 0


def _check_world(world: MPI.Intracomm) -> None:
    """Refuse to be alone where several were started: mpi4py's MPI does not hear what starts it."""
    place = own_place()
    if place is not None and world.size == 1:
        library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        raise RankFailed(
            f"{place.size} processes were started together, and each is alone in its MPI, {library}",
            at=f"rank {place.rank} ({place.source})",
            fix="let mpiexec and mpi4py's library come from one MPI: MPI4PY_LIBMPI names the library; "
            "with srun, give --mpi as `srun --mpi=list` has it: pmi2 for MPICH, pmix for Open MPI",
        )


def _share_folder(job_folder: str, world: MPI.Intracomm) -> str:
    """Return the job's folder as the first rank knows it, and tell the keeper."""
    path = np.zeros(_LONGEST_PATH, np.uint8)
    if world.rank == 0:
        text = os.fsencode(job_folder)
        path[: len(text)] = np.frombuffer(text, np.uint8)
    _complete(world.Ibcast(path, root=0))
    folder = os.fsdecode(path.tobytes().rstrip(b"\0"))
    if world.rank != 0 and folder != UNTOLD:
        os.write(int(os.environ[PULSE]), os.fsencode(folder) + b"\n")
    return folder


def _check_hosts(folder: Path, world: MPI.Intracomm) -> None:
    """Raise HostLacks in the first rank; the others wait to be ended then."""
    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED)
    here = [int(rank) for rank in neighbours.group.Translate_ranks(None, world.group)]
    neighbours.Free()
    job = read_job(folder) if (folder / JOB_FILE).exists() else None
    findings = _gather(look_around(job, world.rank, here), world)
    fault = judge(findings) if findings else None
    verdict = np.array([fault is not None], np.int64)
    _complete(world.Ibcast(verdict, root=0))
    if fault is not None:
        raise fault
    if verdict[0]:
        time.sleep(_AFTER_WORD_S)
        raise HostLacks("a host lacks something", at="its first rank says what", fix="read run.log")


def _gather(own: HostFindings, world: MPI.Intracomm) -> list[HostFindings]:
    """Return what all have found, in the first rank."""
    text = np.frombuffer(msgspec.json.encode(own), np.uint8)
    lengths = np.zeros(world.size, np.int64)
    _complete(world.Iallgather(np.array([text.size], np.int64), lengths))
    sizes = [int(length) for length in lengths]
    if world.rank != 0:
        _complete(world.Igatherv(text, None, root=0))
        return []
    texts = np.empty(sum(sizes), np.uint8)
    _complete(world.Igatherv(text, [texts, sizes, MPI.BYTE], root=0))
    ends = np.cumsum(sizes)
    parts = (texts[end - size : end].tobytes() for size, end in zip(sizes, ends, strict=True))
    return [msgspec.json.decode(part, type=HostFindings) for part in parts]


def _complete(request: MPI.Request) -> None:
    while not request.Test():
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
