"""Daemons that are stepped from outside compute what one process computes, and end when they must."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.errors import BadData, BadUsage, Diverged, RankFailed
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.interactive import stepper as stepper_module
from partc.runtime.interactive.messages import Read
from partc.runtime.interactive.stepper import Stepper
from partc.runtime.jobs.results import TRAINED_FILE
from tests.builders.plans.linear_plans import linear_all_reduce, linear_batches, linear_servers
from tests.builders.plans.row_plans import table_batches, table_on_servers
from tests.checks.job_processes import is_alive, job_processes, process_of

Batch = dict[str, np.ndarray]
PLANS = {
    "all-reduce": (partial(linear_all_reduce, replicas=3), linear_batches(3, steps=3)),
    "servers apart": (partial(linear_servers, merged=False, scattered=True), linear_batches(2, steps=3)),
    "table": (partial(table_on_servers, merged=True), table_batches(steps=3)),
}


def per_replica(stepper: Stepper, batch: Batch) -> dict[str, list[np.ndarray]]:
    replicas = stepper.plan.replicas
    axes = {entry.name: entry.sample_axis for entry in stepper.plan.data_inputs}
    return {
        name: [array] * replicas if axes[name] is None else np.split(array, replicas, axis=axes[name])
        for name, array in batch.items()
    }


@pytest.mark.parametrize(
    "name", ["all-reduce", pytest.param("servers apart", marks=pytest.mark.long), "table"]
)
def test_steps_compute_what_one_process_computes(tmp_path: Path, name: str) -> None:
    make, batches = PLANS[name]
    folder = make(tmp_path / "out")
    expected = train_in_process(folder, batches, read_after=(1, 2, 3))

    with Stepper(folder) as stepper:
        for step, batch in enumerate(batches, 1):
            fetched = stepper.run([o.name for o in stepper.plan.outputs], per_replica(stepper, batch))
            for output, values in zip(stepper.plan.outputs, fetched, strict=True):
                assert len(values) == stepper.plan.replicas
                if output.layout == "whole":
                    for value in values:
                        np.testing.assert_allclose(value, expected.outputs[step - 1][output.name], rtol=1e-12)
            for variable, value in stepper.variables().items():
                np.testing.assert_allclose(value, expected.variables_after[step][variable], rtol=1e-12)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_all_reduce(tmp_path_factory.mktemp("plans") / "out", replicas=2)


BATCH = linear_batches(2, steps=1)[0]


@pytest.fixture(scope="module")
def running(shared: Path) -> Iterator[Stepper]:
    with Stepper(shared) as stepper:
        yield stepper


def test_what_is_saved_is_what_was_trained(running: Stepper, shared: Path) -> None:
    running.run((), per_replica(running, BATCH))
    trained = running.variables()

    saved = running.save()

    assert saved == shared / TRAINED_FILE
    np.testing.assert_array_equal(read_arrays(saved)["W"], trained["W"])


def test_a_plan_is_where_it_was_when_the_stepper_was_made(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shared.parent)
    with Stepper(shared.name) as stepper:
        monkeypatch.chdir(tmp_path)

        assert stepper.save() == shared / TRAINED_FILE


def test_bad_requests_are_refused_and_the_daemons_go_on(running: Stepper) -> None:
    good = per_replica(running, BATCH)
    name = next(iter(good))
    before = running.steps
    wrong: list[tuple[object, str]] = [
        (good | {name: good[name][0]}, "one for each replica"),
        (good | {name: good[name][:1]}, "a list of 1 for 2 replicas"),
        ({}, "no data for input"),
        (good | {"stray": [BATCH[name]] * 2}, "which is no input"),
        (good | {name: [BATCH[name].astype(np.int32)] * 2}, "supply one replica's samples"),
    ]

    for feeds, reason in wrong:
        with pytest.raises(BadData, match=reason):
            running.run("loss", feeds)  # type: ignore[arg-type]
    with pytest.raises(BadUsage, match="fetch among"):
        running.run("lose", good)

    assert running.steps == before
    running.run("loss", good)


def test_a_loss_that_is_no_number_ends_the_job_and_says_so(shared: Path) -> None:
    with Stepper(shared) as stepper, pytest.raises(Diverged, match="in step 1"):
        stepper.run("loss", per_replica(stepper, {k: np.full_like(v, np.nan) for k, v in BATCH.items()}))

    with pytest.raises(Diverged):
        stepper.run("loss", per_replica(stepper, BATCH))


def test_a_rank_that_is_killed_is_named(shared: Path) -> None:
    with Stepper(shared) as stepper:
        os.kill(process_of(stepper._job_folder, "member", "rank 1"), signal.SIGKILL)
        with pytest.raises(RankFailed, match="cannot be reached"):
            _send_for_ever(stepper, 1)  # it is unreachable before anybody knows why
        with pytest.raises(RankFailed, match="rank 1 died: signal 9"):
            stepper.run("loss", per_replica(stepper, BATCH))


def test_a_rank_that_leaves_with_exit_code_0_is_named(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving_data.py").write_text(
        "import os, time\n"
        "def batches():\n"
        "    if os.environ['PMI_RANK'] == '1':\n"
        "        os._exit(0)\n"
        "    time.sleep(60)\n"
        "    yield {}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(RankFailed, match=r"rank 1 died: exit code 0, without a report\n  at:  rank 1 "):
        Stepper(shared, data="leaving_data:batches").run("loss")


def _send_for_ever(stepper: Stepper, rank: int) -> None:
    while True:
        stepper._ranks.send(rank, Read("W"), {})


def test_a_closed_stepper_leaves_nothing_and_does_nothing(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", replicas=1)
    with Stepper(folder) as stepper:
        assert list(folder.glob(".run-*"))

    assert not list(folder.glob(".run-*"))
    with pytest.raises(BadUsage, match="is closed"):
        stepper.variables()


LEFT_OPEN = """
import sys, time
from pathlib import Path
from partc.runtime.interactive.stepper import Stepper
stepper = Stepper(sys.argv[1])
print(stepper._job_folder, flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["sys.exit()", "time.sleep(600)"], ids=["ends", "is killed"])
def test_ranks_end_with_the_process_that_steps_them(shared: Path, then: str) -> None:
    command = [sys.executable, "-c", LEFT_OPEN.format(then=then), str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        job = Path(process.stdout.readline().strip())
        ranks = [found.process for found in job_processes(job) if found.role == "member"]
        assert len(ranks) == 2
        if "sleep" in then:
            process.kill()
        process.wait()

    deadline_s = time.monotonic() + 20
    while any(map(is_alive, ranks)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_alive, ranks))


