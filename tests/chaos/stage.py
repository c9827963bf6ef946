"""What scenarios share: plans, each with what an uninterrupted run of it comes to; made when asked for."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.jobs.results import TRAINED_FILE
from tests.builders.plans.compiled_steps import compile_step
from tests.builders.plans.session_plans import additive_step, compile_sessions
from tests.chaos.training import Training

SIZES = (64, 128, 128, 10)
_TRIAL_STEPS = 500
_TRAINING_S = 4.0
_SAVES = 30
_STEPS = (200, 30_000)


@dataclass(frozen=True)
class Bench:
    """A plan; how many steps take some seconds; and the variables after these, uninterrupted."""

    plan: Path
    steps: int = 0
    save_every: int = 0
    expected: Mapping[str, np.ndarray] | None = None


class Stage:
    """The folder of all cases. `minutes`: how long what takes as long as one likes is to take."""

    def __init__(self, root: Path, minutes: float) -> None:
        self.root = root
        self.minutes = minutes
        self._benches: dict[str, Bench] = {}
        self._trained: dict[tuple[Path, int], Mapping[str, np.ndarray]] = {}

    def case_folder(self) -> Path:
        """Return an empty folder."""
        folder = self.root / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def bench(self, name: str, make: Callable[[Path], Path] | None = None) -> Bench:
        """Return a plan by name, made by `make` or one of those below, and what it comes to."""
        if name not in self._benches:
            plan = self.plan(name, make or _PLANS[name])
            self._benches[name] = Bench(plan) if name == "sessions" else self._uninterrupted(plan)
        return self._benches[name]

    def plan(self, name: str, make: Callable[[Path], Path]) -> Path:
        """Return a plan's folder; it is made if there is none of that name."""
        folder = self.root / "plans" / name.replace(" ", "-")
        return folder if folder.exists() else make(folder)

    def trained(self, plan: Path, steps: int) -> Mapping[str, np.ndarray]:
        """Return the variables after an uninterrupted training."""
        if (plan, steps) not in self._trained:
            self._trained[plan, steps] = _train(plan, self.root / "uninterrupted", steps)[1]
        return self._trained[plan, steps]

    def _uninterrupted(self, plan: Path) -> Bench:
        """Train it for as many steps as take some seconds."""
        low, high = _STEPS
        steps_per_s = _train(plan, self.root / "uninterrupted", _TRIAL_STEPS)[0]
        steps = min(high, max(low, int(_TRAINING_S * steps_per_s)))
        return Bench(plan, steps, max(1, steps // _SAVES), self.trained(plan, steps))


def mlp(folder: Path, cluster: str, strategy: str, sizes: Sequence[int] = SIZES) -> Path:
    """Compile a multi-layer perceptron; equal on any cluster and strategy but for rounding."""
    step = import_training_graph(mlp_step(sizes))
    return compile_step(step, folder, cluster, strategy, batch="global").folder.path


def mlp_step(sizes: Sequence[int] = SIZES) -> onnx.ModelProto:
    """Return a training step of a multi-layer perceptron with Adam."""
    forward = build_model("mlp", dtype="float64", sizes=list(sizes), batch=24)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.001))


_PLANS: dict[str, Callable[[Path], Path]] = {
    "AllReduce": lambda folder: mlp(folder, "1x4", "allreduce"),
    "servers": lambda folder: mlp(folder, "1x3", "ps"),
    "sessions": lambda folder: compile_sessions(additive_step(), folder, "1x3").path,
}


def _train(plan: Path, root: Path, steps: int) -> tuple[float, Mapping[str, np.ndarray]]:
    """Return steps per second, and the trained variables."""
    with Training(plan, root) as training:
        training.begin(steps)
        assert not training.end(0, within_s=1200.0), training.told
        rate = float(training.told.splitlines()[-1].split()[-2])
        return rate, read_arrays(training.plan / TRAINED_FILE)
