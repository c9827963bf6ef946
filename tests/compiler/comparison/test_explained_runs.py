"""Real runs of plans that were made for other machines: what is wrong with the file is what is named."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.namespaces import Network, namespace_hosts
from partc.compiler import api
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host
from partc.cost.cluster.profiles import PROFILES
from partc.cost.cluster.vary_cluster import with_link_rates
from partc.cost.step_account import Difference, MeasuredRun
from tests.builders.plans.wide_mlp import wide_mlp
from tests.checks.command_line import done

BITS_PER_S = 1e8
pytestmark = pytest.mark.long


def run_of(out: Path, steps: int) -> tuple[MeasuredRun, str]:
    told = done("run", out, "--steps", steps).strip().splitlines()[-1]
    return msgspec.json.decode((out / "measured.json").read_bytes(), type=MeasuredRun), told


def seconds_of(run: MeasuredRun, *kinds: str) -> tuple[float, float]:
    """Return what kinds of terms take, predicted and measured."""
    found: list[Difference] = [d for d in run.differences if d.kind in kinds]
    return sum(d.before_s for d in found), sum(d.after_s for d in found)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="making network namespaces needs root and iproute2"
)
def test_links_of_a_tenth_of_the_rate_that_the_file_says_are_named(tmp_path: Path) -> None:
    step = wide_mlp(sizes=(512, 2048, 512))
    with namespace_hosts(2, 1, BITS_PER_S, Network("pwi", "10.213.11")) as cluster:
        api.compile(step, with_link_rates(cluster, 10), tmp_path / "out", strategy="allreduce")
        run, told = run_of(tmp_path / "out", 12)

    assert "because AllReduce went at " in told
    assert run.differences[0].kind == "transfer"
    worst = max(run.differences, key=lambda difference: difference.bytes)  # a short sum may wait behind it
    assert worst.link == f"{cluster.hosts[0].name} -> {cluster.hosts[1].name}" or worst.link in told
    # What the bucket filter lets through, of 12.5 MB/s: headers take a little, and others' work on this
    # machine more; the 125 MB/s that were believed are ten times that.
    assert worst.after_bytes_per_s is not None and 0.2 < worst.after_bytes_per_s / (BITS_PER_S / 8) < 1.1


def test_a_device_far_slower_than_believed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PROFILES["cpu-core"]
    believed = replace(
        real,
        matmul_flops_per_s=25 * real.matmul_flops_per_s,
        memory_bytes_per_s=25 * real.memory_bytes_per_s,
        node_s=real.node_s / 25,
        start_s=real.start_s / 25,
    )
    monkeypatch.setitem(PROFILES, "cpu-core", believed)
    host = Host("here", (Device("cpu0", "cpu", "cpu-core"),), memory_bytes=2**32, memory_bytes_per_s=1e12)
    alone = Cluster(CLUSTER_FORMAT, "alone", (host,))

    api.compile(wide_mlp(sizes=(512, 2048, 512)), alone, tmp_path / "out", sizes={"batch": 256})
    run, told = run_of(tmp_path / "out", 20)

    before_s, after_s = seconds_of(run, "compute")
    # It would be 25 times on the profile's own cores: quicker ones take some of that. None is too many, for
    # others' work on this machine slows segments down.
    assert after_s > 4 * before_s
    cores_s = seconds_of(run, "core")[1]
    assert "segment S1 " in told or cores_s > after_s - before_s  # others use this machine, too
