"""What ranks agree on after a step, and who keeps the others waiting."""

from pathlib import Path

import pytest

from partc.cost.strategy import MESH_STRATEGY_FORMAT, Strategy
from partc.runtime.jobs.barriers import _straggler
from partc.runtime.jobs.job import Notice, Progress, Straggler
from partc.runtime.jobs.runner import Runner
from tests.builders.plans.compiled_steps import compile_step, import_text
from tests.builders.plans.linear_plans import linear_all_reduce

LINEAR = """
step (double[12,3] x, double[12,2] y, double[3,2] W) => (double loss, double[3,2] W_next)
<double rate = {0.01}> {
    out = MatMul (x, W)
    error = Sub (out, y)
    square = Mul (error, error)
    loss = ReduceSum <keepdims = 0> (square)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, error)
    step = Mul (dW, rate)
    W_next = Sub (W, step)
}
"""


@pytest.mark.parametrize(
    ("most", "least", "found"),
    [(900, 20, Straggler(3, 0.02, 0.9)), (900, 750, None), (0, 0, None)],
    ids=["one does not wait", "all wait about alike", "nobody waits"],
)
def test_who_waits_least_keeps_others_waiting(most: int, least: int, found: Straggler | None) -> None:
    assert _straggler(most, least, 3) == found


SLOW = """
import os, time, numpy as np
def batches():
    for step in range(1, 100):
        if step > 5 and os.environ["PMI_RANK"] == "1":
            time.sleep(0.02)
        yield {"x": np.ones((12, 3)), "y": np.ones((12, 2))}
"""


@pytest.fixture
def slow_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return batches for which rank 1 takes 20 ms more from the sixth step on."""
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "slow:batches"


def test_a_straggler_is_named_within_twenty_steps(tmp_path: Path, slow_data: str) -> None:
    """The last step is always told."""
    told: list[Progress | Notice] = []

    Runner(linear_all_reduce(tmp_path / "out", 3)).train(slow_data, 25, on_progress=told.append)

    last = told[-1]
    assert isinstance(last, Progress)
    assert last.straggler is not None
    assert last.straggler.rank == 1
    assert last.straggler.others_waited > 0.5


@pytest.mark.parametrize("other", [0, 2])
def test_who_has_nothing_to_do_keeps_nobody_waiting(other: int, tmp_path: Path, slow_data: str) -> None:
    training = import_text(LINEAR, loss="loss", sample_axes={"x": 0, "y": 0})
    devices = (f"host0/cpu{other}", "host0/cpu1")
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", mesh={"data": 2}, devices=devices)
    plan = compile_step(training, tmp_path / "out", "1x3", strategy, "global").folder
    told: list[Progress | Notice] = []

    result = Runner(plan).train(slow_data, 25, on_progress=told.append)

    last = told[-1]
    assert isinstance(last, Progress)
    assert last.straggler is not None
    assert last.straggler.rank == 1
    assert result.waited.keys() == {other, 1}
    assert all(0 <= share <= 1 for share in result.waited.values())
