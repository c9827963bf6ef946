"""Learning rates at given steps, against PyTorch's schedulers."""

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adam import AdamW
from partc.compiler.differentiation.updates.optimizers import SGD, Optimizer
from partc.compiler.differentiation.updates.schedules import (
    ConstantRate,
    CosineDecay,
    ExponentialDecay,
    LearningRateSchedule,
    StepDecay,
    Warmup,
)
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.runtime.errors import BadUsage
from tests.checks.optimizer_references import LINEAR, REFERENCES, batches, forward, step_of
from tests.checks.training_steps import EVERYTHING, facts_of, train

STEPS = 12
BIASED = "(double[batch,2] x) => (double total) { h = Mul (x, b) total = ReduceSum <keepdims = 0> (h) }"


def rates_of(options: UpdateOptions, rate: float = 0.5) -> np.ndarray:
    """Return the rates of twelve steps: SGD's changes under a gradient of 1."""
    from_one = [{"x": np.ones((1, 2))}]
    step = bias_step(SGD(rate), options)
    rates, variables = [], None
    for _ in range(STEPS):
        before = REFERENCES["start/b"] if variables is None else variables["b"]
        _, variables = train(step, from_one, variables)
        rates.append(before[0] - variables["b"][0])
    return np.array(rates)


def bias_step(optimizer: Optimizer, options: UpdateOptions) -> onnx.ModelProto:
    return build_training_graph(
        forward(BIASED), loss="total", optimizer=optimizer, update=options, parameters=EVERYTHING
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("step", UpdateOptions(schedule=StepDecay(3, 0.5))),
        ("exponential", UpdateOptions(schedule=ExponentialDecay(0.9))),
        ("cosine", UpdateOptions(schedule=CosineDecay(12, floor=0.1))),
        ("warmed-cosine", UpdateOptions(schedule=CosineDecay(8), warmup=Warmup(4, start=0.25))),
    ],
)
def test_rates_equal_pytorchs(name: str, options: UpdateOptions) -> None:
    np.testing.assert_allclose(rates_of(options), REFERENCES[f"rates/{name}"], rtol=1e-9, atol=1e-14)


def test_a_warm_up_alone_rises_and_stays() -> None:
    np.testing.assert_allclose(rates_of(UpdateOptions(warmup=Warmup(4)), 1.0), [0, 0.25, 0.5, 0.75] + [1] * 8)


def test_a_cosine_stays_at_its_floor() -> None:
    rates = rates_of(UpdateOptions(schedule=CosineDecay(4, floor=0.2)), 1.0)

    np.testing.assert_allclose(rates[4:], 0.2)


def test_a_constant_schedule_adds_nothing_to_the_graph() -> None:
    assert bias_step(SGD(), UpdateOptions(schedule=ConstantRate())) == bias_step(SGD(), UpdateOptions())


def test_one_counter_serves_the_schedule_and_the_optimizer() -> None:
    step = step_of(LINEAR, AdamW(), update=UpdateOptions(schedule=CosineDecay(9), ema=0.9))

    _, after = train(step, batches(LINEAR)[:3])

    counters = [name for name in facts_of(step)["state"] if after[name].dtype == np.int64]
    assert counters == ["step_count"]
    assert after["step_count"] == 3


def test_decoupled_decay_follows_the_schedule() -> None:
    step = step_of(
        LINEAR, AdamW(0.1, weight_decay=0.5), update=UpdateOptions(schedule=StepDecay(1, factor=0.5))
    )
    still = [{"x": np.zeros((4, 3)), "targets": np.zeros((4, 2))}] * 2

    _, after = train(step, still)

    np.testing.assert_allclose(after["W"], REFERENCES["start/W"] * (1 - 0.05) * (1 - 0.025), rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda: StepDecay(0), "schedule step, every"),
        (lambda: ExponentialDecay(0.0), "schedule exponential, factor"),
        (lambda: CosineDecay(5, floor=1.0), "schedule cosine, floor"),
        (lambda: Warmup(-1), "--warmup, steps"),
    ],
)
def test_schedules_that_mean_nothing_are_refused(make, at: str) -> None:
    with pytest.raises(BadUsage) as error:
        make()

    assert error.value.at == at


def test_a_fed_rate_follows_no_schedule() -> None:
    schedule: LearningRateSchedule = CosineDecay(5)
    with pytest.raises(BadUsage) as error:
        step_of(LINEAR, SGD("fed"), update=UpdateOptions(schedule=schedule))

    assert "as a number" in error.value.fix
