"""Trainings that go from plan to plan, synchronous and asynchronous, at random: no processes.

What is gone on with is held to what was written as whole arrays, and to a count of samples kept beside.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.output.deploy import write_forward_model
from partc.models.catalogue import build_model
from partc.runtime.asynchronous.servers.saving import pieces_of_servers
from partc.runtime.asynchronous.sessions.session import plan_of_data, servers_of
from partc.runtime.checkpoints.manifest import TrainingPosition, folder_of
from partc.runtime.checkpoints.resume import DataAsked, StartPoint, resume_from
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.checkpoints.write_checkpoint import CheckpointWriter, pieces_of_ranks
from partc.runtime.data.batches import samples_of_step
from partc.runtime.plan.boxes import take
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan
from tests.builders.plans.compiled_steps import compile_step
from tests.builders.plans.session_plans import compile_sessions
from tests.sampling import sampled

WAYS = (("1x1", "auto"), ("1x3", "allreduce"), ("1x2", "fsdp"), ("1x2", "ps"), ("1x2", "tensor=2"))
SESSIONS = ("1x2", "2x2")
LEGS = 5


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[PlanFolder]:
    """One model for other ranks, strategies and batches: of 4 samples for each replica or worker."""
    root = tmp_path_factory.mktemp("plans")
    forward = build_model("mlp", sizes=[6, 4, 2], batch=4)
    model = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.001))
    found = [
        compile_step(import_training_graph(model), root / f"way-{number}", *way, batch="per-replica").folder
        for number, way in enumerate(WAYS)
    ]
    return found + [
        compile_sessions(import_training_graph(model), root / f"sessions-{shape}", shape)
        for shape in SESSIONS
    ]


def data_plan(plan: Plan) -> Plan:
    return plan_of_data(plan) if plan.asynchronous else plan


def samples_per_step(plan: Plan) -> int:
    samples = samples_of_step(data_plan(plan))
    assert samples is not None
    return samples


def go_on(plan: Plan, begun: StartPoint, rng: np.random.Generator) -> TrainingPosition:
    """Return where a plan is after some more steps; asynchronous workers have done as many as they have."""
    if not plan.asynchronous:
        more = int(rng.integers(1, 6))
        step, batches, workers = begun.step + more, begun.batches + more, ()
    else:
        workers = tuple(steps + int(rng.integers(0, 6)) for steps in begun.workers)
        step, batches = sum(workers) // len(workers), begun.batches + max(workers) - begun.furthest
    return TrainingPosition(step, 7, batches, batches * samples_per_step(plan), "", workers)


def save(plan: Plan, checkpoints: Path, position: TrainingPosition, whole: dict[str, np.ndarray]) -> Path:
    """Let everybody who saves in such a plan write what it holds of these variables."""
    writers = pieces_of_servers(plan) if plan.asynchronous else pieces_of_ranks(plan)

    def read(rank: int) -> Callable[[str], np.ndarray]:
        here = {value: take(whole[piece.variable], piece.box) for value, piece in writers[rank]}
        return here.__getitem__

    alone = [CheckpointWriter(plan, rank, checkpoints, 3, writers, checkpoints.parent) for rank in writers]
    for writer, rank in zip(alone, writers, strict=True):
        writer.begin(read(rank), position)
    assert all(writer.finish(is_given_up=False) for writer in reversed(alone))
    return checkpoints / folder_of(position.step)


def drawn_variables(plan: Plan, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {v.name: (rng.normal(size=v.shape) * 100).astype(v.dtype) for v in plan.variables}


@pytest.mark.parametrize("seed", sampled(range(12), range(0, 12, 3)))
def test_variables_and_samples_go_from_plan_to_plan(
    plans: list[PlanFolder], tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    checkpoints = tmp_path / "kept"
    before, used = StartPoint(seed=7, workers=(0,) * 4), 0
    folder = plans[int(rng.integers(len(plans)))]
    begun = StartPoint(seed=7, workers=(0,) * len(folder.plan.asynchronous))
    for _ in range(LEGS):
        plan = folder.plan
        position, whole = go_on(plan, begun, rng), drawn_variables(plan, rng)
        if position.step <= before.step:
            continue
        save(plan, checkpoints, position, whole)
        used, before = position.batches * samples_per_step(plan), begun

        folder = plans[int(rng.integers(len(plans)))]
        begun = resume_from(data_plan(folder.plan), checkpoints, None, DataAsked(""), lambda text: None)

        assert (begun.step, begun.seed) == (position.step, 7)
        begins = begun.batches * samples_per_step(folder.plan)
        assert used <= begins < used + samples_per_step(folder.plan), (
            "all samples once, but for part of a batch"
        )
        if folder.plan.asynchronous:
            same = len(position.workers) == len(begun.workers) and begins == used
            assert begun.workers == (position.workers if same else (position.step,) * len(begun.workers))
        assert begun.checkpoint is not None
        assert_held_is(folder.plan, StoredValues(begun.checkpoint), whole)


def assert_held_is(plan: Plan, stored: StoredValues, whole: dict[str, np.ndarray]) -> None:
    """Hold what every rank would begin with to the whole variables."""
    stored.check(plan)
    held = servers_of(plan) if plan.asynchronous else plan.ranks
    for rank in held:
        for own in rank.pieces:
            np.testing.assert_array_equal(
                stored.part(own.variable, own.box), take(whole[own.variable], own.box)
            )


@pytest.mark.parametrize("seed", range(6))
def test_what_is_exported_computes_with_what_was_saved(
    plans: list[PlanFolder], tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    folder, other = (plans[int(number)] for number in rng.integers(len(plans), size=2))
    begun = StartPoint(seed=7, workers=(1,) * len(folder.plan.asynchronous))
    whole = drawn_variables(folder.plan, rng)
    saved = save(folder.plan, tmp_path / "kept", go_on(folder.plan, begun, rng), whole)

    write_forward_model(other, StoredValues(saved).whole(), tmp_path / "model.onnx")

    model = onnx.load(tmp_path / "model.onnx")
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    given = {value.name for value in model.graph.input}
    trained = {name for name in whole if name in weights}
    assert len(trained) == 4, "two layers' weights and biases, and no slots"
    assert not given & whole.keys()
    for name in trained:
        np.testing.assert_array_equal(weights[name], whole[name])
