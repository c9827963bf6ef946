"""The command line: `partc`, and python -m partc."""

import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run a command and return its exit code. Ctrl-C ends it well while it is imported, too."""
    # What is ignored, as in the background, stays so; and other threads set no signals.
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    from partc.compiler.commands.command_line.standard_streams import outlast_readers

    outlast_readers()
    from partc.compiler.commands.cli import main as run_command

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once. An exception, raised while a library is imported, may be taken for that one's failure."""
    os.write(sys.stderr.fileno(), b"partc: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
