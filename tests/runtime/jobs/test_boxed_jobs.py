"""Daemons that keep boxes of a variable, two ranks a replica."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.compiler.verification.verify import launch_daemons, verify
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.errors import CopiesDiffer
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.execution.row_hashes import row_hashes
from partc.runtime.interactive.stepper import Stepper
from partc.runtime.jobs.job import Progress
from partc.runtime.jobs.results import TRAINED_FILE
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import Instruction, Run
from tests.builders.plans.boxed_plans import (
    LAYOUTS,
    boxed_momentum,
    momentum_batches,
    momentum_losses,
    momentum_trained,
)
from tests.builders.plans.hand_made_plans import with_changes

BATCHES = momentum_batches(2, steps=4)


@pytest.fixture(scope="module", params=["columns", pytest.param("strided", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas of two ranks."""
    return boxed_momentum(tmp_path_factory.mktemp("plans") / "out", LAYOUTS[request.param], 2)


def test_what_is_saved_is_whole_and_another_layout_goes_on_with_it(folder: Path, tmp_path: Path) -> None:
    lines: list[Progress] = []

    first = Runner(folder).train(BATCHES[:2], 2, outputs="all", read_after=(1,), on_progress=lines.append)
    saved = read_arrays(folder / TRAINED_FILE)
    other = boxed_momentum(tmp_path / "other", LAYOUTS["grid"])
    of_one = momentum_batches(1, steps=2)
    rest = Runner(other).train(of_one, 2, initial=saved)

    for variables, batches in ((first.variables_after[1], BATCHES[:1]), (saved, BATCHES[:2])):
        for name, expected in momentum_trained(folder, batches).items():
            np.testing.assert_allclose(variables[name], expected, rtol=1e-12)
    for name, value in train_in_process(other, of_one, saved).variables.items():
        np.testing.assert_array_equal(rest.variables[name], value)
    losses = np.array([outputs["loss"] for outputs in first.outputs])
    np.testing.assert_allclose(losses, momentum_losses(folder, BATCHES[:2], 2), rtol=1e-12)
    assert first.outputs[0]["distances"].shape == (6,)
    assert first.disagreeing == ()
    assert [line.step for line in lines] == [1, 2]


def test_boxes_that_drift_apart_are_named(folder: Path, tmp_path: Path) -> None:
    """Each replica updates with a gradient of its own."""
    *before, update = read_plan_folder(folder).plan.instructions
    assert isinstance(update, Run)
    reads = tuple((name, "dw" if value == "whole_dw" else value) for name, value in update.reads)
    apart = (*before, msgspec.structs.replace(update, reads=reads))
    broken = copy_with(folder, tmp_path / "broken", apart)

    with pytest.raises(CopiesDiffer, match="different copies of 2 variables: w, v"):
        Runner(broken).train(BATCHES[:2], 2)

    assert train_in_process(broken, BATCHES[:2]).disagreeing == ("w", "v")


def copy_with(folder: Path, to: Path, instructions: tuple[Instruction, ...]) -> Path:
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        (to / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        (to / path.relative_to(folder)).write_bytes(path.read_bytes())
    plan = with_changes(read_plan_folder(folder).plan, instructions=instructions)
    (to / "plan.json").write_bytes(encode_plan(plan))
    return to


def test_verify_reads_boxes_from_daemons(folder: Path) -> None:
    report = verify(folder, steps=2, launcher=launch_daemons)

    assert report.passed, report.summary()
    assert (report.replicas, report.ranks) == (2, 4)


def test_rows_and_hashes_come_from_daemons(folder: Path) -> None:
    with launch_daemons(read_plan_folder(folder), BATCHES, 1, 0) as ranks:
        ranks.step()
        whole = ranks.read("w")

        np.testing.assert_array_equal(ranks.read("w", np.array([1, 3])), whole[[1, 3]])
        np.testing.assert_array_equal(ranks.row_hashes("w"), row_hashes(whole))
        assert ranks.disagreeing() == ()


@pytest.fixture
def stepper(folder: Path) -> Iterator[Stepper]:
    with Stepper(PlanFolder(read_plan_folder(folder).plan, folder)) as running:
        yield running


def test_a_stepper_feeds_and_asks_replicas_not_ranks(folder: Path, stepper: Stepper) -> None:
    shares = np.split(BATCHES[0]["x"], 2)

    losses, distances = stepper.run(["loss", "distances"], {"x": shares})

    np.testing.assert_allclose(losses, momentum_losses(folder, BATCHES[:1], 2)[0], rtol=1e-12)
    assert [len(part) for part in distances] == [3, 3]
    for name, expected in momentum_trained(folder, BATCHES[:1]).items():
        np.testing.assert_allclose(stepper.variables()[name], expected, rtol=1e-12)
