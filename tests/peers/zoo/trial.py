"""One trial of a model: grad, PyTorch's steps beside it, compile, verify; what came of it, as a record.

forward.onnx ─ grad ─> train.onnx ─ two steps ─ as PyTorch's?
                            └────── compile ─> plan ─ verify ─ as one device's?
"""

import random
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from partc.compiler.driver import CompileOptions, compile_graph
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.training.build import build_training_graph
from partc.compiler.training.choose_parameters import ParameterChoice
from partc.compiler.update_arguments import parse_optimizer
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.cluster import CLUSTER_FORMAT, Cluster, Device, Host, Link
from partc.cost.strategy import STRATEGY_FORMAT, Strategy, Synchronisation, encode_strategy
from partc.passes.training_graph import TrainingGraph
from partc.runtime.errors import BadStrategy, PartcError
from partc.runtime.plan_folder import read_plan_folder
from partc.runtime.program import Plan
from tests.peers.zoo.as_torch import EPSILON, compare_with_torch
from tests.peers.zoo.exported import Exported, read_exported
from tests.peers.zoo.model import Model

CLUSTERS = {"2x2": (2, 2), "1x3": (3,), "2+3": (2, 3)}  # devices of each host
STEPS = 2

# Learning rate and settings. Beside PyTorch they have larger epsilons: see as_torch.py.
OPTIMIZERS = {
    "sgd": ("0.1", ()),
    "momentum": ("0.05", ()),
    "nesterov": ("0.05", ("momentum=0.8",)),
    "adagrad": ("0.05", ()),
    "rmsprop": ("0.01", ()),
    "adam": ("0.01", ()),
    "adamw": ("0.01", ()),
    "lamb": ("0.01", ()),
    "adafactor": ("0.01", ()),
}
HAVE_TORCHS = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw")
STRATEGIES = ("auto", "hybrid", "allreduce", "ps", "random")


@dataclass(frozen=True)
class Trial:
    """What is tried; everything random follows from it."""

    model: str
    variant: str
    cluster: str
    batch: str
    strategy: str
    optimizer: str
    beside_torch: bool = False

    @property
    def label(self) -> str:
        """Return a name for it."""
        return f"{self.model}.{self.variant}.{self.cluster}.{self.batch}"

    @property
    def over_mpi(self) -> bool:
        """Tell whether its ranks are processes, and its data synthetic: one trial in sixteen."""
        return self.seed % 16 == 0

    @property
    def batch_size(self) -> int | None:
        """Return the batch that the graph is given, where its own does not divide among the ranks."""
        return 15 if self.cluster == "2+3" and self.batch == "global" else None

    @property
    def seed(self) -> int:
        """Return a number that is another one for other trials."""
        return sum(ord(letter) * (i + 1) for i, letter in enumerate(repr(self)))


@dataclass(frozen=True)
class Record:
    """What came of a trial.

    outcome  "trained", "refused" (a PartcError), or "failed": any other error, or a difference
    parameters  how they were chosen: "decided" by partc alone, or "named", which --train did after it refused
    axes     "found", or "declared" after partc refused to guess
    torch    "equal", "differs", or why there was nothing to compare
    """

    trial: Trial
    outcome: str
    stage: str
    parameters: str = ""
    axes: str = ""
    torch: str = ""
    kind: str = ""
    message: str = ""
    at: str = ""
    fix: str = ""
    trace: str = ""
    refusals: tuple[str, ...] = ()  # that were followed, on the way
    seconds: float = 0.0


class Differs(Exception):
    """Two things that had to be equal are not."""


