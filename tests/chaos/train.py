"""The launcher of a case: python -m tests.chaos.train PLAN STEPS. Tells its errors as `partc run` does."""

import sys

from partc.compiler.commands.cli import exit_code_of
from partc.runtime.jobs.job import Progress
from partc.runtime.jobs.runner import Runner
from partc.runtime.supervision.stop_signals import raise_when_stopped


def show(progress: Progress) -> None:
    print(f"step {progress.step}", flush=True)


def train() -> None:
    raise_when_stopped()
    Runner(sys.argv[1]).train("synthetic", int(sys.argv[2]), on_progress=show, timeout_s=60)


if __name__ == "__main__":
    sys.exit(exit_code_of(train))
