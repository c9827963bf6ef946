from pathlib import Path

import pytest

from partc.runtime.jobs.metrics import MetricsLog, read_metrics
from tests.checks.small_disk import small_disk


def log(path: Path, first: int, last: int, after: int, training: str = "one") -> None:
    metrics = MetricsLog(path, after, training, pytest.fail)
    for step in range(first, last + 1):
        metrics.append(step, step / 2 if step != 3 else float("nan"))
    metrics.close()


def test_a_run_that_goes_on_writes_behind_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log(path, 1, 6, after=0)
    with path.open("a") as stream:
        stream.write('{"step":7,"lo')  # where its writer was killed

    assert [line.step for line in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    log(path, 5, 7, after=4)

    assert [(line.step, line.loss) for line in read_metrics(path)] == [
        (1, 0.5), (2, 1.0), (3, None), (4, 2.0), (5, 2.5), (6, 3.0), (7, 3.5)
    ]  # fmt: skip


def test_a_killed_writer_leaves_every_line(tmp_path: Path) -> None:
    """A checkpoint may be complete a moment later: a run that goes on from it needs all lines before."""
    metrics = MetricsLog(tmp_path / "metrics.jsonl", 0, "one", pytest.fail)
    for step in range(1, 4):
        metrics.append(step, 0.5)
        assert [line.step for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
    metrics.close()


def test_a_new_run_begins_anew_and_one_without_steps_leaves_what_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log(path, 1, 6, after=0)
    MetricsLog(path, 0, "one", pytest.fail).close()
    assert len(list(read_metrics(path))) == 6

    log(path, 1, 2, after=0)

    assert [line.step for line in read_metrics(path)] == [1, 2]


def test_lines_of_another_training_go(tmp_path: Path) -> None:
    """It was in the same folder, and the one that goes on was elsewhere before."""
    path = tmp_path / "metrics.jsonl"
    log(path, 1, 6, after=0)

    log(path, 5, 6, after=4, training="other")
    assert [line.step for line in read_metrics(path)] == [5, 6]
    log(path, 7, 8, after=6, training="other")
    assert [line.step for line in read_metrics(path)] == [5, 6, 7, 8]
    assert [line.training for line in read_metrics(path)] == ["other", "", "other", ""]


def test_lines_of_an_earlier_partc_stay_with_its_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log(path, 1, 6, after=0, training="")

    log(path, 5, 7, after=4, training="")

    assert [line.step for line in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_full_disk_is_told_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    told: list[str] = []
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "metrics.jsonl"
        metrics = MetricsLog(path, 0, "one", told.append)
        for step in range(1, 500):
            metrics.append(step, 0.123456789012345)
        metrics.close()

        last = max(line.step for line in read_metrics(path))
    assert told == [f"{path} has no lines from step {last + 1} on: No space left on device; training goes on"]


def test_where_no_line_can_be_written_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    metrics = MetricsLog(tmp_path / "file" / "metrics.jsonl", 0, "one", told.append)
    metrics.append(1, 0.5)
    metrics.append(2, 0.5)
    metrics.close()

    (line,) = told
    assert line.endswith("has no lines from step 1 on: Not a directory; training goes on")
