"""What `partc run` shows while it trains."""

import msgspec
import pytest

from partc.compiler.commands.run import _describe, _summary
from partc.runtime.jobs.job import Progress, Straggler
from partc.runtime.jobs.results import TrainingResult
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from tests.builders.plans.linear_plans import linear_all_reduce


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    """Return a plan of two replicas of four samples each."""
    folder = read_plan_folder(linear_all_reduce(tmp_path_factory.mktemp("plan") / "out", 2))
    return PlanFolder(msgspec.structs.replace(folder.plan, predicted_step_s=0.25), folder.path)


def described(progress: Progress, plan: PlanFolder) -> str:
    return _describe(progress, plan).replace("\u00a0", " ")


def test_a_line_says_loss_speed_and_what_was_predicted(plan: PlanFolder) -> None:
    assert described(Progress(3, 9, 0.25, 2.0, samples_per_s=20.0), plan) == (
        "loss 0.25  2.0 steps/s, 20 samples/s  a step 500 ms, predicted 250 ms"
    )


def test_a_line_says_who_keeps_others_waiting_and_that_data_is_slow(plan: PlanFolder) -> None:
    line = described(Progress(3, 9, None, 2.0, Straggler(1, 0.03, 0.4), data_waited=0.97), plan)

    assert line.endswith("slowest: rank 1 waits 3.0 %, others up to 40 %  waits for data 97 %")
    assert "waits" not in described(Progress(3, 9, None, 2.0, data_waited=0.01), plan)


def test_who_waited_most_waited_no_longer_than_its_own_steps_took(plan: PlanFolder) -> None:
    """The first rank's clock began later than the second's, which waited for it at once."""
    result = TrainingResult(
        {}, last_step=4, steps_per_s=4 / 0.04, waiting_s={0: 0.0, 1: 0.0476}, data_s=0.045, trained_s=0.05
    )

    lines = [line.replace("\u00a0", " ") for line in _summary(plan, result)]

    assert lines[1].endswith("the one that waited most: 95 %")
    assert lines[2].startswith("a rank waited for data 90 % of the time")


def test_a_line_says_since_when_the_loss_is_no_number(plan: PlanFolder) -> None:
    line = described(Progress(7, 9, None, 2.0, not_finite_since=3), plan)

    assert line.startswith("loss not finite since step 3  2.0 steps/s")
