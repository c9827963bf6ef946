"""The folder of a running job: its own process removes it, and after a kill the next job does."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job_folder import job_folder, locked_folder
from tests.checks.held_folders import held_by_another

HOLD = """
import sys, time
from pathlib import Path
from partc.runtime.jobs.job_folder import job_folder
with job_folder(Path(sys.argv[1])) as folder:
    (folder / "job.json").write_text("{}")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_folder_of_a_job_that_ends_is_removed(tmp_path: Path) -> None:
    with job_folder(tmp_path) as folder:
        assert folder.parent == tmp_path

    assert list(tmp_path.iterdir()) == []


def test_a_killed_jobs_folder_is_removed_by_the_next_and_a_running_ones_is_not(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        left = Path(holder.stdout.readline().strip())
        with job_folder(tmp_path):
            assert left.exists()  # it runs
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert left.exists()

        with job_folder(tmp_path) as folder:
            assert list(tmp_path.iterdir()) == [folder]
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_killed_jobs_folder_is_removed_while_its_ranks_still_write(tmp_path: Path) -> None:
    left = tmp_path / ".run-left"
    left.mkdir()
    (left / "held").touch()

    def write() -> None:
        with contextlib.suppress(FileNotFoundError):
            for number in range(100_000):
                (left / f"error.rank-{number}").touch()

    rank = threading.Thread(target=write)
    rank.start()
    while not (left / "error.rank-200").exists():
        time.sleep(0.001)

    with job_folder(tmp_path) as folder:
        rank.join()
        assert list(tmp_path.iterdir()) == [folder]


def test_a_job_within_a_job_of_the_same_process_leaves_it_alone(tmp_path: Path) -> None:
    with job_folder(tmp_path) as outer, job_folder(tmp_path) as inner:
        assert outer.exists()
        assert inner.exists()


def test_what_was_not_left_by_a_job_stays(tmp_path: Path) -> None:
    (tmp_path / ".run-notes").mkdir()

    with job_folder(tmp_path):
        pass

    assert (tmp_path / ".run-notes").exists()


def test_a_folder_is_one_process_s_until_it_ends_however_it_does(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as holder:
        with (
            pytest.raises(BadUsage, match="fix: wait for its end"),
            locked_folder(tmp_path),
        ):
            pass
        holder.kill()
        holder.wait()

        with locked_folder(tmp_path):
            pass

    assert list(tmp_path.iterdir()) == []


def test_who_holds_a_folder_may_hold_it_within_and_another_thread_may_not(tmp_path: Path) -> None:
    refusals: list[BadUsage] = []

    def hold() -> None:
        try:
            with locked_folder(tmp_path):
                pass
        except BadUsage as error:
            refusals.append(error)

    with locked_folder(tmp_path):
        with locked_folder(tmp_path):
            pass
        another = threading.Thread(target=hold)
        another.start()
        another.join()

    assert len(refusals) == 1
    hold()
    assert len(refusals) == 1


def test_what_is_no_folder_is_nobody_s(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with locked_folder(tmp_path / "file"), locked_folder(tmp_path / "nowhere"):
        pass
