"""The keeper of one process of a job: it outlives it, and says how it ended.

    python -m partc.runtime.supervision.keeper JOB_FOLDER MEMBER MODULE [ARGUMENT..]

MEMBER is a name, or `rank`: then its number is in the environment, as MPI starts ranks. The module runs in a
child that is forked before anything is loaded, so that a keeper costs neither a second start nor much memory.
It inherits what MPI left open for it, and ends when its keeper does. With what the cluster file gives its
host as environment, the keeper starts itself again: libraries are looked for as a process began.

JOB_FOLDER is `-` where others have started the ranks: then the member learns it by MPI, and tells it.
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from partc.runtime.engines.rank_command import ENVIRONMENT_FILE, KEEPER, UNTOLD
from partc.runtime.supervision.janitor import begin_janitor
from partc.runtime.supervision.process_state import PULSE, end_with_parent
from partc.runtime.supervision.track_memory import share_memory

_ENTERED = "PARTC_ENTERED"  # environment variable: the file whose environment this process has
# Environment variables in which MPI and batch systems tell a process its number.
RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def main(argv: Sequence[str] | None = None) -> int:
    """Start a member of a job, and keep it until its end."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # MPI's, when another dies: this one has something to say first
    folder, member, module, *arguments = words = sys.argv[1:] if argv is None else list(argv)
    name = rank_name() if member == "rank" else member
    _enter_environment(Path(folder) / ENVIRONMENT_FILE, name, words)
    messages, printed, janitor, track = (
        os.pipe(),
        os.pipe(),
        begin_janitor(Path(folder), name),
        share_memory(),
    )
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        end_with_parent(keeper)
        os.dup2(printed[1], sys.stdout.fileno())
        os.dup2(printed[1], sys.stderr.fileno())
        for descriptor in (messages[0], *printed, *([] if janitor.pipe is None else [janitor.pipe])):
            os.close(descriptor)
        return _be_member(module, arguments, messages[1])
    os.close(messages[1])
    os.close(printed[1])
    # While the member loads, too.
    from partc.runtime.supervision.keeping import MemberProcess, await_folder, keep

    job_folder = await_folder(messages[0]) if folder == UNTOLD else Path(folder)
    if job_folder is None:
        return _without_job(child, printed[0])
    member_process = MemberProcess(child, messages[0], printed[0], track)
    return keep(job_folder, name, member_process, janitor, stays=folder == UNTOLD)


def rank_name() -> str:
    """Return the name of the rank that MPI has started this process as."""
    number = next((os.environ[name] for name in RANKS if name in os.environ), None)
    return f"process {os.getpid()}" if number is None else f"rank {number}"


def _enter_environment(file: Path, name: str, words: Sequence[str]) -> None:
    """Start this process again with what a file gives the member as environment, once."""
    if os.environ.pop(_ENTERED, "") == str(file) or not file.exists():
        return
    own: dict[str, str] = json.loads(file.read_bytes()).get(name, {})
    if own:
        environment = os.environ | own | {_ENTERED: str(file)}
        os.execve(sys.executable, [sys.executable, "-P", "-m", KEEPER, *words], environment)


def _without_job(child: int, printed: int) -> int:
    """Return how a member ended that learned of no job, and pass on why."""
    _, status = os.waitpid(child, 0)
    os.set_blocking(printed, False)
    with suppress(BlockingIOError):
        os.write(sys.stderr.fileno(), os.read(printed, 1 << 16))
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_member(module: str, arguments: Sequence[str], pipe: int) -> int:
    """Run a module as `python -m` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)  # what it starts itself ends with it
    os.environ[PULSE] = str(pipe)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        from partc.runtime.supervision.pulse import Pulse, failure_of

        Pulse(pipe).fail(failure_of(error, "while starting"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
