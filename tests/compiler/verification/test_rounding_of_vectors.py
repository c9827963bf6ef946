"""Where a whole vector's gradient is rounding, LAMB's step has a length and no direction."""

from pathlib import Path

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adam import LAMB
from partc.compiler.differentiation.updates.optimizers import Adam, Optimizer
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.compiler.verification.reference import make_reference
from partc.runtime.data.initial import InitialValues
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import Batch, Compiled, compile_step, random_batches, verified
from tests.checks.training_steps import EVERYTHING

# What all samples have in common is taken away: the gradient of `b` is zero in theory. But for a few elements
# it is so exactly, since weights and data are sums of few powers of two. The last
# element is shut off.
CENTRED = """
centred (float[8,64] x, float[64] t) => (float loss)
<float[64] b = {BIASES}, float[64] W = {WEIGHTS}, int64[1] samples = {0}> {
    h = Add (x, b)
    mean = ReduceMean (h, samples)
    centred = Sub (h, mean)
    y = Mul (centred, W)
    apart = Sub (y, t)
    sq = Mul (apart, apart)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""
CENTRED = CENTRED.replace("BIASES", ", ".join(["0.5"] * 64))
CENTRED = CENTRED.replace("WEIGHTS", ", ".join(["0.7"] * 3 + ["0.5"] * 60 + ["0"]))
RATE = 0.01
LENGTH = RATE * 0.5 * 8  # of LAMB's step: the rate times the length of b


# The first half of `b` counts as it is.
HALF_CENTRED = CENTRED.replace("> {", ", float[64] K = {KEPT}> {", 1).replace(
    "apart = Sub (y, t)", "kept = Mul (h, K) sum = Add (y, kept) apart = Sub (sum, t)"
)
HALF_CENTRED = HALF_CENTRED.replace("KEPT", ", ".join(["1"] * 32 + ["0"] * 32))


def compiled(optimizer: Optimizer, out: Path, text: str = CENTRED) -> Compiled:
    step = build_training_graph(parse(text), loss="loss", optimizer=optimizer, parameters=EVERYTHING)
    training = import_training_graph(step, GraphOptions(sample_axes={"x": 0, "t": None}))
    return compile_step(training, out, "1x2", "allreduce", "global")


def coarse_batches(plan: Compiled, seed: int, steps: int = 1) -> list[Batch]:
    batches = random_batches(plan.plan, steps, seed)
    coarse = [{name: (value * 8).round() / np.float32(8) for name, value in b.items()} for b in batches]
    for batch in coarse:
        batch["x"][:, -1] = batch["t"][-1] = 0
    return coarse


def deviations(plan: Compiled, batch: Batch) -> dict[str, np.ndarray]:
    reference = make_reference(plan.plan, plan.folder.path / "train.onnx")
    initial = InitialValues(plan.folder)
    start = {variable.name: initial.part(variable.name) for variable in plan.plan.variables}
    return dict(reference.rounding(start, batch).variables)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_a_step_that_falls_upon_other_elements_verifies_under_lamb(
    tmp_path: Path, weight_decay: float
) -> None:
    plan = compiled(LAMB(RATE, weight_decay=weight_decay), tmp_path)

    reports = [verified(plan, coarse_batches(plan, seed)) for seed in range(6)]

    assert all(report.passed for report in reports), [report.summary() for report in reports]
    if not weight_decay:  # else the test would pass without
        errors = [check.max_error for report in reports for check in report.variables if check.name == "b"]
        assert max(errors) > LENGTH / 2


def test_each_element_may_move_by_the_whole_length(tmp_path: Path) -> None:
    plan = compiled(LAMB(RATE, weight_decay=0.0), tmp_path)

    found = deviations(plan, coarse_batches(plan, seed=1)[0])

    assert found["b"][:-1].min() > LENGTH
    assert found["b"].max() < 8 * LENGTH
    assert found["b"][-1] == 0  # a sum of zeros
    assert found["b.mean"].max() < 1e-5  # no element of a mean of gradients moves another


def test_where_a_part_of_a_gradient_is_known_each_element_is_allowed_its_own_step(tmp_path: Path) -> None:
    plan = compiled(LAMB(RATE, weight_decay=0.0), tmp_path, HALF_CENTRED)

    found = deviations(plan, coarse_batches(plan, seed=1)[0])["b"]

    assert found[:32].max() < 0.01 * LENGTH
    assert found.max() < 0.1 * LENGTH


def test_elements_that_do_not_move_each_other_are_allowed_their_own_steps_alone(tmp_path: Path) -> None:
    plan = compiled(Adam(RATE), tmp_path)

    found = deviations(plan, coarse_batches(plan, seed=1)[0])

    assert found["b"][:-1].min() > RATE
    assert found["b"].max() < 5 * RATE  # the length of all is 8 times as much