class Attempt:
    """A trial under way."""

    def __init__(self, model: Model, trial: Trial, cache: Path, scratch: Path) -> None:
        self.model, self.trial, self.scratch = model, trial, scratch
        self.cache = cache
        self.random = random.Random(trial.seed)
        self.stage, self.parameters, self.axes, self.torch = "grad", "", "", ""
        self.refusals: list[str] = []

    def run(self) -> Record:
        """Try, and tell what came of it."""
        begun_s = time.perf_counter()
        told: dict[str, Any] = {"outcome": "trained"}
        try:
            self._try()
        except PartcError as error:
            told = {"outcome": "refused", "message": error.what, "at": error.at, "fix": error.fix}
            told["kind"] = type(error).__name__
        except Exception as error:
            told = {"outcome": "failed", "kind": type(error).__name__, "message": str(error)[:2000]}
            told["trace"] = "".join(traceback.format_exception(error)[-6:])[-3000:]
        return Record(
            self.trial,
            stage=self.stage,
            parameters=self.parameters,
            axes=self.axes,
            torch=self.torch,
            refusals=tuple(self.refusals),
            seconds=round(time.perf_counter() - begun_s, 2),
            **told,
        )

    def _try(self) -> None:
        exported = read_exported(self.model.name, self.trial.variant, self.cache)
        train = self._differentiate(exported)
        path = self.scratch / "train.onnx"
        onnx.save(train, path)
        if self.trial.beside_torch:
            self.stage = "torch"
            self.torch = self._compare_with_torch(exported)
        self.stage = "compile"
        plan, folder = self._compile(path)
        self.stage = "verify"
        if self.trial.over_mpi:
            report = verify(folder, steps=STEPS)
        else:
            report = verify(folder, steps=STEPS, data=self._batches(plan, STEPS), launcher=launch_in_process)
        if not report.passed:
            raise Differs(report.summary())
        self.stage = "done"

    # ------------------------------------------------------------ grad

    def _differentiate(self, exported: Exported) -> onnx.ModelProto:
        """Let partc decide what is trained; name the parameters where it asks for that."""
        self.parameters = "decided"
        if exported.needs_names:
            self.parameters = "named"
            return self._grad(exported, exported.trainable)
        try:
            return self._grad(exported, None)
        except PartcError as error:
            if "--train" not in error.fix:
                raise
            self.refusals.append(error.what)
        self.parameters = "named"
        return self._grad(exported, exported.trainable)

    def _grad(
        self, exported: Exported, names: list[str] | None, beside_torch: bool = False
    ) -> onnx.ModelProto:
        lr, settings = OPTIMIZERS[self.trial.optimizer]
        if beside_torch and self.trial.optimizer in EPSILON:
            settings = (f"epsilon={EPSILON[self.trial.optimizer]}",)
        choice = ParameterChoice() if names is None else ParameterChoice(tuple(map(_escape, names)))
        return build_training_graph(
            onnx.load(exported.path),
            loss=self.model.loss,
            optimizer=parse_optimizer(self.trial.optimizer, lr, settings, None),
            parameters=choice,
            batch_size=None if beside_torch else self.trial.batch_size,
        )

    def _compare_with_torch(self, exported: Exported) -> str:
        """Compare what both can train alike: a step of partc's of its own, with those parameters named."""
        names = exported.comparable
        if not names:
            return "no parameter of the module is one of the graph's"
        lr = float(OPTIMIZERS[self.trial.optimizer][0])
        train = self._grad(exported, names, beside_torch=True)
        batches = [self.model.draw(1000 + step) for step in range(STEPS)]
        differing, compared, total = compare_with_torch(
            self.model, exported, train, self.trial.optimizer, lr, batches
        )
        if differing:
            raise Differs(
                f"PyTorch's steps differ in {len(differing)} of {compared} parameters: {differing[:3]}"
            )
        return f"equal, {compared} of {total} parameters"

    # ------------------------------------------------------------ compile

    def _compile(self, train: Path) -> tuple[Plan, Any]:
        self.axes = "found"
        try:
            return self._compile_with(train, None)
        except PartcError as error:
            if "--sample-axis" not in error.fix:
                raise
            self.refusals.append(error.what)
        self.axes = "declared"
        return self._compile_with(train, self.model.sample_axes())

    def _compile_with(self, train: Path, axes: dict[str, int | None] | None) -> tuple[Plan, Any]:
        out = self.scratch / "out"
        known = {i.name for i in onnx.load(train, load_external_data=False).graph.input}
        given = None if axes is None else {name: axis for name, axis in axes.items() if name in known}
        strategy: Any = self.trial.strategy
        if strategy == "random":
            strategy = self._random_strategy(import_training_graph(train, sample_axes=given))
        for attempt in range(50):
            training = import_training_graph(train, sample_axes=given)
            if isinstance(strategy, Strategy):
                (self.scratch / "asked.json").write_bytes(encode_strategy(strategy))
            options = CompileOptions(strategy, self.trial.batch)  # type: ignore[arg-type]
            try:
                compile_graph(training, cluster_of(self.trial.cluster), out, options)
                break
            except BadStrategy as error:
                if self.trial.strategy != "random" or attempt == 49:
                    raise
                strategy = _without(strategy, error.at)
        folder = read_plan_folder(out)
        return folder.plan, folder

    def _random_strategy(self, training: TrainingGraph) -> Strategy:
        drawn = {}
        for name, gradient in training.gradients.items():
            methods = ["all_reduce", "servers"] + ["all_gather"] * gradient.is_sparse
            method: Any = self.random.choice(methods)
            mechanisms: dict[str, Any] = {}
            if method == "servers":
                mechanisms["local_aggregation"] = self.random.random() < 0.5
                mechanisms["post_aggregation"] = self.random.choice(["server", "worker"])
            drawn[name] = Synchronisation(method, **mechanisms)
        return Strategy(STRATEGY_FORMAT, self.trial.batch, drawn)  # type: ignore[arg-type]

    # ------------------------------------------------------------ data

    def _batches(self, plan: Plan, steps: int) -> list[dict[str, np.ndarray]]:
        """Draw total batches as the model's own data is: one draw a replica, or one for all."""
        replicas = plan.replicas if plan.batch == "per-replica" else 2 if self.trial.batch_size else 1
        drawn = []
        for step in range(steps):
            parts = [self._draw(plan, self.trial.seed + 100 * step + replica) for replica in range(replicas)]
            total = {}
            for entry in plan.data_inputs:
                values = [part[entry.name] for part in parts]
                axis = entry.sample_axis
                whole = values[0] if axis is None else np.concatenate(values, axis)
                if axis is not None and self.trial.batch_size:
                    whole = np.take(whole, np.arange(self.trial.batch_size), axis)
                total[entry.name] = whole
            drawn.append(total)
        return drawn

    def _draw(self, plan: Plan, seed: int) -> dict[str, np.ndarray]:
        data = {name: value.numpy() for name, value in self.model.draw(seed).items()}
        rng = np.random.default_rng(seed)
        for entry in plan.data_inputs:
            if entry.name not in data:  # what the loss added: labels, or targets
                shape = [plan.sizes[size] if isinstance(size, str) else size for size in entry.shape]
                is_label = np.dtype(entry.dtype).kind in "iu"
                drawn = rng.integers(0, entry.high or 3, shape) if is_label else rng.normal(size=shape)
                data[entry.name] = np.asarray(drawn).astype(entry.dtype)
        return data


