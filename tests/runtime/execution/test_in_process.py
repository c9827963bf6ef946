from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.data.initial import InitialValues
from partc.runtime.errors import BadData, Diverged
from partc.runtime.execution.in_process import drive_in_lockstep, train_in_process
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Start
from tests.builders.plans.linear_plans import (
    linear_all_reduce,
    linear_batches,
    linear_servers,
    linear_trained,
)
from tests.builders.plans.row_plans import rows_there_and_back, table_batches, table_on_servers, table_trained


def initial(folder: Path, name: str) -> np.ndarray:
    return InitialValues(read_plan_folder(folder)).part(name)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_all_reduced_gradients_train_as_one_device(tmp_path: Path, replicas: int) -> None:
    folder = linear_all_reduce(tmp_path / "out", replicas)
    batches = linear_batches(replicas, steps=4)

    result = train_in_process(folder, batches)

    expected, losses = linear_trained(initial(folder, "W"), batches)
    np.testing.assert_allclose(result.variables["W"], expected, rtol=1e-12)
    np.testing.assert_allclose([float(o["loss"]) for o in result.outputs], losses, rtol=1e-12)
    assert result.disagreeing == ()


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
def test_servers_train_as_one_device(tmp_path: Path, merged: bool, scattered: bool) -> None:
    folder = linear_servers(tmp_path / "out", merged=merged, scattered=scattered)
    batches = linear_batches(2, steps=4)

    result = train_in_process(folder, batches, read_after=(2,))

    expected, losses = linear_trained(initial(folder, "W"), batches)
    np.testing.assert_allclose(result.variables["W"], expected, rtol=1e-12)
    np.testing.assert_allclose([float(o["loss"]) for o in result.outputs], losses, rtol=1e-12)
    halfway, _ = linear_trained(initial(folder, "W"), batches[:2])
    np.testing.assert_allclose(result.variables_after[2]["W"], halfway, rtol=1e-12)


@pytest.mark.parametrize("merged", [True, False])
def test_a_table_on_servers_trains_as_one_device(tmp_path: Path, merged: bool) -> None:
    folder = table_on_servers(tmp_path / "out", merged=merged)
    batches = table_batches(steps=4)

    result = train_in_process(folder, batches)

    expected = table_trained(initial(folder, "E"), batches)
    np.testing.assert_allclose(result.variables["E"], expected, rtol=1e-12)


@pytest.mark.parametrize("merged", [True, False])
def test_gathered_rows_come_back_where_they_came_from(tmp_path: Path, merged: bool) -> None:
    folder = rows_there_and_back(tmp_path / "out", merged=merged)
    (batch,) = table_batches(steps=1)

    outputs = train_in_process(folder, [batch]).outputs[0]

    np.testing.assert_array_equal(outputs["back"], batch["t"])
    np.testing.assert_array_equal(outputs["every_t"], batch["t"])
    np.testing.assert_array_equal(outputs["n"], [[5, 5], [5, 5]])


def test_given_initial_values_replace_the_plans(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    batches = linear_batches(2, steps=2)
    W = np.ones((3, 2))

    result = train_in_process(folder, batches, {"W": W})

    np.testing.assert_allclose(result.variables["W"], linear_trained(W, batches)[0], rtol=1e-12)
    np.testing.assert_array_equal(W, np.ones((3, 2)))


def test_a_loss_that_is_not_a_number_stops_with_step_and_rank(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    batches = linear_batches(2, steps=3)
    batches[1]["x"][4, 0] = np.nan

    with pytest.raises(Diverged, match=r"nan in step 2\n  at:  rank 1 .*\n  fix: lower the learning rate"):
        train_in_process(folder, batches)

    result = train_in_process(folder, batches, stop_when_diverged=False)
    assert len(result.outputs) == 3


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    folder = table_on_servers(tmp_path / "out", merged=True)

    with pytest.raises(BadData, match="multiple of 2"):
        train_in_process(folder, table_batches(steps=1, samples=9))


def test_wrong_data_is_named(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    (batch,) = linear_batches(2, steps=1)

    with pytest.raises(BadData, match="no data for input 'y'"):
        train_in_process(folder, [{"x": batch["x"]}])
    with pytest.raises(BadData, match="data for 'z'"):
        train_in_process(folder, [batch | {"z": batch["x"]}])
    with pytest.raises(BadData, match=r"float32.*\n.*'x'\n  fix: convert it"):
        train_in_process(folder, [batch | {"x": batch["x"].astype(np.float32)}])
    with pytest.raises(BadData, match=r"shaped \[8, 3\]"):
        train_in_process(folder, [batch | {"x": batch["x"][:4]}])


SUM = Start(0, "all_reduce", "workers", "worker", "worker", ("dW",), ("dW",), label="sum of dW")


def waiting() -> Iterator[Start]:
    for _ in range(10):
        yield SUM
    raise AssertionError("it waits without end")


def test_a_rank_that_fails_ends_those_that_wait_for_it_with_its_error() -> None:
    def failing() -> Iterator[Start]:
        yield SUM
        raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row") as failure:
        drive_in_lockstep({0: waiting(), 1: failing(), 2: waiting()})

    assert failure.value.__notes__ == ["raised by rank 1 of 3"]


def test_ranks_that_wait_for_one_that_has_finished_are_told() -> None:
    with pytest.raises(AssertionError, match=r"deadlock: .*\{0: 'sum of dW', 2: 'sum of dW'\}"):
        drive_in_lockstep({0: waiting(), 1: iter(()), 2: waiting()})