@pytest.mark.parametrize("interrupted", ["write_job", "write_record", "StepperEnd"])
def test_an_interrupt_before_the_daemons_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    folder = linear_all_reduce(tmp_path / "out", replicas=1)
    monkeypatch.setattr(stepper_module, interrupted, interrupt)

    with pytest.raises(KeyboardInterrupt) as told:
        Stepper(folder, traced_steps=1)

    assert told.tb  # which holds what the interrupted frames have: nothing was removed for want of a reader
    assert not list(folder.glob(".run-*"))


HOLD_A_STEPPER = """
import sys, time
from pathlib import Path
from partc.runtime.interactive.stepper import Stepper
stepper = Stepper(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


def assert_nothing_is_left(folder: Path) -> None:
    """Keepers end by themselves once nobody asks for them, on a machine at work within seconds."""
    deadline_s = time.monotonic() + 20
    while (job_processes(folder) or list(folder.glob(".run-*"))) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert job_processes(folder) == []
    assert list(folder.glob(".run-*")) == []


def test_what_a_killed_stepper_leaves_its_keepers_remove(tmp_path: Path) -> None:
    linear_all_reduce(folder := tmp_path / "out", replicas=2)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_STEPPER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "ready\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert_nothing_is_left(folder)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


@pytest.mark.parametrize(
    "after_s", [0.0, *(pytest.param(s, marks=pytest.mark.long) for s in (0.3, 0.6, 1.0, 1.5))]
)
def test_an_interrupt_while_the_daemons_load_ends_them_all(tmp_path: Path, after_s: float) -> None:
    linear_all_reduce(folder := tmp_path / "out", replicas=2)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_A_STEPPER, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            while not list(folder.glob(".run-*/channel.json")):
                time.sleep(0.01)
            time.sleep(after_s)
            process.send_signal(signal.SIGINT)
            _, complaint = process.communicate(timeout=30)
        finally:
            process.kill()

    assert b"KeyboardInterrupt" in complaint
    assert_nothing_is_left(folder)