def _escape(name: str) -> str:
    """Return a pattern that fits this name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _without(strategy: Strategy, at: str) -> Strategy:
    """Leave a parameter that cannot be synchronised as drawn to what any parameter can do: all_reduce."""
    name = at.removeprefix("parameters: ").split(": ")[0]
    if name not in strategy.parameters:
        raise AssertionError(f"no parameter in {at!r}")
    changed = {**strategy.parameters, name: Synchronisation("all_reduce")}
    return Strategy(STRATEGY_FORMAT, strategy.batch, changed)


def cluster_of(name: str) -> Cluster:
    """Return hosts with CPU workers on one switch."""
    hosts = tuple(
        Host(
            f"host{h}",
            tuple(Device(f"host{h}/cpu{w}", "cpu", "cpu-core") for w in range(workers)),
            memory_bytes=2**32,
        )
        for h, workers in enumerate(CLUSTERS[name])
    )
    links = tuple(Link((host.name, "switch"), bytes_per_s=125e6, latency_s=25e-6) for host in hosts)
    return Cluster(CLUSTER_FORMAT, name, hosts, switches=("switch",), links=links)


def trials_of(name: str, thorough: bool = False) -> list[Trial]:
    """Return a model's trials: every cluster for each variant, under one reading of the batch, or both.

    The others are drawn: strategy and optimizer. The first of each variant is held against PyTorch.
    """
    drawn = random.Random(name)
    trials = []
    for v, variant in enumerate(("optimised", "raw")):
        for c, cluster in enumerate(CLUSTERS):
            readings = ("per-replica", "global") if (v + c) % 2 == 0 else ("global", "per-replica")
            for r, batch in enumerate(readings):
                is_first = c == r == 0
                optimizer = drawn.choice(HAVE_TORCHS if is_first else tuple(OPTIMIZERS))
                trial = Trial(name, variant, cluster, batch, drawn.choice(STRATEGIES), optimizer, is_first)
                if thorough or r == 0:
                    trials.append(trial)
    return [*trials, replace(trials[0], variant="perturbed", strategy=drawn.choice(STRATEGIES))]
