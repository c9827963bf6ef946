"""A process of asynchronous training: a server or a worker, its sockets and its clock.

    python -m partc.runtime.asynchronous.processes.process JOB_FOLDER server RANK | worker SESSION

When it dies, only the launcher notices; when the launcher dies, it ends.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partc.runtime.asynchronous.processes.start_check import await_start
from partc.runtime.engines.kept_memory import keep_freed_memory
from partc.runtime.supervision.pulse import Pulse, failure_of

if TYPE_CHECKING:
    from partc.runtime.asynchronous.processes.server_process import ServerProcess
    from partc.runtime.asynchronous.processes.worker_process import WorkerProcess


def main(argv: Sequence[str] | None = None) -> int:
    """Play one server or worker of a job."""
    keep_freed_memory()
    folder_name, part, number = sys.argv[1:] if argv is None else argv
    folder = Path(folder_name)
    process: ServerProcess | WorkerProcess | None = None
    pulse = Pulse.of_process()
    try:
        await_start(folder, part, int(number))
        process = _load(folder, part, int(number))
        pulse.follow(process.position)
        process.run()
        pulse.end()
    except BaseException as error:  # whatever it is, the launcher must learn of it
        pulse.fail(failure_of(error, process.describe() if process else f"{part} {number}, while loading"))
        return 1
    finally:
        if process is not None:
            process.close()
    return 0


def _load(folder: Path, part: str, number: int) -> "ServerProcess | WorkerProcess":
    """Load what is needed now that this host is known to have it."""
    if part == "server":
        from partc.runtime.asynchronous.processes.server_process import ServerProcess

        return ServerProcess(folder, number)
    from partc.runtime.asynchronous.processes.worker_process import WorkerProcess

    return WorkerProcess(folder, number)


if __name__ == "__main__":
    sys.exit(main())
