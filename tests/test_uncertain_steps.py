"""What rounding of gradients may lead to, and that verify allows no more than that."""

from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.training.build import build_training_graph
from partc.compiler.training.optimizers import SGD, Adam
from partc.compiler.verification.seen_gradients import SeenGradient, nudged
from partc.compiler.verification.uncertain_steps import Uncertainty
from partc.compiler.verification.verify import Data, VerifyReport, launch_in_process, verify
from partc.runtime.plan_folder import PlanFolder
from partc.runtime.program import Constant, PlanVariable
from partc.runtime.results import TrainingResult
from tests.compiled_steps import Compiled, compile_step, random_batches
from tests.foreign_steps import parse
from tests.training_steps import EVERYTHING

# A softmax over keys does not change where all keys' scores do: the gradient of `shift` is zero in theory.
ATTENTION = """
attend (float[16,32,4] x) => (float loss)
<float[4,4] Wq = {0.1, 0.7, -0.3, 0.2, 0.5, -0.6, 0.4, 0.9, -0.8, 0.3, 0.2, 0.1, 0.6, -0.2, 0.7, -0.4},
 float[4] shift = {0.3, 0.1, 0.2, 0.4}> {
    q = MatMul (x, Wq)
    k = Add (x, shift)
    kt = Transpose <perm = [0, 2, 1]> (k)
    scores = MatMul (q, kt)
    weights = Softmax <axis = -1> (scores)
    y = MatMul (weights, x)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def variable(name: str, role: str = "parameter", parameter: str | None = None) -> PlanVariable:
    return PlanVariable(name, "float32", (3,), Constant(0), role, parameter)  # type: ignore[arg-type]


def uncertainty_of(gradient: np.ndarray, step: np.ndarray, error: float = 0.25) -> Uncertainty:
    found = Uncertainty([variable("W"), variable("m", "slot", "W"), variable("n", "other")])
    before = dict.fromkeys(("W", "m", "n"), array(0, 0, 0))
    found.add_step(
        before, dict.fromkeys(before, step), {"W": SeenGradient(gradient, np.abs(gradient), error)}
    )
    return found


def test_a_gradient_of_rounding_may_turn_the_step() -> None:
    found = uncertainty_of(array(1, 0.25, -0.125), array(8, 1, 2))

    np.testing.assert_allclose(found.elements["W"], [8 * 0.25, 2 * 2, 2 * 2])


def test_rounding_may_have_been_larger_and_so_may_the_step_but_no_larger_than_others() -> None:
    gradient = array(1, 0.125, 0)

    longer = uncertainty_of(gradient, array(8, 1, 0))
    longest = uncertainty_of(gradient, array(8, 5, 0))

    np.testing.assert_allclose(longer.elements["W"], [2, 2 * 2, 0])
    np.testing.assert_allclose(longest.elements["W"], [2, 2 * 8, 0])


def test_gradients_are_summed_until_the_parameter_moves() -> None:
    found = Uncertainty([variable("W")])
    for step, gradient in enumerate((array(1, 1, 1), array(1, -1, 1), array(1, 1, 1))):
        values = [{"W": array(moved, moved, moved)} for moved in (step // 2, (step + 1) // 2)]
        found.add_step(*values, {"W": SeenGradient(gradient, np.abs(gradient), 0.25)})

    np.testing.assert_allclose(found.elements["W"], [0.25, 2, 0.25])


def test_a_slot_is_as_uncertain_as_its_parameter_and_others_are_certain() -> None:
    found = uncertainty_of(array(1, 1, 0), array(1, 2, 3))

    np.testing.assert_array_equal(found.elements["m"], found.elements["W"])
    assert "n" not in found.elements


def test_where_no_replica_has_a_gradient_nothing_is_uncertain() -> None:
    found = Uncertainty([variable("W")])
    seen = SeenGradient(array(1, 0, 0), array(1, 0, 1e-3), 0.25)
    found.add_step({"W": array(0, 0, 0)}, {"W": array(1, 2, 3)}, {"W": seen})

    assert found.elements["W"].tolist()[1:] == [0, 6]  # how large rounding may be there, nothing tells


def test_steps_are_summed() -> None:
    found = Uncertainty([variable("W")])
    for start in (0, 1):
        values = [{"W": array(start + k, 0, 0)} for k in (0, 1)]
        found.add_step(*values, {"W": SeenGradient(array(0, 1, 1), array(1, 1, 1), 0.25)})

    assert found.elements["W"][0] == 4


def test_slices_are_summed_by_id_and_leave_other_rows_certain() -> None:
    found = Uncertainty([variable("W")])
    seen = SeenGradient.of_slices(np.array([2, 0, 2]), array(1, 1, -1), 0.25)
    found.add_step({"W": array(0, 0, 0)}, {"W": array(1, 1, 1)}, {"W": seen})

    np.testing.assert_allclose(found.elements["W"], [0.25, 0, 2])


def test_an_overflow_leaves_nothing_uncertain_behind() -> None:
    found = Uncertainty([variable("W")])
    for gradient, moved in ((array(np.inf, 1, np.nan), 0), (array(1, 0.5, 1), 1)):
        values = [{"W": array(0, 0, 0)}, {"W": array(moved, moved, moved)}]
        found.add_step(*values, {"W": SeenGradient(gradient, np.abs(gradient), 0.25)})

    np.testing.assert_allclose(found.elements["W"], [0.25, 0.5, 0.25])


def test_the_last_bits_are_nudged() -> None:
    values = {"W": np.linspace(1, 2, 64, dtype=np.float32), "n": np.arange(3), "scale": np.array(8.0)}

    changed = nudged(values)

    moved = changed["W"] - values["W"]
    assert 0 < np.abs(moved).max() <= 2 * np.finfo(np.float32).eps * 2
    assert changed["W"].dtype == np.float32
    np.testing.assert_array_equal(changed["n"], values["n"])
    assert isinstance(changed["scale"], np.ndarray)


def launch_reordered(folder: PlanFolder, data: Data, steps: int, seed: int) -> TrainingResult:
    """Train on the same samples, each replica's in the opposite order: its sums are rounded otherwise."""
    assert not isinstance(data, str | Path)
    shares = [np.split(batch["x"], folder.plan.replicas) for batch in data]
    return launch_in_process(
        folder, [{"x": np.concatenate([share[::-1] for share in step])} for step in shares], steps, seed
    )


