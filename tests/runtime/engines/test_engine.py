"""Command lines: what starts ranks, as each kind of engine wants it."""

import stat
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from partc.runtime.engines.engine import Engine, Kind, find_engine, kind_of, rank_environment, start_command
from partc.runtime.engines.machines import Machine, Machines
from partc.runtime.errors import BadUsage

HERE = ["alpha", "alpha", "alpha"]
TWO = ["alpha", "alpha", "beta"]
APART = Machines.at({"alpha": "10.0.0.1", "beta": "10.0.0.2"})
WORDS = ("-m", "keeper", "job")


def a_program(folder: Path, name: str, says: str) -> Path:
    """Write a program that says what it is."""
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def command_of(kind: Kind, hosts: list[str], machines: Machines, folder: Path) -> list[str]:
    engine = Engine(kind, "/opt/mpi/bin/start", "a test")
    return start_command(engine, hosts, machines, WORDS, folder).words[1:]


def test_one_machine_needs_no_hosts(tmp_path: Path) -> None:
    assert command_of("mpich", HERE, Machines(), tmp_path) == ["-n", "3", sys.executable, *WORDS]
    assert command_of("intel", HERE, Machines(), tmp_path) == ["-n", "3", sys.executable, *WORDS]


def test_ranks_start_on_their_hosts_in_order(tmp_path: Path) -> None:
    started = [sys.executable, *WORDS]

    assert command_of("mpich", TWO, APART, tmp_path) == [
        "-host",
        "10.0.0.1:2,10.0.0.2:1",
        "-n",
        "3",
        *started,
    ]
    assert command_of("intel", TWO, APART, tmp_path) == [
        *("-n", "2", "-host", "10.0.0.1", *started, ":"),
        *("-n", "1", "-host", "10.0.0.2", *started),
    ]


def test_open_mpi_binds_nothing_and_hands_on_what_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTC_LOG_LEVEL", "INFO")
    at_home = command_of("openmpi", HERE, Machines(), tmp_path)
    away = command_of("openmpi", TWO, APART, tmp_path)

    common = ["--map-by", "slot", "--bind-to", "none", "--host"]
    assert at_home == [*common, "localhost:3", "--np", "3", sys.executable, *WORDS]
    assert away[:6] == [*common, "10.0.0.1:2,10.0.0.2:1"]
    exported = {after for word, after in pairwise(away) if word == "-x"}
    assert {"PARTC_LOG_LEVEL", "OMP_NUM_THREADS"} <= exported


def test_srun_is_told_the_node_of_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmi2")

    made = start_command(Engine("srun", "/usr/bin/srun", "a test"), TWO, APART, WORDS, tmp_path)

    assert "--distribution=arbitrary" in made.words and "--cpu-bind=none" in made.words
    assert not any(word.startswith("--mpi") for word in made.words), "the user has chosen"
    assert Path(made.environment["SLURM_HOSTFILE"]).read_text() == "10.0.0.1\n10.0.0.1\n10.0.0.2\n"
    assert made.words[-4:] == [sys.executable, *WORDS]
    assert "--distribution=arbitrary" not in command_of("srun", HERE, Machines(), tmp_path)


def test_srun_needs_no_file_for_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmi2")
    here = start_command(Engine("srun", "/usr/bin/srun", "a test"), ["beta"], APART, WORDS, tmp_path)

    assert {"--nodes=1", "--nodelist=10.0.0.2", "--ntasks=1"} <= set(here.words)
    assert "SLURM_HOSTFILE" not in here.environment
    assert not list(tmp_path.iterdir()), "several at once would write one file"


def test_hosts_have_pythons_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmi2")
    machines = Machines((Machine("alpha", "10.0.0.1"), Machine("beta", "10.0.0.2", python="/b/python")))

    mpich = command_of("mpich", TWO, machines, tmp_path)
    srun = command_of("srun", TWO, machines, tmp_path)

    assert mpich[2:] == ["-n", "2", sys.executable, *WORDS, ":", "-n", "1", "/b/python", *WORDS]
    assert srun[-2] == "--multi-prog"
    programs = Path(srun[-1]).read_text().splitlines()
    assert programs == [f"0-1 {sys.executable} -m keeper job", "2-2 /b/python -m keeper job"]


@pytest.mark.parametrize("kind", ["mpich", "intel", "openmpi", "srun"])
def test_options_of_the_cluster_file_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmi2")
    machines = Machines(mpiexec=("-iface", "ib0"))

    words = command_of(kind, HERE, machines, tmp_path)

    at = words.index("-iface")
    assert words[at + 1] == "ib0" and at < words.index(sys.executable)


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("HYDRA build details:\n    Launchers available: ssh rsh fork slurm", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", "intel"),
        ("mpirun (Open MPI) 5.0.8", "openmpi"),
        ("prterun (PRRTE) 3.0.11", "openmpi"),
        ("slurm-wlm 23.11.4", "srun"),
        ("", "mpich"),
    ],
)
def test_a_program_says_what_it_is(tmp_path: Path, says: str, kind: str) -> None:
    assert kind_of(str(a_program(tmp_path, "mpiexec", says))) == kind


def test_within_an_allocation_slurm_starts_ranks_unless_somebody_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = a_program(tmp_path, "srun", "slurm 24.05")
    other = a_program(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.8")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("PARTC_MPIEXEC", raising=False)

    assert find_engine().source == "installed with this Python"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert find_engine() == Engine("srun", str(srun), "allocation 77 of Slurm's")
    monkeypatch.setenv("PARTC_MPIEXEC", str(other))
    assert find_engine() == Engine("openmpi", str(other), f"PARTC_MPIEXEC={other}")


def test_ranks_do_not_take_themselves_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun -n 1 partc run`, say: the task's number is none of its ranks'."""
    for name, value in {
        "PMI_RANK": "0",
        "SLURM_PROCID": "0",
        "PMIX_MCA_gds": "hash",
        "SLURM_JOB_ID": "7",
    }.items():
        monkeypatch.setenv(name, value)

    ranks = rank_environment()

    assert {"PMI_RANK", "SLURM_PROCID"}.isdisjoint(ranks)
    assert (ranks["PMIX_MCA_gds"], ranks["SLURM_JOB_ID"], ranks["OMP_NUM_THREADS"]) == ("hash", "7", "1")
    assert rank_environment(is_joined=True)["PMI_RANK"] == "0"


def test_an_mpiexec_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTC_MPIEXEC", "/nowhere/mpiexec")

    with pytest.raises(BadUsage, match="PARTC_MPIEXEC=/nowhere/mpiexec"):
        find_engine()


def test_mpi4py_loads_the_library_beside_its_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    mpirun = Engine("openmpi", str(a_program(tmp_path / "bin", "mpirun", "")), "a test")

    made = start_command(mpirun, HERE, Machines(), WORDS, tmp_path)
    monkeypatch.setenv("MPI4PY_LIBMPI", "/mine/libmpi.so")
    chosen = start_command(mpirun, HERE, Machines(), WORDS, tmp_path)

    assert made.environment == {"MPI4PY_LIBMPI": str(tmp_path / "lib" / "libmpi.so.40")}
    assert chosen.environment == {}
    assert rank_environment()["OMP_NUM_THREADS"]
