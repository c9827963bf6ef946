"""What is damaged: models, clusters, strategies, plans and data that are right, made or found once."""

import contextlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx.backend.test import data as backend_tests

from partc.compiler.api import kernels_of
from partc.compiler.commands.cli import main
from partc.compiler.kernel_times.read_times import versions_here
from partc.compiler.options import Options
from partc.cost.cluster.cluster import ranks_of, read_cluster
from partc.cost.simulation.measured_kernels import MeasuredDevice, Profile, encode_profile
from tests.builders.graphs.foreign_steps import ADAM, CLIPPED, COUNTED, SGD, TABLE, parse, with_zeros
from tests.builders.graphs.onnx_cases import onnx_cases, problem, why_unusable
from tests.builders.graphs.training_models import MODELS, training_model
from tests.compiler.differentiation.forward.test_control_flow import CASES as CONTROL_FLOW
from tests.compiler.differentiation.forward.test_control_flow import stored
from tests.fuzz.mesh_strategies import Splittable, splittable

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ARTIFACTS = Path(__file__).parent.parent / "fixtures" / "ort_training"
CLUSTER = EXAMPLES / "cluster-2x2.json"
MOST_MODEL_BYTES = 100_000  # of the onnx package's test models
_STEPS = {
    "sgd": (SGD, "W"),
    "adam": (ADAM, "W,m,v,count"),
    "clipped": (CLIPPED, "W,bias,mean,state"),
    "counted": (COUNTED, "W"),
    "table": (TABLE, "E"),
}
_PLANS = {
    "auto": (),
    "ps": ("--strategy", "ps"),
    "allreduce": ("--strategy", "allreduce"),
    "global": ("--batch", "global"),
    "asynchronous": ("--asynchronous", "--strategy", "ps"),
}
_LM = "vocab=40 embedding=8 cells=8 projection=8 batch=4 steps=3 samples=8".split()


@dataclass(frozen=True)
class Bases:
    """Right files, by kind. `folder` holds the training steps that clusters and strategies are tried on.

    `forwards`: families of forward graphs, of which each is drawn equally often.
    """

    folder: Path
    forwards: tuple[tuple[onnx.ModelProto, ...], ...]
    steps: tuple[onnx.ModelProto, ...]
    artifacts: tuple[Path, ...]  # folders of onnxruntime-training
    clusters: tuple[Path, ...]
    strategies: tuple[tuple[str, Path], ...]  # the step that each is of
    meshes: tuple[Splittable, ...]  # the steps that strategies with a mesh are drawn for
    plans: tuple[Path, ...]  # folders
    data: tuple[tuple[str, Path], ...]  # the plan's folder that reads it, and an .npz file
    profiles: tuple[tuple[str, Path], ...]  # the step whose kernels each times


def make_bases(folder: Path, extra: Iterable[Path] = ()) -> Bases:
    """Make or find every base. `extra`: more models, each damaged as a forward graph."""
    forwards = [_own_forwards(folder), _package_models(), _cases_of_ops(), _control_flow()]
    if more := [onnx.load(path) for path in extra]:
        forwards.append(more)
    steps = [step_with_zeros(text, names) for text, names in _STEPS.values()]
    for name, model in zip(_STEPS, steps, strict=True):
        onnx.save(model, folder / f"{name}.onnx")
    names = [*_STEPS, "mlp_step", "lm_step"]
    steps += [onnx.load(folder / f"{name}.onnx") for name in names[len(_STEPS) :]]
    steps += [onnx.load_from_string(training_model(name)) for name in MODELS]
    plans, strategies = [], []
    for name in ("sgd", "table", "mlp_step", "lm_step"):
        for way, options in _PLANS.items():
            if (name, way) == ("table", "global"):
                continue  # two samples are too few for four
            out = folder / f"{name}.{way}"
            # Its gradient is a sum, whose replicas' average is not what one device trains.
            said = ("--batch", "per-replica") if name == "table" else ()
            partc("compile", folder / f"{name}.onnx", "-c", CLUSTER, "-o", out, *said, *options)
            plans.append(out)
            if way in ("auto", "ps", "allreduce"):
                strategies.append((name, out / "strategy.json"))
    clusters = tuple(sorted(EXAMPLES.glob("cluster-*.json")))
    return Bases(
        folder,
        tuple(map(tuple, forwards)),
        tuple(steps),
        tuple(path.parent for path in sorted(ARTIFACTS.glob("*/training_model.onnx"))),
        clusters,
        tuple(strategies),
        tuple(splittable(folder, name) for name in names),
        tuple(plans),
        tuple(_data(folder)),
        tuple((name, _profile(folder, name)) for name in ("sgd", "mlp_step")),
    )