def reordered(compiled: Compiled) -> VerifyReport:
    batches = random_batches(compiled.plan, 3)
    return verify(compiled.folder, steps=3, data=batches, launcher=launch_reordered)


@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_a_parameter_without_effect_verifies_under_adam(tmp_path: Path, batch: str) -> None:
    step = build_training_graph(parse(ATTENTION), loss="loss", optimizer=Adam(0.01), parameters=EVERYTHING)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", batch)

    report = reordered(compiled)

    (shift,) = [check for check in report.variables if check.name == "shift"]
    assert report.passed, report.variables
    assert 1 <= shift.excused <= 4
    assert sum(check.excused for check in report.variables if check.name == "Wq") == 0
    assert shift.max_error > 1e-2 * shift.max_change  # else the test would pass without


def launch_half(folder: PlanFolder, data: Data, steps: int, seed: int) -> TrainingResult:
    """Train every replica on the first one's samples."""
    assert not isinstance(data, str | Path)
    shares = [np.split(batch["x"], folder.plan.replicas)[0] for batch in data]
    batches = [{"x": np.concatenate([share] * folder.plan.replicas)} for share in shares]
    return launch_in_process(folder, batches, steps, seed)


def test_other_samples_are_no_rounding(tmp_path: Path) -> None:
    step = build_training_graph(parse(ATTENTION), loss="loss", optimizer=Adam(0.01), parameters=EVERYTHING)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", "per-replica")

    batches = random_batches(compiled.plan, 3)
    report = verify(compiled.folder, steps=3, data=batches, launcher=launch_half)

    assert {check.name: check.verdict for check in report.variables}["Wq"] == "differs"


def test_gradient_descent_is_allowed_no_more_than_rounding(tmp_path: Path) -> None:
    step = build_training_graph(parse(ATTENTION), loss="loss", optimizer=SGD(0.01), parameters=EVERYTHING)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", "per-replica")

    report = reordered(compiled)

    assert report.passed
    assert all(check.limit < 1e-6 for check in report.variables), report.variables
