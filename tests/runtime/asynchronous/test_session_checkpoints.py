"""Asynchronous trainings that are saved, stopped, gone on with, and whose workers die: processes."""

import os
import random
import signal
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.checkpoints.manifest import folder_of, steps_in, verify_checkpoint
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.errors import BadData, NotSaved, RankFailed
from partc.runtime.jobs.job import Checkpoints, JobMessage, Notice, Progress, Restarted, Saved
from partc.runtime.jobs.metrics import read_metrics
from partc.runtime.jobs.restarts import train_with_restarts
from partc.runtime.jobs.results import TRAINED_FILE, TrainingResult
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder
from tests.builders.plans.compiled_steps import compile_step
from tests.builders.plans.session_plans import (
    additive_step,
    compile_sessions,
    train_in_turn,
    train_steps,
    whole_batches,
)
from tests.checks.job_processes import job_processes

Values = dict[str, np.ndarray]


@pytest.fixture
def additive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanFolder:
    monkeypatch.chdir(tmp_path)
    return compile_sessions(additive_step(), tmp_path / "out", "1x2")


def last_saved(kept: Path) -> tuple[tuple[int, ...], Values]:
    """Return the steps of each worker in the last checkpoint, and its variables."""
    folder = kept / folder_of(steps_in(kept)[-1])
    return verify_checkpoint(folder).position.workers, {
        v.name: piece for v in StoredValues(folder).whole() for piece in v.pieces
    }


def assert_equal(values: Values, expected: Values) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)


