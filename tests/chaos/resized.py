"""A training that is killed again and again, and resumed on other ranks by other strategies."""

import random

import numpy as np

from partc.runtime.checkpoints.manifest import steps_in
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.jobs.results import TRAINED_FILE
from tests.chaos.faults import KILL
from tests.chaos.stage import Stage, mlp
from tests.chaos.training import Outcome, Training

_ONE_DEVICE = ("1x1", "auto")
WAYS = (
    ("1x4", "allreduce"),
    ("1x3", "ps"),
    ("1x6", "tensor=2"),
    ("1x4", "pipeline=2,microbatches=2"),
    ("1x2", "fsdp"),
    _ONE_DEVICE,
)
_SAVE_EVERY = 20
_STEPS = 1_500
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # of float64, after thousands of steps of Adam


def resume_on_others(stage: Stage, draw: random.Random) -> Outcome:
    """Kill each plan's training at a random step, and resume with the next plan; the order is drawn."""
    ways = draw.sample(WAYS, len(WAYS))
    plans = [stage.plan(" ".join(way), lambda folder, way=way: mlp(folder, *way)) for way in ways]
    folder = stage.case_folder()
    kept = folder / "kept"
    failures: list[str] = []
    for number, plan in enumerate(plans):
        last = number == len(plans) - 1
        with Training(plan, folder / str(number)) as training:
            training.checkpoints = kept
            before = steps_in(kept)
            training.begin_saving(_STEPS, _SAVE_EVERY, *(["--resume"] if number else []))
            if last:
                failures += training.end(0)
                trained = dict(read_arrays(training.plan / TRAINED_FILE))
            else:
                passed = (before[-1] if before else 0) + draw.randrange(1, 10) * _SAVE_EVERY
                training.until(lambda step=passed: step <= max(steps_in(kept), default=0), look_s=0.01)
                training.kill_launcher()
                failures += training.end(-KILL) + training.left()
    expected = stage.trained(plans[ways.index(_ONE_DEVICE)], _STEPS)
    apart = max(float(np.max(np.abs(trained[name] - value))) for name, value in expected.items())
    for name, value in expected.items():
        if not np.allclose(trained[name], value, rtol=_RELATIVE, atol=_ABSOLUTE):
            failures.append(f"{name!r} differs")
    moment = " > ".join(" ".join(way) for way in ways)
    return Outcome("launcher", moment, failures=tuple(failures), figures=f"at most {apart:.1e} apart")
