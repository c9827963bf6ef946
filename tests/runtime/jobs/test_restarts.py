"""A training that a rank's death interrupts goes on by itself, and ends with the same bits."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.checkpoints.manifest import steps_in
from partc.runtime.errors import BadData, RankFailed, Stopped
from partc.runtime.jobs import launcher
from partc.runtime.jobs.job import Checkpoints
from partc.runtime.jobs.restarts import train_with_restarts
from partc.runtime.jobs.results import TrainingResult
from partc.runtime.jobs.runner import Runner
from tests.builders.plans.linear_plans import linear_all_reduce


@pytest.mark.long
def test_killed_ranks_cost_a_few_steps_and_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 kills itself in steps 3 and 7, once each."""
    (tmp_path / "deadly.py").write_text(
        "import os, pathlib, numpy as np\n"
        "def batches():\n"
        "    rng = np.random.default_rng(0)\n"
        "    for step in range(1, 20):\n"
        "        batch = {'x': rng.normal(size=(8, 3)), 'y': rng.normal(size=(8, 2))}\n"
        f"        mark = pathlib.Path({str(tmp_path)!r}) / f'died-{{step}}'\n"
        "        if step in (3, 7) and os.environ.get('PMI_RANK') == '1' and not mark.exists():\n"
        "            mark.touch()\n"
        "            os.kill(os.getpid(), 9)\n"
        "        yield batch\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = linear_all_reduce(tmp_path / "out", 2)
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=1)
    told: list[str] = []
    waits: list[float] = []

    result = train_with_restarts(
        lambda resume: Runner(folder).train("deadly:batches", 10, checkpoints=asked, resume=resume),
        restarts=3,
        resume=False,
        tell=told.append,
        sleep=waits.append,
    )

    assert [line.partition(" of ")[0][-9:] for line in told] == ["restart 1", "restart 2"]
    assert waits == [1.0, 2.0]
    assert steps_in(tmp_path / "kept") == [8, 9, 10]
    uninterrupted = Runner(folder).train("deadly:batches", 10)
    np.testing.assert_array_equal(result.variables["W"], uninterrupted.variables["W"])


def test_what_would_come_again_is_not_tried_again() -> None:
    tries: list[bool] = []

    def fail(kind: type[Exception]) -> TrainingResult:
        tries.append(True)
        raise kind("it fails", at="here", fix="so")  # type: ignore[call-arg]

    with pytest.raises(RankFailed):
        train_with_restarts(lambda _: fail(RankFailed), 2, False, lambda _: None, lambda _: None)
    assert len(tries) == 3
    with pytest.raises(BadData):
        train_with_restarts(lambda _: fail(BadData), 2, False, lambda _: None, lambda _: None)
    assert len(tries) == 4


def test_who_asks_for_an_end_while_a_failure_is_looked_into_gets_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals a rank, which dies of it while loading, and a moment later its launcher."""
    judge = launcher._Watch._verdict

    def judge_late(watch: launcher._Watch) -> None:
        try:
            judge(watch)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(launcher._Watch, "_verdict", judge_late)
    (tmp_path / "deadly.py").write_text(
        "import os, time\n"
        "def batches():\n"
        "    if os.environ['PMI_RANK'] == '1':\n"
        "        os.kill(os.getpid(), 15)\n"
        "    time.sleep(30)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = linear_all_reduce(tmp_path / "out", 2)
    told: list[str] = []

    with pytest.raises(Stopped, match=r"stopped by SIGTERM\n  at:  rank 1 died: signal 15"):
        train_with_restarts(
            lambda resume: Runner(folder).train("deadly:batches", 2), 3, False, told.append, lambda _: None
        )

    assert told == []