def test_a_saved_training_goes_on_to_what_an_uninterrupted_one_is(
    additive: PlanFolder, tmp_path: Path
) -> None:
    batches = whole_batches(additive, steps=9)
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=2)
    told: list[JobMessage] = []

    Runner(additive).train(batches, 5, checkpoints=asked, on_progress=told.append)
    first = [saved.step for saved in told if isinstance(saved, Saved)]
    result = Runner(additive).train(
        batches,
        9,
        checkpoints=asked,
        resume=True,
        staleness=0,
        metrics=tmp_path / "metrics.jsonl",
        on_progress=told.append,
    )
    saved = [saved.step for saved in told if isinstance(saved, Saved)]

    assert (result.first_step, result.last_step) == (5, 4)
    # One that is due while another is being written comes behind it; the last of a run is always there.
    for begun, steps, last in ((0, first, 5), (5, saved[len(first) :], 9)):
        assert steps[-1] == last
        assert all(later // 2 > before // 2 for before, later in pairwise((begun, *steps[:-1])))
    assert steps_in(tmp_path / "kept") == saved[-3:]
    assert last_saved(tmp_path / "kept")[0] == (9, 9)
    assert_equal(result.variables, train_in_turn(additive, batches))
    paces = [message for message in told if isinstance(message, Progress)]
    assert [pace.samples_per_s for pace in paces] == pytest.approx([8 * pace.steps_per_s for pace in paces])
    assert [line.step for line in read_metrics(tmp_path / "metrics.jsonl")] == [6, 7, 8, 9]


@pytest.mark.long
def test_other_plans_go_on_asynchronous_and_synchronous_ones(additive: PlanFolder, tmp_path: Path) -> None:
    asked = Checkpoints(str(tmp_path / "kept"))
    batches = whole_batches(additive, steps=3)
    Runner(additive).train(batches, 2, checkpoints=Checkpoints(asked.folder, every_steps=2))
    alone = compile_step(import_training_graph(additive_step()), tmp_path / "alone", "1x1", "ps").folder
    single = [
        {name: array[:4] for name, array in batch.items()} for batch in whole_batches(additive, 7, seed=1)
    ]
    four = compile_sessions(additive_step(), tmp_path / "four", "2x2")
    last = whole_batches(four, steps=4)

    middle = Runner(alone).train(single, 5, checkpoints=Checkpoints(asked.folder, every_steps=5), resume=True)
    end = Runner(four).train(last, 7, checkpoints=asked, resume=True)

    # 2 steps of 2 workers took 16 samples: 4 batches of 4; 3 further ones 28: 2 batches of 16
    used = [{n: np.concatenate([a, a]) for n, a in batch.items()} for batch in single[4:7]]
    alone_after = train_steps(additive, used, [3, 0], variables=train_in_turn(additive, batches[:2]))
    assert_equal(middle.variables, alone_after)
    assert (end.first_step, end.last_step) == (5, 2)
    expected = train_steps(four, last[2:4], [2] * 4, variables=alone_after)
    assert_equal(end.variables, expected)


def test_a_signal_saves_and_stops_and_the_rest_is_as_if_it_had_not(
    additive: PlanFolder, tmp_path: Path
) -> None:
    asked = Checkpoints(str(tmp_path / "kept"))
    batches = whole_batches(additive, steps=1) * 3000

    def stop(told: JobMessage) -> None:
        if isinstance(told, Progress) and told.step > 5:
            os.kill(os.getpid(), signal.SIGTERM)

    result = Runner(additive).train(batches, 3000, checkpoints=asked, on_progress=stop, outputs="none")

    steps, variables = last_saved(tmp_path / "kept")
    assert result.stopped_by == signal.SIGTERM
    assert 5 < result.last_step == sum(steps) // 2 < 3000
    assert_equal(variables, train_steps(additive, batches[: max(steps)], steps))
    assert_equal(result.variables, variables)
    rest = Runner(additive).train(batches, max(steps) + 2, checkpoints=asked, resume=True)
    assert_equal(rest.variables, train_in_turn(additive, batches[: max(steps) + 2]))
    assert job_processes(additive.path) == []


# Worker 1 comes to an end of itself, in its first life or in each, when it is asked for the batch of a step.
ENDING = """
import os, signal, sys, time
import numpy as np

def batches():
    step = 0
    with np.load("batches.npz") as arrays:
        arrays = dict(arrays)
    while True:
        step += 1
        if sys.argv[-2] == "worker" and int(sys.argv[-1]) SESSIONS and step == 3:
            HOW
        yield arrays
"""


def data_that_ends(folder: PlanFolder, sessions: str, how: str) -> str:
    np.savez("batches.npz", **whole_batches(folder, steps=1)[0])
    Path("ending.py").write_text(ENDING.replace("HOW", how).replace("SESSIONS", sessions))
    return "ending:batches"


def test_a_worker_that_dies_is_taken_back(additive: PlanFolder) -> None:
    data = data_that_ends(additive, "== 1", "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)")
    told: list[JobMessage] = []

    result = Runner(additive).train(data, 8, staleness=1, worker_restarts=2, on_progress=told.append)

    assert result.lost_workers == ()
    assert_equal(result.variables, train_in_turn(additive, whole_batches(additive, steps=1) * 8))
    assert [restarted.member for restarted in told if isinstance(restarted, Restarted)] == ["worker-1"]
    (notice,) = (notice.text for notice in told if isinstance(notice, Notice))
    assert "died: signal 9 (SIGKILL); it is started again in 1 s (1 of 2)" in notice
    assert notice in (additive.path / "run.log").read_text()


@pytest.mark.long
def test_a_worker_that_dies_always_is_given_up(additive: PlanFolder) -> None:
    data = data_that_ends(additive, "% 2 == 1", "time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)")

    result = Runner(additive).train(data, 8, worker_restarts=1)

    assert result.lost_workers == ("worker 1 (host0/cpu1) died: signal 9 (SIGKILL)",)
    (batch,) = whole_batches(additive, steps=1)
    assert_equal(result.variables, train_steps(additive, [batch] * 8, [8, 2]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("sessions", "how", "error"),
    [("== 1", "return", BadData), (">= 0", "time.sleep(0.5); os._exit(3)", RankFailed)],
)
def test_what_ends_a_run_leaves_what_was_trained(
    additive: PlanFolder, tmp_path: Path, sessions: str, how: str, error: type[Exception]
) -> None:
    told: list[JobMessage] = []
    with pytest.raises(error):
        Runner(additive).train(
            data_that_ends(additive, sessions, how),
            1000,
            checkpoints=Checkpoints(str(tmp_path / "kept")),
            on_progress=told.append,
        )

    steps, variables = last_saved(tmp_path / "kept")
    assert steps[1] == 2
    assert_equal(variables, train_steps(additive, whole_batches(additive, 1) * max(steps), steps))
    assert f"what was trained is saved, after step {sum(steps) // 2}: --resume goes" in told[-1].text  # type: ignore[union-attr]
    assert job_processes(additive.path) == []


@pytest.mark.long
def test_a_stopped_worker_loses_nothing_of_the_others(additive: PlanFolder) -> None:
    data = data_that_ends(additive, "== 1", "os.kill(os.getpid(), signal.SIGSTOP)")

    result = Runner(additive).train(data, 8, worker_restarts=1)

    assert result.lost_workers == ()
    assert_equal(result.variables, train_in_turn(additive, whole_batches(additive, steps=1) * 8))


def test_the_last_checkpoint_that_cannot_be_written_is_an_error_behind_the_variables(
    additive: PlanFolder, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    how = f"os.rmdir({str(kept)!r}); open({str(kept)!r}, 'w').close()"
    (additive.path / TRAINED_FILE).unlink(missing_ok=True)

    with pytest.raises(NotSaved, match=r"(?s)of step 8 could not be written: server \d: Not a dir.*is in "):
        Runner(additive).train(
            data_that_ends(additive, "== 1", how), 8, checkpoints=Checkpoints(str(kept), every_steps=8)
        )

    assert (additive.path / TRAINED_FILE).exists()


def test_a_server_tells_that_it_cannot_write_checkpoints_before_the_first_step(
    additive: PlanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("partc.runtime.checkpoints.training_folders.probe_folder", lambda folder: None)

    with pytest.raises(NotSaved, match=r"(?s)no checkpoint could be written: Not a dir.*fix: name another"):
        Runner(additive).train(
            whole_batches(additive, steps=1) * 4, 4, checkpoints=Checkpoints(str(tmp_path / "file" / "x"))
        )


@pytest.mark.long
def test_workers_killed_at_any_time_are_taken_back_and_no_push_is_torn(additive: PlanFolder) -> None:
    batches = whole_batches(additive, steps=1) * 1500
    rng = random.Random(0)
    kills: list[str] = []

    def kill(told: JobMessage) -> None:
        living = [found for found in job_processes(additive.path) if found.role == "member"]
        workers = [found for found in living if found.name.startswith("worker") and found.name not in kills]
        if isinstance(told, Progress) and len(kills) < 6 and workers:
            killed = rng.choice(workers)
            time.sleep(rng.uniform(0, 0.05))
            kills.append(killed.name)
            with suppress(ProcessLookupError):
                os.kill(killed.process, signal.SIGKILL)

    result = Runner(additive).train(
        batches, 1500, staleness=3, worker_restarts=6, on_progress=kill, outputs="none"
    )

    assert len(kills) >= 3
    assert result.lost_workers == ()
    assert_equal(result.variables, train_in_turn(additive, batches))


@pytest.mark.long
def test_the_death_of_a_server_is_gone_on_from_by_the_last_checkpoint(
    additive: PlanFolder, tmp_path: Path
) -> None:
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=20)
    batches = whole_batches(additive, steps=1) * 400
    killed: list[int] = []

    def kill(told: JobMessage) -> None:
        if isinstance(told, Saved) and told.step >= 40 and not killed:
            (server,) = (
                found.process
                for found in job_processes(additive.path)
                if (found.role, found.name) == ("member", "server-1")
            )
            killed.append(server)
            os.kill(server, signal.SIGKILL)

    def train(resume: bool) -> TrainingResult:
        return Runner(additive).train(batches, 400, checkpoints=asked, resume=resume, on_progress=kill)

    told: list[str] = []
    result = train_with_restarts(train, 1, False, told.append, sleep=lambda _: None)

    assert killed and "server-1 died: signal 9 (SIGKILL)" in told[0]
    assert result.first_step >= 40
    assert_equal(result.variables, train_in_turn(additive, batches))
