import numpy as np
import pytest

from partc.compiler.verification.compare_changes import Trained, compare_changes, compare_losses
from partc.runtime.program import Constant, PlanVariable


def trained(
    start: object, end: object, reference: object, dtype: str = "float64", name: str = "W"
) -> Trained:
    arrays = [np.asarray(value, dtype) for value in (start, end, reference)]
    variable = PlanVariable(name, dtype, arrays[0].shape, Constant(0), "parameter")
    return Trained(variable, *arrays)


def verdict(entry: Trained, steps: int = 1, rtol: float | None = None) -> str:
    (check,) = compare_changes({"W": entry}, steps, rtol)
    return check.verdict


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ([1.1, 2.0], "equal"),
        ([1.1 + 1e-11, 2.0], "equal"),
        ([1.1 + 1e-8, 2.0], "differs"),
        ([1.2, 2.0], "differs"),
        ([1.0, 2.0], "did not change"),
        ([np.nan, 2.0], "not finite"),
    ],
)
def test_changes_are_compared_not_values(end: list[float], expected: str) -> None:
    assert verdict(trained([1.0, 2.0], end, [1.1, 2.0])) == expected


def test_the_tolerance_is_relative_to_the_change() -> None:
    # 1e-6 is within 1e-9 of the value, but not of the change.
    assert verdict(trained([1e6], [1e6 + 2e-4], [1e6 + 1e-4])) == "differs"


def test_rounding_of_the_stored_value_is_allowed_once_a_step() -> None:
    entry = trained([100.0], [100.00001], [100.0], "float32")

    assert verdict(entry, steps=1) == "equal"
    assert verdict(trained([100.0], [100.0005], [100.0], "float32"), steps=1) == "differs"


def test_a_change_that_is_zero_in_theory_is_measured_by_the_others() -> None:
    noise = trained([0.0], [3e-8], [-2e-8], "float32", "bias")
    weight = trained([1.0], [2.0], [2.0], "float32", "weight")

    checks = compare_changes({"bias": noise, "weight": weight}, steps=1, rtol=None)

    assert [check.verdict for check in checks] == ["equal", "equal"]
    assert verdict(noise) != "equal"


def test_integers_must_be_equal() -> None:
    assert verdict(trained([0], [3], [3], "int64")) == "equal"
    assert verdict(trained([2**60], [2**60 + 2], [2**60 + 1], "int64")) == "differs"
    assert verdict(trained([0], [0], [3], "int64")) == "did not change"


def equal_losses(ours: list[float], reference: list[float]) -> list[bool]:
    steps = ([{"loss": np.float32(value)} for value in values] for values in (ours, reference))
    return [check.is_equal for check in compare_losses("loss", *steps, None)]


def test_a_loss_near_zero_is_as_precise_as_those_before() -> None:
    assert equal_losses([1, 1e-5], [1, 2e-5]) == [True, True]
    assert equal_losses([1, 1e-3], [1, 2e-3]) == [True, False]


def test_a_loss_is_not_excused_by_larger_ones_to_come() -> None:
    assert equal_losses([1, 1000], [1.01, 1000]) == [False, True]


def test_a_loss_that_is_no_number_differs() -> None:
    assert equal_losses([1, np.nan], [1, 1]) == [True, False]
    assert equal_losses([1, np.nan], [1, np.nan]) == [True, False]
