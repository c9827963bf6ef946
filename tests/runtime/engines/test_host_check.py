"""What hosts lack is found before the first step, all of it at once, and named: each lack is injected."""

import json
import sys
from pathlib import Path

import pytest
from msgspec import structs

from partc.runtime.engines.host_check import (
    PACKAGES,
    HostFindings,
    Lack,
    available_bytes,
    check_shared_memory,
    judge,
    look_around,
)
from partc.runtime.errors import HostLacks
from partc.runtime.jobs.job import Checkpoints, Job
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import Plan
from tests.builders.plans.hand_made_plans import with_changes
from tests.builders.plans.linear_plans import LINEAR_W, linear_all_reduce

VERSIONS = dict.fromkeys(PACKAGES, "1.0")


def found(rank: int, **changes: object) -> HostFindings:
    host = f"h{rank}"
    whole = HostFindings(f"rank {rank}", f"node{rank}", host, f"{host}/cpu0", "abc", VERSIONS, ())
    return structs.replace(whole, **changes)


def rewritten(folder: Path, **changes: object) -> Plan:
    """Replace parts of a plan, its hash with them."""
    plan = with_changes(read_plan_folder(folder).plan, **changes)
    (folder / "plan.json").write_bytes(encode_plan(plan))
    return plan


def test_nothing_lacking_is_no_error() -> None:
    assert judge([found(0), found(1)]) is None


def test_one_lack_is_told_as_one_error() -> None:
    fault = judge([found(0), found(1, versions=VERSIONS | {"numpy": "2.0"})])

    assert fault is not None
    assert (fault.what, fault.at) == ("numpy is 2.0, host 'h0' (node0) has 1.0", "host 'h1' (node1)")
    assert fault.fix.startswith("install numpy 1.0 there")


def test_all_that_is_lacking_is_told_together_and_once_a_host() -> None:
    without = VERSIONS | {"onnxruntime": ""}
    twice = [structs.replace(found(1, versions=without), name=f"rank {rank}") for rank in (1, 2)]
    other = found(3, plan_sha256="def", lacks=(Lack("no room", "make room"),))

    fault = judge([found(0), *twice, other])

    assert fault is not None
    assert fault.what == "3 things are lacking on 2 hosts"
    assert fault.at.splitlines()[0] == "host 'h1' (node1): onnxruntime is not installed"
    assert "host 'h3' (node3): no room" in fault.at
    assert "host 'h3' (node3): its plan.json is not that of host 'h0' (node0)" in fault.at
    assert "make room" in fault.fix


def test_a_containers_limit_counts_for_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 4096
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 4096
    (tmp_path / "memory.max").write_text("3000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 2000
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


def test_little_shared_memory_is_refused_before_mpi_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_SIZE", raising=False)
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    check_shared_memory(tmp_path)
    monkeypatch.setenv("MPI_LOCALNRANKS", str(10**9))

    with pytest.raises(HostLacks, match=r"ranks of this machine need .* MB of shared memory, .* are free"):
        check_shared_memory(tmp_path)


def test_a_gpu_that_is_not_there_is_lacking(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 1)
    (rank,) = read_plan_folder(folder).plan.ranks
    rewritten(folder, ranks=(structs.replace(rank, kind="gpu", device_index=99),))

    (lack,) = look_around(Job(str(folder), 1, "synthetic"), 0, [0]).lacks

    assert "cpu0" in lack.what and ("CUDA provider" in lack.what or "GPUs" in lack.what)


def test_data_that_another_machine_does_not_see_is_lacking(tmp_path: Path) -> None:
    job = Job(str(linear_all_reduce(tmp_path / "out", 2)), 1, str(tmp_path / "data.npz"))

    assert look_around(job, 0, [0, 1]).lacks == (), "the first rank's daemon says more"
    (lack,) = look_around(job, 1, [1]).lacks
    assert lack.what == f"the data is not there: {tmp_path / 'data.npz'}"


def test_files_memory_and_disk_that_are_lacking_end_a_job_before_it_begins(tmp_path: Path) -> None:
    """Two ranks need 2 TB for a variable, a segment is gone, and another one is not the plan's."""
    folder = linear_all_reduce(tmp_path / "out", 2)
    rewritten(folder, variables=(structs.replace(LINEAR_W, shape=(1 << 36, 2)),))
    runner = Runner(folder)
    gone, changed = sorted((folder / "segments").iterdir())
    gone.unlink()
    changed.write_bytes(b"other")

    with pytest.raises(HostLacks, match="4 things are lacking on 1 host\n") as caught:
        runner.train("synthetic", 2, checkpoints=Checkpoints(str(tmp_path / "kept")))

    for lacking in (
        rf"missing: {gone}",
        rf"was changed: .*{changed}",
        r"its 2 ranks need 2,199\.0 GB",
        r"a checkpoint takes 1,099\.5 GB",
    ):
        assert caught.match(lacking)


def test_a_hosts_environment_reaches_its_ranks_and_its_packages_are_compared(tmp_path: Path) -> None:
    """Host beta's PYTHONPATH has another version of numpy, as far as its metadata say."""
    folder = linear_all_reduce(tmp_path / "out", 2)
    alpha, beta = read_plan_folder(folder).plan.ranks
    rewritten(folder, ranks=(alpha, structs.replace(beta, host="beta")))
    (tmp_path / "numpy-9.9.dist-info").mkdir()
    (tmp_path / "numpy-9.9.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 9.9\n")
    hosts = [{"name": "alpha"}, {"name": "beta", "environment": {"PYTHONPATH": str(tmp_path)}}]
    (folder / "cluster.json").write_text(json.dumps({"hosts": hosts}))

    with pytest.raises(HostLacks, match=r"numpy is 9\.9, host 'alpha' .* has .*\n  at:  host 'beta'"):
        Runner(folder).train("synthetic", 2)


def test_a_hosts_python_and_environment_run_its_ranks(tmp_path: Path) -> None:
    """Beta's interpreter notes that it was called; its ranks' data come from where its environment says."""
    folder = linear_all_reduce(tmp_path / "out", 2)
    alpha, beta = read_plan_folder(folder).plan.ranks
    rewritten(folder, ranks=(alpha, structs.replace(beta, host="beta")))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho called >> {tmp_path}/called\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "seen.py").write_text(
        "import os, pathlib, numpy as np\n"
        "def batches():\n"
        f"    (pathlib.Path({str(tmp_path)!r}) / os.environ['OWN_MARK']).touch()\n"
        "    while True:\n"
        "        yield {'x': np.ones((8, 3)), 'y': np.ones((8, 2))}\n"
    )
    own = {"PYTHONPATH": str(tmp_path)}
    hosts = [
        {"name": "alpha", "environment": own | {"OWN_MARK": "of-alpha"}},
        {"name": "beta", "environment": own | {"OWN_MARK": "of-beta"}, "python": str(python)},
    ]
    (folder / "cluster.json").write_text(json.dumps({"hosts": hosts}))

    Runner(folder).train("seen:batches", 2)

    assert (tmp_path / "of-alpha").exists() and (tmp_path / "of-beta").exists()
    assert (tmp_path / "called").read_text() == "called\n"