def _profile(folder: Path, name: str) -> Path:
    """Return a profile of a step's kernels, of invented times."""
    cluster = read_cluster(CLUSTER)
    kernels = kernels_of(folder / f"{name}.onnx", cluster, Options(), with_parts=False)
    seconds = {
        key: 1e-5 * (place + 1) for place, key in enumerate(kernels.seconds_on(ranks_of(cluster)[0], cluster))
    }
    device = MeasuredDevice("cpu", "cpu-core", 1, "invented", versions_here(), seconds, {"Loop()": "refused"})
    path = folder / f"{name}.profile.json"
    path.write_bytes(encode_profile(Profile(devices=(device,))))
    return path


def partc(*arguments: object) -> None:
    """Run a command that must succeed."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = main([str(argument) for argument in arguments])
    assert code == 0, told.getvalue()


def step_with_zeros(text: str, names: str) -> onnx.ModelProto:
    """Return a step in ONNX text whose variables, the names with commas between them, begin as zeros."""
    model = with_zeros(parse(text), *names.split(","))
    entry = ", ".join(f'"{name}": "{name}_next"' for name in names.split(","))
    model.metadata_props.add(key="partc.training", value=f'{{"state": {{{entry}}}}}')
    return model


def _own_forwards(folder: Path) -> list[onnx.ModelProto]:
    made = []
    for name, loss, options in (
        ("mlp", "softmax_cross_entropy", ["sizes=6,8,3", "batch=4"]),
        ("lm", "loss", _LM),
    ):
        forward = folder / f"{name}.onnx"
        sets = [part for option in options for part in ("--set", option)]
        partc("model", name, *sets, "-o", forward)
        partc("grad", forward, "--loss", loss, "--optimizer", "adagrad", "-o", folder / f"{name}_step.onnx")
        made.append(onnx.load(forward))
    return made


def _package_models() -> list[onnx.ModelProto]:
    """Return the small models that the onnx package tests backends with."""
    root = Path(backend_tests.__path__[0])
    paths = sorted(path for path in root.rglob("*.onnx") if path.stat().st_size < MOST_MODEL_BYTES)
    return [onnx.load(path, load_external_data=False) for path in paths]


def _cases_of_ops() -> list[onnx.ModelProto]:
    """Return a graph for every case that ONNX has of an op with a gradient."""
    usable = [case for case in onnx_cases().values() if why_unusable(*case) is None]
    return [problem(model, inputs, onnx.TensorProto.FLOAT).model for model, inputs in usable]


def _control_flow() -> list[onnx.ModelProto]:
    return [stored(text) for text in CONTROL_FLOW.values()]


def _data(folder: Path) -> Iterable[tuple[str, Path]]:
    rng = np.random.default_rng(0)
    arrays: dict[str, dict[str, np.ndarray]] = {
        "sgd.auto": {"x": rng.normal(size=(64, 4)), "t": rng.normal(size=(64, 3))},
        "mlp_step.auto": {"x": rng.normal(size=(64, 6)), "labels": rng.integers(0, 3, 64)},
        "mlp_step.asynchronous": {"x": rng.normal(size=(64, 6)), "labels": rng.integers(0, 3, 64)},
        "table.ps": {
            "ids": rng.integers(0, 10, 48),
            "more": rng.integers(0, 10, (16, 3)),
            "t": rng.normal(size=(48, 4)),
        },
    }
    for plan, members in arrays.items():
        typed = {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in members.items()}
        path = folder / f"{plan}.npz"
        np.savez(path, allow_pickle=False, **typed)
        yield plan, path
