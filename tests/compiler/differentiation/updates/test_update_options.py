"""Parameter groups, clipping, accumulation over micro-batches and moving averages, in plain onnxruntime."""

from dataclasses import replace

import numpy as np
import pytest

from partc.compiler.differentiation.updates.adam import LAMB, Adam, AdamW
from partc.compiler.differentiation.updates.clipping import Clipping
from partc.compiler.differentiation.updates.optimizers import OPTIMIZERS, SGD, Adagrad, Momentum, Optimizer
from partc.compiler.differentiation.updates.schedules import StepDecay
from partc.compiler.differentiation.updates.update_options import ParameterGroup, UpdateOptions
from partc.runtime.errors import BadUsage
from tests.checks.optimizer_references import (
    LINEAR,
    LOOKUP,
    REFERENCES,
    STEPS,
    assert_equals_reference,
    batches,
    step_of,
)
from tests.checks.training_steps import Arrays, train

# ---------------------------------------------------------------- groups


def test_groups_and_clipping_by_value_equal_pytorchs() -> None:
    options = UpdateOptions(
        clipping=Clipping(value=0.3), groups=(ParameterGroup(("bias", "b*"), lr=0.05, weight_decay=0.0),)
    )

    _, after = train(step_of(LINEAR, AdamW(0.1, weight_decay=0.2), update=options), batches(LINEAR))

    assert_equals_reference("groups", after)


