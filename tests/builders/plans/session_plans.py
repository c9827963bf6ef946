"""Asynchronous plans for tests: small steps, compiled for sessions, and the sequential truth beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.compiler.verification.reference import make_reference
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.asynchronous.sessions.session import plan_of_data
from partc.runtime.data.initial import InitialValues
from partc.runtime.plan.check_program import check_program
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import Batch, check_segments, cluster_of, random_batches
from tests.checks.training_steps import EVERYTHING

# The gradient is the data alone, whatever W and E are; on whole numbers all arithmetic is exact.
ADDITIVE = """
forward (int64[4] ids, double[4,4] x) => (double loss)
<double[10,4] E = {VALUES}, double[4] W = {1, 2, 3, 4}> {
    e = Gather (E, ids)
    z = Mul (x, W)
    s = Add (e, z)
    loss = ReduceMean <keepdims = 0> (s)
}
"""


def additive_step() -> onnx.ModelProto:
    """Return a step whose updates make the same in any order: of a table, by rows, and of a vector."""
    values = ", ".join(str(value) for value in range(40))
    forward = parse(ADDITIVE.replace("VALUES", values))
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.5), parameters=EVERYTHING)


def compile_sessions(
    model: str | onnx.ModelProto | TrainingGraph, out: Path, cluster: str = "2x2"
) -> PlanFolder:
    """Compile a model (of training_models.py, if a name) asynchronously, and check what is written."""
    if isinstance(model, str):
        model = onnx.load_from_string(training_model(model))
    training = model if isinstance(model, TrainingGraph) else import_training_graph(model)
    compile_graph(training, cluster_of(cluster), out, Options(strategy="ps", asynchronous=True))
    _on_cpus(out)
    folder = read_plan_folder(out)
    check_segments(folder)
    check_program(folder.plan)
    return folder


def _on_cpus(out: Path) -> None:
    plan = read_plan_folder(out).plan
    ranks = tuple(msgspec.structs.replace(rank, kind="cpu", device_index=0) for rank in plan.ranks)
    workers = tuple(
        msgspec.structs.replace(worker, kind="cpu", device_index=0) for worker in plan.asynchronous
    )
    changed = msgspec.structs.replace(plan, ranks=ranks, asynchronous=workers)
    (out / "plan.json").write_bytes(encode_plan(changed))


def batches_of_workers(folder: PlanFolder, steps: int, seed: int = 0) -> list[Batch]:
    """Return total batches: a share for each worker."""
    return random_batches(plan_of_data(folder.plan), steps, seed)


def whole_batches(folder: PlanFolder, steps: int, seed: int = 0) -> list[Batch]:
    """Return total batches of small whole numbers."""
    rng = np.random.default_rng(seed)
    workers = len(folder.plan.asynchronous)
    return [
        {
            "ids": rng.integers(0, 10, 4 * workers),
            "x": rng.integers(-8, 8, (4 * workers, 4)).astype(np.float64),
        }
        for _ in range(steps)
    ]


def start_of(folder: PlanFolder) -> dict[str, np.ndarray]:
    """Return the variables' first values."""
    values = InitialValues(folder)
    return {variable.name: values.part(variable.name) for variable in folder.plan.variables}


def train_in_turn(folder: PlanFolder, batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the variables after one device has trained all workers' batches, one after the other."""
    return train_steps(folder, batches, [len(batches)] * len(folder.plan.asynchronous))


def train_steps(
    folder: PlanFolder,
    batches: Sequence[Mapping[str, np.ndarray]],
    steps: Sequence[int],
    behind: Sequence[int] | None = None,
    variables: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Return the variables after one device has trained so many steps of each worker, behind others."""
    plan = folder.plan
    reference = make_reference(plan, folder.path / plan.model)
    variables = variables or start_of(folder)
    first = behind or [0] * len(steps)
    for number, batch in enumerate(batches):
        for worker, share in enumerate(_shares(folder, batch)):
            if first[worker] <= number < steps[worker]:
                variables = reference.step(variables, share).variables
    return variables


def _shares(folder: PlanFolder, batch: Mapping[str, np.ndarray]) -> list[Batch]:
    workers = len(folder.plan.asynchronous)
    axes = {data_input.name: data_input.sample_axis for data_input in folder.plan.data_inputs}
    cut = {
        name: [batch[name]] * workers if axis is None else np.split(batch[name], workers, axis)
        for name, axis in axes.items()
    }
    return [{name: pieces[worker] for name, pieces in cut.items()} for worker in range(workers)]
