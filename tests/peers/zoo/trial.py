"""One trial of a model: grad, PyTorch's steps beside it, compile, verify; what came of it, as a record.

forward.onnx ─ grad ─> train.onnx ─ compile ─> plan ─ verify: as one device's?
                 └──> of comparable parameters, one device and all ranks: as PyTorch's on the whole batch?
"""

import random
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from partc.compiler.api import compile_step
from partc.compiler.commands.arguments.parse_update_options import parse_optimizer
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions, Options
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.strategy import STRATEGY_FORMAT, Strategy, Synchronisation, encode_strategy
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import BadStrategy, BadUsage, PartcError
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput
from tests.builders.plans.compiled_steps import cluster_of as equal_hosts
from tests.builders.plans.random_soap import random_soap, samples_of
from tests.peers.score_parameters import score_parameters
from tests.peers.zoo.as_torch import EPSILON, BesideTorch, Differs, after_steps_in_onnxruntime
from tests.peers.zoo.exported import Exported, read_exported
from tests.peers.zoo.model import BATCH, Model

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
# Half of the trials have replicas of one device; "random" draws a way for each parameter.
OF_REPLICAS = ("auto", "hybrid", "allreduce", "ps", "random")
# The others divide more than samples, by name or, "any", each operator in a way of its own.
ON_MESHES = {
    "2x2": (
        *("tensor=2", "tensor=4", "fsdp", "fsdp=2,tensor=2", "data=2,tensor=2", "replicas=2"),
        *("spatial=2", "spatial=4", "layerwise", "one-weird-trick", "workers=2"),
        *("pipeline=2,microbatches=3", "pipeline=4,microbatches=4", "pipeline=2,tensor=2"),
    ),
    "1x3": ("tensor=3", "fsdp", "spatial=3", "pipeline=3,microbatches=4", "workers=1"),
    "2+3": ("tensor=5", "fsdp", "pipeline=5,microbatches=5", "one-weird-trick"),
}
ANY = "any"
MOST_DRAWN = 5  # of them, where one is refused: samples on another axis than the first leave less to divide


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
    def seed(self) -> int:
        """Return a number that is another one for other trials."""
        return sum(ord(letter) * (i + 1) for i, letter in enumerate(repr(self)))


