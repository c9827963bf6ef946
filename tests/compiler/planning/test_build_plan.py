"""Sums among all workers at once, or level by level: what is chosen is the quicker in the simulated step."""

from pathlib import Path

import pytest

from partc.compiler.planning import build_plan
from tests.builders.plans.compiled_steps import compile_step, import_text

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


@pytest.mark.parametrize("cluster", ["2x2", "2x4", "3x2"])
@pytest.mark.parametrize("size", [16, 512, 2048, 8192, 65536])
def test_the_way_of_a_sum_is_the_quicker_one(
    cluster: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated_s(name: str, flat_bytes: int | None) -> float:
        with monkeypatch.context() as patch:
            if flat_bytes is not None:
                patch.setattr(build_plan, "flat_sum_bytes", lambda cluster: flat_bytes)
            training = import_text(STEP.replace("SIZE", str(size)), loss="loss", sample_axes={"x": 0})
            compiled = compile_step(training, tmp_path / name, cluster, "allreduce", "global")
        kinds = {getattr(instruction, "group", "") for instruction in compiled.plan.instructions}
        assert flat_bytes is None or ("leaders" in kinds) == (flat_bytes == 0)
        return compiled.plan.predicted_step_s

    chosen, flat, levels = (simulated_s(str(n), n) for n in (None, 1 << 30, 0))

    assert min(flat, levels) != max(flat, levels)
    assert chosen <= 1.02 * min(flat, levels)
