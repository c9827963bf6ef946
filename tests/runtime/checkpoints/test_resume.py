"""Where data go on, by what a checkpoint says of them."""

from pathlib import Path

import numpy as np
import pytest

from partc.runtime.checkpoints.manifest import TrainingPosition
from partc.runtime.checkpoints.resume import DataAsked, StartPoint, resume_from
from partc.runtime.errors import BadCheckpoint, BadUsage
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput
from tests.builders.checkpoints import stored_checkpoint
from tests.builders.plans.hand_made_plans import with_changes
from tests.builders.plans.linear_plans import LINEAR_INPUTS, linear_all_reduce

OPEN_INPUTS = (DataInput("x", "float64", ("n", 3), 0), DataInput("y", "float64", ("n", 2), 0))


@pytest.fixture
def open_plan(tmp_path: Path) -> Plan:
    """Return a plan of two replicas whose batch is left open, and assumed to be of four samples each."""
    plan = read_plan_folder(linear_all_reduce(tmp_path / "out", 2)).plan
    return with_changes(plan, data_inputs=OPEN_INPUTS, sizes={"n": 4})


def gone_on(plan: Plan, checkpoints: Path, position: TrainingPosition, data: str | None = None) -> StartPoint:
    stored_checkpoint(checkpoints, position.step, {"W": np.ones((3, 2))}, position=position)
    asked = DataAsked(position.data if data is None else data)
    return resume_from(plan, checkpoints, None, asked, lambda text: None)


@pytest.mark.parametrize("data", ["", "my_data:batches"])
def test_of_a_stream_as_many_batches_are_used_as_were_read_whatever_their_size(
    open_plan: Plan, tmp_path: Path, data: str
) -> None:
    """Three batches of 20, by one replica: two replicas would take 24 samples in as many, it was assumed."""
    start = gone_on(open_plan, tmp_path, TrainingPosition(3, 0, 3, 60, data, shards=0))

    assert (start.batches, start.samples) == (3, 60)


def test_batches_of_shards_are_dealt_out_among_replicas(open_plan: Plan, tmp_path: Path) -> None:
    """Three shards gave three batches each: of two replicas, five steps take all nine."""
    start = gone_on(open_plan, tmp_path, TrainingPosition(3, 0, 3, 90, "my_data:shards", shards=3))

    assert (start.batches, start.samples) == (5, None)  # of which one was not there: nobody counted these


def test_samples_of_files_go_on_by_what_the_run_takes_of_them(open_plan: Plan, tmp_path: Path) -> None:
    """A step takes 2 x 5: behind 33 samples, the fifth batch is the first that is new."""
    position = TrainingPosition(3, 0, 3, 33, "data.npz", is_shuffled=False)

    start = gone_on(with_changes(open_plan, sizes={"n": 5}), tmp_path, position)

    assert (start.batches, start.samples) == (4, 40)


def test_a_folder_that_only_ranks_have_holds_samples(open_plan: Plan, tmp_path: Path) -> None:
    start = gone_on(open_plan, tmp_path / "kept", TrainingPosition(3, 0, 3, 33, str(tmp_path / "elsewhere")))

    assert (start.batches, start.samples) == (5, 40)


def test_a_stream_of_batches_that_the_model_fixes_goes_on_by_samples(open_plan: Plan, tmp_path: Path) -> None:
    plan = with_changes(open_plan, data_inputs=LINEAR_INPUTS)

    start = gone_on(plan, tmp_path, TrainingPosition(3, 0, 3, 12, "my_data:batches"))

    assert (start.batches, start.samples) == (2, 16)


@pytest.mark.parametrize(("file_samples", "used"), [(120, 101), (80, 81)])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_files_that_grew_or_shrank_since_are_refused_where_their_order_is_another(
    open_plan: Plan, tmp_path: Path, file_samples: int, used: int, is_shuffled: bool
) -> None:
    told: list[str] = []

    def resume(used: int, name: str) -> None:
        position = TrainingPosition(3, 0, 3, used, "data.npz", is_shuffled=is_shuffled, file_samples=100)
        kept = tmp_path / f"{name}-{used}"
        stored_checkpoint(kept, 3, {"W": np.ones((3, 2))}, position=position)
        resume_from(open_plan, kept, None, DataAsked(name, is_shuffled, file_samples), told.append)

    with pytest.raises(BadUsage, match=rf"(?s)holds {file_samples} .* began with 100.*some would come twice"):
        resume(used, "data.npz")
    resume(used, "other.npz")
    if not is_shuffled:  # what was used lies where it did, and what comes behind it, too
        resume(used - 1, "data.npz")
        assert told[-1] == f"data.npz holds {file_samples} samples, where training began with 100"


def test_an_older_checkpoint_of_a_stream_is_for_the_plan_that_wrote_it(
    open_plan: Plan, tmp_path: Path
) -> None:
    """It took the batch for one of the size that was assumed, and does not tell who read what."""
    position = TrainingPosition(3, 0, 3, 24, "my_data:batches")

    with pytest.raises(
        BadCheckpoint, match=r"(?s)an earlier partc.*manifest.json.*with the plan that wrote it"
    ):
        gone_on(with_changes(open_plan, sha256="of another"), tmp_path / "others", position)
    own = gone_on(with_changes(open_plan, sha256=""), tmp_path / "own", position)
    of_one_batch = gone_on(
        with_changes(open_plan, sha256="of another", batch="global"), tmp_path / "one", position
    )
    of_other_data = gone_on(
        with_changes(open_plan, sha256="of another"),
        tmp_path / "files",
        TrainingPosition(3, 0, 3, 24, "data.npz"),
        data="",
    )

    assert own.batches == of_one_batch.batches == of_other_data.batches == 3
