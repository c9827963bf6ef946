"""The launcher of a case: python -m tests.chaos.train PLAN STEPS. Tells its errors as `partc run` does."""

import argparse
import signal
import sys
import time

from partc.compiler.commands.cli import exit_code_of
from partc.runtime.jobs.job import Checkpoints, JobMessage, Notice, Progress
from partc.runtime.jobs.restarts import train_with_restarts
from partc.runtime.jobs.results import TrainingResult
from partc.runtime.jobs.runner import Runner
from partc.runtime.supervision.stop_signals import name_of, raise_when_stopped

LONGEST_WAIT_S = 0.2  # before a restart: nobody waits for a host to come back here


def show(told: JobMessage) -> None:
    match told:
        case Progress(step=step):
            print(f"step {step}", flush=True)
        case Notice(text=text):
            print(text, flush=True)


def train() -> int:
    """Train; return the exit code, as `partc run` does."""
    parser = argparse.ArgumentParser(prog="tests.chaos.train", description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("steps", type=int)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--checkpoints", default="")
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0)
    asked = parser.parse_args()
    raise_when_stopped()
    checkpoints = Checkpoints(asked.checkpoints, asked.save_every) if asked.checkpoints else None

    def train_once(resume: bool) -> TrainingResult:
        return Runner(asked.plan).train(
            asked.data,
            asked.steps,
            outputs="none",
            on_progress=show,
            timeout_s=asked.timeout,
            checkpoints=checkpoints,
            resume=resume,
        )

    result = train_with_restarts(
        train_once,
        asked.restarts,
        asked.resume,
        lambda text: print(text, flush=True),
        lambda wait_s: time.sleep(min(wait_s, LONGEST_WAIT_S)),
    )
    done = result.first_step + result.last_step
    stopped = f"stopped by {name_of(result.stopped_by)}, " if result.stopped_by else ""
    print(f"{stopped}done {done} of {asked.steps} steps, {result.steps_per_s:.1f} steps/s", flush=True)
    return 0 if done == asked.steps else 128 + (result.stopped_by or signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(exit_code_of(train))