def test_the_first_group_that_fits_counts() -> None:
    groups = (ParameterGroup(("b",), lr=0.0), ParameterGroup(("*",), lr=0.1))

    _, after = train(step_of(LINEAR, SGD(5.0), update=UpdateOptions(groups=groups)), batches(LINEAR)[:1])

    _, expected = train(step_of(LINEAR, SGD(0.1)), batches(LINEAR)[:1])
    np.testing.assert_array_equal(after["b"], REFERENCES["start/b"])
    np.testing.assert_allclose(after["W"], expected["W"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("text", [LINEAR, LOOKUP], ids=["dense", "sparse"])
def test_a_group_with_a_rate_of_0_keeps_its_values(text: str, name: str) -> None:
    held = "W" if text == LINEAR else "E"
    optimizer = replace(OPTIMIZERS[name], lr=0.1, weight_decay=0.2)  # type: ignore[type-var]
    update = UpdateOptions(schedule=StepDecay(1, 0.5), groups=(ParameterGroup((held,), lr=0.0),))

    _, after = train(step_of(text, optimizer, update=update), batches(text))

    np.testing.assert_array_equal(after[held], REFERENCES[f"start/{held}"])
    assert text == LOOKUP or (after["b"] != REFERENCES["start/b"]).all()


def test_a_group_without_parameters_is_refused() -> None:
    options = UpdateOptions(groups=(ParameterGroup(("*.bias", "*norm*")),))

    with pytest.raises(BadUsage) as error:
        step_of(LINEAR, SGD(), update=options)

    assert "'*.bias,*norm*'" in error.value.what
    assert "'W', 'b'" in error.value.fix


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize("text", [LINEAR, LOOKUP], ids=["dense", "sparse"])
@pytest.mark.parametrize("limit", [0.01, 100.0])
def test_clipping_by_norm_scales_each_gradient_alone(text: str, limit: float) -> None:
    (_, free), (_, clipped) = (
        train(step_of(text, SGD(1.0), update=UpdateOptions(clipping=clipping)), batches(text)[:1])
        for clipping in (Clipping(), Clipping(norm=limit))
    )

    for name, value in free.items():
        gradient = REFERENCES[f"start/{name}"] - value
        scale = limit / max(limit, np.linalg.norm(gradient))
        np.testing.assert_allclose(
            clipped[name], REFERENCES[f"start/{name}"] - scale * gradient, rtol=1e-12, atol=1e-14
        )


# ---------------------------------------------------------------- accumulation


def joined(parts: list[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1, 0.1), Momentum(0.1), Adagrad(0.1), AdamW(0.1), LAMB(0.1)],
    ids=lambda optimizer: type(optimizer).__name__,
)
@pytest.mark.parametrize("text", [LINEAR, LOOKUP], ids=["dense", "sparse"])
def test_k_micro_batches_equal_one_batch_k_times_as_long(text: str, optimizer: Optimizer) -> None:
    parts = batches(text)[:4]
    schedule, clipping = StepDecay(1, 0.5), Clipping(global_norm=0.5)
    whole = UpdateOptions(clipping=clipping, schedule=schedule, ema=0.9)
    in_parts = UpdateOptions(clipping=clipping, schedule=schedule, ema=0.9, accumulate=2)

    _, after = train(step_of(text, optimizer, update=in_parts), parts)
    _, expected = train(step_of(text, optimizer, update=whole), [joined(parts[:2]), joined(parts[2:])])

    for name, value in expected.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


def test_nothing_moves_between_updates_but_the_accumulators() -> None:
    step = step_of(LINEAR, AdamW(0.1), update=UpdateOptions(accumulate=3, ema=0.5))

    _, after_two = train(step, batches(LINEAR)[:2])
    _, after_three = train(step, batches(LINEAR)[:3])

    np.testing.assert_array_equal(after_two["W"], REFERENCES["start/W"])
    assert not after_two["W.mean"].any()
    assert after_two["W.accumulated"].any()
    assert (after_two["micro_step"], after_two["step_count"]) == (2, 0)
    assert not after_three["W.accumulated"].any()
    assert (after_three["micro_step"], after_three["step_count"]) == (0, 1)


def test_a_lazy_optimizer_does_not_accumulate() -> None:
    with pytest.raises(BadUsage) as error:
        step_of(LOOKUP, Adam(lazy=True), update=UpdateOptions(accumulate=2))

    assert "leave lazy out" in error.value.fix


# ---------------------------------------------------------------- averages


def test_moving_averages_equal_pytorchs() -> None:
    step = step_of(LINEAR, SGD(0.1), update=UpdateOptions(ema=0.7))

    _, after = train(step, batches(LINEAR))

    assert_equals_reference("averaged", {name: after[f"{name}.average"] for name in ("W", "b")})


def test_a_sparse_tables_average_covers_all_its_rows() -> None:
    step = step_of(LOOKUP, SGD(0.1), update=UpdateOptions(ema=0.7))

    tables = [train(step, batches(LOOKUP)[:steps])[1]["E"] for steps in range(1, STEPS + 1)]
    _, after = train(step, batches(LOOKUP))

    average = tables[0]
    for table in tables[1:]:
        average = 0.7 * average + 0.3 * table
    np.testing.assert_allclose(after["E.average"], average, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "at", "fix"),
    [
        (lambda: UpdateOptions(accumulate=0), "--accumulate", "whole number of at least 1"),
        (lambda: UpdateOptions(accumulate=1.5), "--accumulate", "whole number"),  # type: ignore[arg-type]
        (lambda: UpdateOptions(ema=1.0), "--ema", "from 0 to below 1"),
        (lambda: ParameterGroup(("a*", "b"), lr=-0.1), "--group a*,b", "at least 0"),
        (lambda: UpdateOptions(accumulate=10**30), "--accumulate", "64 bits"),
        (lambda: UpdateOptions(ema=1 - 1e-12), "--ema", "to 0.99999994"),
        (lambda: Clipping(norm=1e-50), "--clip-norm", "from 1.4"),
        (lambda: Clipping(value=0.0), "--clip-value", "positive"),
        (lambda: Clipping(norm=-1.0), "--clip-norm", "positive"),
        (lambda: Clipping(global_norm=float("inf")), "--clip-global-norm", "positive"),
    ],
)
def test_options_that_mean_nothing_are_refused(make, at: str, fix: str) -> None:
    with pytest.raises(BadUsage) as error:
        make()

    assert error.value.at == at
    assert fix in error.value.fix
