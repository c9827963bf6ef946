"""Sums among workers of several hosts, flat or level by level: what is chosen is the quicker, simulated."""

from itertools import product
from pathlib import Path

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.network import sums
from partc.models.catalogue import build_model
from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_steps import compile_step, import_text
from tests.sampling import sampled

# Two sums of SIZE elements, the second of what the first makes.
STEP = """
step (float[24,SIZE] x, float[SIZE] w) => (float loss, float[SIZE] w_next)
<float lr = {0.1}, int64[1] rows = {0}> {
    mean = ReduceMean <keepdims = 0> (x, rows)
    centred = Sub (x, mean)
    squares = Mul (centred, centred)
    variance = ReduceMean <keepdims = 0> (squares, rows)
    loss = ReduceMean <keepdims = 0> (variance)
    change = Mul (variance, lr)
    w_next = Sub (w, change)
}
"""


def ways_of(
    model: str | onnx.ModelProto, cluster: str, strategy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float, float]:
    """Return the simulated seconds of the plan as it is, with all sums flat, and with all by levels."""

    def simulated_s(name: str, by_levels: bool | None) -> float:
        with monkeypatch.context() as patch:
            if by_levels is not None:
                patch.setattr(sums, "has_levels", lambda *asked: by_levels)
                patch.setattr(sums, "is_sooner_by_levels", lambda *asked: by_levels)
            training = (
                import_text(model, loss="loss", sample_axes={"x": 0})
                if isinstance(model, str)
                else import_training_graph(model)
            )
            plan = compile_step(training, folder / name, cluster, strategy, "global").plan
        go_by_levels = any(i.by_levels for i in plan.instructions if isinstance(i, Start))
        assert by_levels is None or by_levels == go_by_levels
        return plan.predicted_step_s

    chosen, flat, levels = (simulated_s(str(by_levels), by_levels) for by_levels in (None, False, True))
    return chosen, flat, levels


@pytest.mark.parametrize(
    ("size", "cluster"),
    sampled(product((16, 8192, 120_000, 140_000, 1_000_000), ("2x2", "2x4", "3x2", "3+1")), range(0, 20, 3)),
)
def test_the_way_of_a_sum_of_all_workers_is_the_quicker_one(
    cluster: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = STEP.replace("SIZE", str(size))

    chosen, flat, levels = ways_of(step, cluster, "allreduce", tmp_path, monkeypatch)

    assert min(flat, levels) != max(flat, levels)
    assert chosen <= 1.02 * min(flat, levels)


WAYS = (
    ("2x4", "data=4,tensor=2"),
    ("2x4", "data=2,tensor=4"),
    ("2x4", "tensor=8"),
    ("2x2", "data=4,microbatches=2"),
    ("3+1", "data=4,microbatches=2"),
)


@pytest.mark.parametrize(
    ("cluster", "strategy", "width"),
    sampled([(*way, width) for way, width in product(WAYS, (64, 384, 1024))], range(0, 15, 2)),
)
def test_the_way_of_a_sum_along_an_axis_is_the_quicker_one(
    width: int, cluster: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = build_model("mlp", sizes=[256, width, width, 64], batch=48)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))

    chosen, flat, levels = ways_of(step, cluster, strategy, tmp_path, monkeypatch)

    assert chosen <= 1.02 * min(flat, levels)


def test_sums_within_a_host_or_of_one_worker_of_each_stay_flat(tmp_path: Path) -> None:
    forward = build_model("mlp", sizes=[256, 1024, 1024, 64], batch=48)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))

    plan = compile_step(import_training_graph(step), tmp_path, "2x2", "data=2,tensor=2", "global").plan

    sums = [i for i in plan.instructions if isinstance(i, Start)]
    assert {start.kind for start in sums} == {"all_reduce"}
    assert {start.group for start in sums} == {"worker.data", "worker.tensor"}
    assert max(start.payload_bytes for start in sums) > 1 << 20
