"""A worker that is alone along a collective's axes sends nothing."""

from pathlib import Path

import pytest

from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.whole_steps.test_distributed_numerics import imported


@pytest.mark.parametrize("batch", ["global", "per-replica"])
@pytest.mark.parametrize("strategy", ["auto", "allreduce", "fsdp", "workers=1"])
@pytest.mark.parametrize("model", ["lm, adagrad, clipped", "mlp, momentum, clipped"])
def test_one_device_sends_itself_nothing(model: str, strategy: str, batch: str, tmp_path: Path) -> None:
    done = compile_step(imported(model), tmp_path / "out", "1x1", strategy, batch)

    assert not any(isinstance(each, Start) for each in done.plan.instructions)
    assert_trains_as_one_device(done, random_batches(done.plan, 3, high=7))