@dataclass(frozen=True)
class Record:
    """What came of a trial.

    outcome     "trained", "refused" (a PartcError), or "failed": any other error, or a difference
    parameters  how they were chosen: "decided" by partc alone, or "named", which --train did after it refused
    axes        "found", or "declared" after partc refused to guess
    torch       what was compared with PyTorch, and was equal
    departures  of replicas from one device, as partc tells
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
    departures: tuple[str, ...] = ()
    seconds: float = 0.0


class Attempt:
    """A trial under way."""

    def __init__(self, model: Model, trial: Trial, cache: Path, scratch: Path) -> None:
        self.model, self.trial, self.scratch = model, trial, scratch
        self.cache = cache
        self.random = random.Random(trial.seed)
        self.stage, self.parameters, self.axes, self.torch = "", "", "", ""
        self.refusals: list[str] = []
        self.departures: tuple[str, ...] = ()

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
            departures=self.departures,
            seconds=round(time.perf_counter() - begun_s, 2),
            **told,
        )

    def _try(self) -> None:
        exported = read_exported(self.model.name, self.trial.variant, self.cache)
        if self.trial.variant != "perturbed":  # as the optimised one, whose values are the module's
            self.stage = "score"
            self._score(exported)
        self.stage = "grad"
        path = self.scratch / "train.onnx"
        onnx.save(self._differentiate(exported), path)
        self.stage = "compile"
        folder = self._compile(path)
        self.departures = tuple(folder.plan.departures)
        self.stage = "verify"
        self._verify(folder)
        if self.trial.beside_torch:
            self.stage = "torch"
            self.torch = self._compare_with_torch(exported)
        self.stage = "done"

    # ------------------------------------------------------------ grad

    def _score(self, exported: Exported) -> None:
        """Hold what partc takes for parameters against the module's own."""
        score = score_parameters(
            onnx.load(exported.path),
            self.model.loss,
            exported.stored("parameters"),
            exported.stored("buffers"),
            unoptimised=onnx.load(exported.path.with_name(f"{self.model.name}.raw.onnx")),
        )
        if score.wrongly_trained:
            raise Differs(f"no parameter of the module, but trained: {score.wrongly_trained}")
        if score.wrongly_frozen:
            raise Differs(f"a parameter of the module, but frozen: {score.wrongly_frozen}")

    def _differentiate(self, exported: Exported) -> onnx.ModelProto:
        """Let partc decide what is trained; name the parameters where it asks for that."""
        self.parameters = "decided"
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
        )

    # ------------------------------------------------------------ compile, verify

    def _compile(self, train: Path) -> PlanFolder:
        self.axes = "found"
        try:
            return self._compile_with(train, None)
        except PartcError as error:
            if "--sample-axis" not in error.fix:
                raise
            self.refusals.append(error.what)
        self.axes = "declared"
        return self._compile_with(train, self._axes(onnx.load(train, load_external_data=False)))

    def _axes(self, train: onnx.ModelProto) -> dict[str, int | None]:
        known = {value.name for value in train.graph.input}
        return {name: axis for name, axis in self.model.sample_axes().items() if name in known}

    def _compile_with(self, train: Path, axes: dict[str, int | None] | None) -> PlanFolder:
        out = self.scratch / "out"
        strategy: Any = self.trial.strategy
        if strategy == "random":
            strategy = self._random_strategy(import_training_graph(train, GraphOptions(sample_axes=axes)))
        cluster, seed = cluster_of(self.trial.cluster), self.trial.seed
        if strategy == ANY:
            cluster, strategy = self._any_strategy(train, axes, seed)
        while True:
            if isinstance(strategy, Strategy):
                (self.scratch / "asked.json").write_bytes(encode_strategy(strategy))
            options = Options(
                strategy=strategy,
                batch=self.trial.batch,  # type: ignore[arg-type]
                options=GraphOptions(sample_axes=axes),
            )
            try:
                compile_step(train, cluster, out, options)
                return read_plan_folder(out)
            except BadStrategy as error:
                if self.trial.strategy == ANY and len(self.refusals) < MOST_DRAWN:
                    self.refusals.append(error.what)
                    seed += 1
                    cluster, strategy = self._any_strategy(train, axes, seed)
                elif self.trial.strategy == "random":
                    strategy = _without(strategy, error.at)
                else:
                    raise
            except BadUsage as error:
                if "use --strategy" not in error.fix:
                    raise
                self.refusals.append(error.what)
                strategy = error.fix.rpartition("--strategy ")[2]

    def _any_strategy(
        self, train: Path, axes: dict[str, int | None] | None, seed: int
    ) -> tuple[Cluster, Strategy]:
        training = import_training_graph(train, GraphOptions(sample_axes=axes))
        shape, strategy = random_soap(training, self.trial.batch, samples_of(training), seed)
        return equal_hosts(shape), strategy

    def _random_strategy(self, training: TrainingGraph) -> Strategy:
        drawn = {}
        for name, gradient in training.gradients.items():
            method: Any = self.random.choice(
                ["all_gather", "servers"] if gradient.is_sparse else ["all_reduce", "servers"]
            )
            mechanisms: dict[str, Any] = {}
            if method == "servers":
                mechanisms["local_aggregation"] = self.random.random() < 0.5
                mechanisms["post_aggregation"] = self.random.choice(["server", "worker"])
            drawn[name] = Synchronisation(method, **mechanisms)
        return Strategy(STRATEGY_FORMAT, self.trial.batch, drawn)  # type: ignore[arg-type]

    def _verify(self, folder: PlanFolder) -> None:
        if self.trial.over_mpi:
            report = verify(folder, steps=STEPS)
        else:
            totals = self._total_batches(folder.plan)
            report = verify(folder, steps=STEPS, data=totals, launcher=launch_in_process)
        if not report.passed:
            raise Differs(report.summary())

    # ------------------------------------------------------------ beside PyTorch

    def _compare_with_torch(self, exported: Exported) -> str:
        """Train what both can train alike: on one device, and on all ranks with their whole batch."""
        names = exported.comparable
        if not names:
            return ""
        train = self._grad(exported, names, beside_torch=True)
        axes = self._axes(train) if self.axes == "declared" else None
        training = import_training_graph(train, GraphOptions(sample_axes=axes))
        lr = float(OPTIMIZERS[self.trial.optimizer][0])
        beside = BesideTorch(self.model, exported, names, self.trial.optimizer, lr)
        batches = [self._draw(training.data_inputs, 1000 + step) for step in range(STEPS)]
        first = beside.initial()
        beside.hold("one device", after_steps_in_onnxruntime(training, first, batches), batches)
        told = f"{len(names)} of {exported.trained_parameters} parameters"
        path = self.scratch / "beside.onnx"
        onnx.save(train, path)
        folder = self._compile(path)
        if folder.plan.departures:
            return f"one device: {told}"
        totals = self._total_batches(folder.plan)
        after = train_in_process(folder, totals, first, stop_when_diverged=False).variables
        beside.hold(f"{len(folder.plan.ranks)} ranks", after, totals)
        return f"all ranks: {told}"

    # ------------------------------------------------------------ data

    def _total_batches(self, plan: Plan) -> list[dict[str, np.ndarray]]:
        """Draw total batches as the model's own data is: one draw for each replica, or one for all."""
        draws = plan.replicas if plan.batch == "per-replica" else 1
        inputs = {entry.name: entry for entry in plan.data_inputs}
        totals = []
        for step in range(STEPS):
            seeds = [self.trial.seed + 100 * step + draw for draw in range(draws)]
            parts = [self._draw(inputs, seed) for seed in seeds]
            total = {}
            for name, entry in inputs.items():
                axis = entry.sample_axis
                whole = [part[name] for part in parts]
                total[name] = whole[0] if axis is None else np.concatenate(whole, axis)
            totals.append(total)
        return totals

    def _draw(self, inputs: Mapping[str, DataInput], seed: int) -> dict[str, np.ndarray]:
        data = {name: value.numpy() for name, value in self.model.draw(seed).items()}
        rng = np.random.default_rng(seed)
        for name, entry in inputs.items():
            if name not in data:  # what the loss added: labels, or targets
                shape = [BATCH, *entry.shape[1:]]
                is_label = np.dtype(entry.dtype).kind in "iu"
                drawn = rng.integers(0, entry.high or 3, shape) if is_label else rng.normal(size=shape)
                data[name] = np.asarray(drawn).astype(entry.dtype)
        return {name: value for name, value in data.items() if name in inputs}


