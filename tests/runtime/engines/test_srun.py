"""Ranks by Slurm's srun, played by a program that notes what it is told and starts tasks as srun does."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.engines.engine import find_mpiexec
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.interactive.stepper import Stepper
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder
from tests.builders.plans.compiled_steps import random_batches
from tests.runtime.jobs.test_resumed_jobs import deep

# Tasks, started by what runs under it here: with --multi-prog each takes its line of the file.
SRUN = """#!/bin/sh
[ "$1" = --version ] && {{ echo slurm-wlm 24.05; exit; }}
echo "$@" > {told}
[ -n "$SLURM_HOSTFILE" ] && cat "$SLURM_HOSTFILE" > {nodes}
tasks=1
while :; do
    case "$1" in
        --ntasks=*) tasks=${{1#*=}}; shift;;
        -n) tasks=$2; shift 2;;
        -*) shift;;
        *) break;;
    esac
done
exec {mpiexec} -launcher fork -rmk user -n $tasks sh -c '
    export SLURM_PROCID=$PMI_RANK SLURM_STEP_NUM_TASKS=$PMI_SIZE SLURM_STEP_NUM_NODES=1 SLURM_STEP_ID=0
    exec "$@"' task "$@"
"""


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter an allocation of two nodes; return the folder of what srun notes."""
    monkeypatch.delenv("PARTC_MPIEXEC", raising=False)
    told, nodes = tmp_path / "told", tmp_path / "nodes"
    text = SRUN.format(told=told, nodes=nodes, mpiexec=find_mpiexec())
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return tmp_path


def assert_trains(plan: PlanFolder, steps: int = 2) -> None:
    batches = random_batches(plan.plan, steps)
    actual = Runner(plan).train(batches, steps, timeout_s=60)
    for name, value in train_in_process(plan, batches).variables.items():
        np.testing.assert_allclose(actual.variables[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_ranks_are_tasks_of_one_step(slurm: Path) -> None:
    plan = deep(slurm / "out", "1x2", "auto").folder

    assert_trains(plan)

    assert "2 ranks, by srun (allocation 77 of Slurm's)" in (plan.path / "run.log").read_text()
    told = (slurm / "told").read_text().split()
    assert {"--ntasks=2", "--overcommit", "--cpu-bind=none", "--kill-on-bad-exit=1", "--mpi=pmi2"} <= set(
        told
    )


def test_hosts_without_addresses_are_the_nodes_of_the_allocation(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[3-4]")
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmi2")
    monkeypatch.setattr("partc.runtime.supervision.supervisor.own_address", lambda address: "127.0.0.1")
    plan = deep(slurm / "out", "2x1", "auto").folder

    assert_trains(plan)

    assert (slurm / "nodes").read_text() == "node3\nnode4\n"
    assert "--mpi=pmi2" not in (slurm / "told").read_text()


def test_a_stepper_waits_for_its_ranks_where_the_nodes_find_it(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[3-4]")
    for module in ("supervision.supervisor", "interactive.channel"):
        monkeypatch.setattr(f"partc.runtime.{module}.own_address", lambda address: "127.0.0.1")
    plan = deep(slurm / "out", "2x1", "auto").folder
    (batch,) = random_batches(plan.plan, 1)

    with Stepper(plan) as stepper:
        (losses,) = stepper.run(
            [plan.plan.loss or ""], {name: np.split(value, 2) for name, value in batch.items()}
        )

    assert len(losses) == 2 and np.isfinite(losses).all()


@pytest.mark.long
def test_every_task_of_a_step_becomes_a_rank(slurm: Path) -> None:
    plan = deep(slurm / "out", "1x2", "auto").folder
    command = ["srun", "-n", "2", sys.executable, "-m", "partc.compiler.commands.cli", "run", str(plan.path)]

    done = subprocess.run(
        [*command, "--steps", "2"], capture_output=True, text=True, timeout=120, env=os.environ
    )

    assert done.returncode == 0, done.stderr
    assert "2 ranks, which others have started" in (plan.path / "run.log").read_text()
    assert (plan.path / "trained.safetensors").exists()
