"""The keeper of one process of a job: it outlives it, and says how it ended.

    python -m partc.runtime.supervision.keeper JOB_FOLDER MEMBER MODULE [ARGUMENT..]

MEMBER is a name, or `rank`: then its number is in the environment, as MPI starts ranks. The module runs in a
child that is forked before anything is loaded, so that a keeper costs neither a second start nor much memory.
It inherits what MPI left open for it, and ends when its keeper does.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from partc.runtime.supervision.process_state import PULSE, end_with_parent

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def main(argv: Sequence[str] | None = None) -> int:
    """Start a member of a job, and keep it until its end."""
    folder, member, module, *arguments = sys.argv[1:] if argv is None else argv
    told, printed = os.pipe(), os.pipe()
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        end_with_parent(keeper)
        os.dup2(printed[1], sys.stdout.fileno())
        os.dup2(printed[1], sys.stderr.fileno())
        for descriptor in (told[0], *printed):
            os.close(descriptor)
        return _be_member(module, arguments, told[1])
    os.close(told[1])
    os.close(printed[1])
    from partc.runtime.supervision.keeping import keep  # while the member loads, too

    return keep(Path(folder), rank_name() if member == "rank" else member, child, told[0], printed[0])


def rank_name() -> str:
    """Return the name of the rank that MPI has started this process as."""
    number = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    return f"process {os.getpid()}" if number is None else f"rank {number}"


def _be_member(module: str, arguments: Sequence[str], pipe: int) -> int:
    """Run a module as `python -m` does."""
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
