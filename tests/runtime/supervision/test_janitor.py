"""What janitors note of keepers that were killed."""

import os
from pathlib import Path

from partc.runtime.supervision.janitor import begin_janitor, lost_keepers


def test_whose_keeper_was_killed_first_is_told_first(tmp_path: Path) -> None:
    janitors = {name: begin_janitor(tmp_path, name) for name in ("rank 2", "rank 0", "rank 1")}
    for name in ("rank 0", "rank 1"):
        _let_go(janitors[name].pipe)
        _until_there(tmp_path, name)
    janitors["rank 2"].dismiss()

    os.utime(tmp_path / "lost-keeper.rank 0", ns=(2, 2))
    os.utime(tmp_path / "lost-keeper.rank 1", ns=(1, 1))

    assert lost_keepers(tmp_path) == ["rank 1", "rank 0"]


def test_a_job_that_is_over_is_not_noted_in(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    janitor = begin_janitor(gone, "rank 0")

    _let_go(janitor.pipe)
    os.wait()

    assert not gone.exists()
    assert lost_keepers(gone) == []


def _let_go(pipe: int | None) -> None:
    """End a keeper's side without a word, as its death does."""
    assert pipe is not None
    os.close(pipe)


def _until_there(folder: Path, name: str) -> None:
    os.wait()
    assert name in lost_keepers(folder)
