"""A process of asynchronous training: a server or a worker, its sockets and its clock.

    python -m partc.runtime.asynchronous.process JOB_FOLDER server RANK | worker SESSION

When it dies, only the launcher notices; when the launcher dies, it ends.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from partc.runtime.asynchronous.server_process import ServerProcess
from partc.runtime.asynchronous.worker_process import WorkerProcess
from partc.runtime.supervision.pulse import Pulse, failure_of


def main(argv: Sequence[str] | None = None) -> int:
    """Play one server or worker of a job."""
    folder_name, part, number = sys.argv[1:] if argv is None else argv
    folder = Path(folder_name)
    process: ServerProcess | WorkerProcess | None = None
    pulse = Pulse.of_process()
    try:
        process = (
            ServerProcess(folder, int(number)) if part == "server" else WorkerProcess(folder, int(number))
        )
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


if __name__ == "__main__":
    sys.exit(main())
