"""How the processes of an asynchronous job are started: here, by ssh, and as steps of an allocation."""

import sys
from pathlib import Path

import pytest

from partc.runtime.asynchronous.processes.processes import command_for
from partc.runtime.engines.machines import Machine

AWAY = Machine("beta", "node4")


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("srun", "ssh"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    for name in ("PARTC_SSH", "PARTC_MPIEXEC", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_of_this_machine_is_started_as_it_is(tmp_path: Path) -> None:
    command = command_for(tmp_path, "worker-1", "worker", 1, Machine("alpha"))

    assert command.words[0] == sys.executable
    assert command.words[-2:] == ["worker", "1"]


def test_elsewhere_ssh_starts_it(tmp_path: Path) -> None:
    command = command_for(tmp_path, "worker-1", "worker", 1, AWAY)

    assert command.words[:2] == ["ssh", "node4"]
    assert command.words[2].endswith("worker 1")


def test_within_an_allocation_it_is_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may begin beside the others': Slurm would let it wait for their cores."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_MPI_TYPE", "none")

    command = command_for(tmp_path, "worker-1", "worker", 1, AWAY)

    assert command.words[0] == str(tmp_path / "bin" / "srun")
    assert {"--nodelist=node4", "--ntasks=1"} <= set(command.words)
    assert command.environment == {"SLURM_OVERLAP": "1"}
    assert command.words[-2:] == ["worker", "1"]
