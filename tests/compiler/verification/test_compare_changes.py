"""What one step is allowed to be off by, and no more."""

import numpy as np
import pytest

from partc.compiler.verification.compare_changes import (
    VariableCheck,
    VariableStates,
    compare_changes,
    compare_losses,
    worst_of_steps,
)
from partc.compiler.verification.rounding import RoundingError


def trained(start: object, end: object, reference: object, dtype: str = "float64") -> VariableStates:
    return VariableStates(*(np.asarray(value, dtype) for value in (start, end, reference)))


def check(
    entry: VariableStates, rounding: RoundingError | None = None, rtol: float | None = None
) -> VariableCheck:
    (found,) = compare_changes({"W": entry}, 1, rtol, lambda _: rounding or RoundingError())
    return found


def verdict(entry: VariableStates, rounding: RoundingError | None = None) -> str:
    return check(entry, rounding).verdict


def test_below_the_smallest_normal_number_bits_are_missing() -> None:
    assert verdict(trained([0.0], [1.2e-43], [1.3e-43], "float32")) == "equal"
    assert verdict(trained([0.0], [1.2e-37], [1.3e-37], "float32")) == "differs"


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


def test_each_elements_stored_value_may_be_rounded() -> None:
    assert verdict(trained([100.0], [100.00001], [100.0], "float32")) == "equal"
    assert verdict(trained([100.0], [100.0001], [100.0], "float32")) == "differs"
    assert verdict(trained([100.0, 0.0], [100.0, 1e-5], [100.0, 0.0], "float32")) == "differs"


def test_an_element_may_be_off_by_what_rounding_makes_of_it_and_is_counted() -> None:
    entry = trained([0.0, 0.0], [1.0, 0.5], [1.0, -0.5])
    of_second, of_first = (RoundingError({"W": np.array(pair)}) for pair in ([0.0, 1.0], [1.0, 0.0]))

    assert (check(entry, of_second).verdict, check(entry, of_second).within_rounding) == ("equal", 1)
    assert verdict(entry, of_first) == "differs"


def test_rounding_is_measured_only_where_something_is_off_without() -> None:
    def fail(_: bool) -> RoundingError:
        raise AssertionError("measured")

    assert compare_changes({"W": trained([0.0], [1.0], [1.0])}, 1, None, fail)[0].verdict == "equal"


@pytest.mark.parametrize(
    ("deviations", "verdict", "asked"),
    [
        ({False: 1.0}, "equal", [False]),
        ({False: 0.1, True: 1.0}, "equal", [False, True]),
        ({False: 0.1, True: 0.4}, "differs", [False, True]),
    ],
)
def test_rounding_is_measured_thoroughly_only_where_something_is_off_still(
    deviations: dict[bool, float], verdict: str, asked: list[bool]
) -> None:
    measured = []

    def measure(thoroughly: bool) -> RoundingError:
        measured.append(thoroughly)
        return RoundingError({"W": np.array(deviations[thoroughly])}, deviations[thoroughly])

    (found,) = compare_changes({"W": trained([0.0], [1.0], [0.5])}, 1, None, measure)
    assert (found.verdict, measured) == (verdict, asked)
    measured.clear()
    loss = compare_losses(1, np.array(1.0), np.array(0.5), None, measure)
    assert (loss.is_equal, measured) == (verdict == "equal", asked)


def test_other_rows_of_a_table_may_not_change() -> None:
    entry = VariableStates(*(np.array([0.0, value]) for value in (0.0, 1.0, 1.0)), others_changed=1)

    assert verdict(entry, RoundingError({"W": np.ones(2)})) == "other rows changed"


def test_integers_must_be_equal() -> None:
    assert verdict(trained([0], [3], [3], "int64")) == "equal"
    assert verdict(trained([2**60], [2**60 + 2], [2**60 + 1], "int64")) == "differs"
    assert verdict(trained([0], [0], [3], "int64")) == "did not change"


def test_the_first_step_that_fails_is_told_and_excused_elements_are_summed() -> None:
    fine, near = VariableCheck("W", 1, 1, 0.1, 1, "equal", 1), VariableCheck("W", 2, 1, 0.9, 1, "equal", 2)
    wrong, worse = VariableCheck("W", 3, 1, 2, 1, "differs"), VariableCheck("W", 4, 1, 9, 1, "differs")

    assert worst_of_steps([fine, near])[0] == VariableCheck("W", 2, 1, 0.9, 1, "equal", 3)
    assert worst_of_steps([fine, near, wrong, worse])[0].step == 3


def is_equal(loss: float, reference: float, noise: float = 0.0) -> bool:
    arrays = (np.float32(loss), np.float32(reference))
    return compare_losses(1, *map(np.asarray, arrays), None, lambda _: RoundingError(loss=noise)).is_equal


def test_a_loss_is_compared_to_itself_and_to_what_rounding_makes_of_it() -> None:
    assert is_equal(1.00001, 1.0)
    assert not is_equal(1.001, 1.0)
    assert not is_equal(2e-5, 1e-5)
    assert is_equal(2e-5, 1e-5, noise=1e-4)


def test_a_loss_that_is_no_number_differs_unless_both_are_none() -> None:
    assert not is_equal(np.nan, 1)
    assert not is_equal(1, np.nan)
    assert not is_equal(1, np.inf)
    assert not is_equal(np.inf, np.nan)
    assert not is_equal(np.inf, -np.inf)
    assert is_equal(np.nan, np.nan)
    assert is_equal(np.inf, np.inf)