def _escape(name: str) -> str:
    """Return a pattern that fits this name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _without(strategy: Strategy, at: str) -> Strategy:
    """Leave the parameter that is refused as drawn to what any dense one can do: all_reduce."""
    name = at.removeprefix("parameters: ").split(": ")[0]
    assert strategy.parameters[name].method != "all_reduce", at
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


def _drawn_strategy(drawn: random.Random, cluster: str) -> str:
    return drawn.choice(drawn.choice((OF_REPLICAS, OF_REPLICAS, ON_MESHES[cluster], (ANY,))))


def trials_of(name: str, thorough: bool = False) -> list[Trial]:
    """Return a model's trials: every cluster for each variant, under one reading of the batch, or both.

    Strategy and optimizer are drawn. One trial of each variant is held against PyTorch: these come first.
    """
    drawn = random.Random(name)
    trials = []
    for v, variant in enumerate(("optimised", "raw")):
        for c, cluster in enumerate(CLUSTERS):
            readings = ("per-replica", "global") if (v + c) % 2 == 0 else ("global", "per-replica")
            for r, batch in enumerate(readings):
                is_first = c == r == 0
                optimizer = drawn.choice(HAVE_TORCHS if is_first else tuple(OPTIMIZERS))
                strategy = _drawn_strategy(drawn, cluster)
                trial = Trial(name, variant, cluster, batch, strategy, optimizer, is_first)
                if thorough or r == 0:
                    trials.append(trial)
    first = trials[0]
    trials.append(replace(first, variant="perturbed", strategy=_drawn_strategy(drawn, first.cluster)))
    return sorted(trials, key=lambda trial: not trial.beside_torch)
