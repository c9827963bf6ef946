"""`partc cluster measure` on this machine."""

from pathlib import Path

import msgspec
import pytest

from partc.compiler.commands.cluster import MeasuredCluster
from partc.cost.cluster.cluster import encode_cluster, read_cluster
from partc.cost.network.fit_links import Line
from partc.runtime.jobs.measure import Timing
from tests.builders.plans.compiled_steps import cluster_of
from tests.checks.command_line import CLUSTER, done, make_mlp, partc, refused


@pytest.mark.long
def test_a_measured_cluster_can_be_compiled_for(tmp_path: Path) -> None:
    told = done("cluster", "measure", CLUSTER, "-o", tmp_path / "measured.json")

    assert "host0 and host1" in told
    assert "all_reduce" in told
    given, found = read_cluster(Path(CLUSTER)), read_cluster(tmp_path / "measured.json")
    assert [link.ends for link in found.links] == [link.ends for link in given.links]
    assert all(
        link.bytes_per_s != old.bytes_per_s for link, old in zip(found.links, given.links, strict=True)
    )
    assert all(host.memory_bytes_per_s != given.hosts[0].memory_bytes_per_s for host in found.hosts)
    assert all(host.cores is not None and 0 < host.cores <= len(host.devices) for host in found.hosts)
    rates = [device.flops_per_s for host in found.hosts for device in host.devices]
    assert all(rate is not None and 1e9 < rate < 1e13 for rate in rates)
    assert [path.name for path in tmp_path.iterdir()] == ["measured.json"]

    train = make_mlp(tmp_path) / "train.onnx"
    done("compile", train, "-c", tmp_path / "measured.json", "-o", tmp_path / "out")


def test_what_the_fit_does_not_explain_is_warned_of() -> None:
    """As on a machine that was busy with something else."""
    lines = {("host0", "host0"): Line(1e-6, 1e9, 0.9), ("host0", "host1"): Line(1e-5, 1e8, 5.37)}
    times_s = {"all_reduce": (6.6e-3, 0.4e-3), "all_gather": (1e-4, 1.9e-4)}
    checks = tuple((Timing(kind, (0, 0), 1 << 16, took_s), s) for kind, (took_s, s) in times_s.items())

    warnings = MeasuredCluster(cluster_of("2x1"), lines, checks).record("measured.json").warnings

    assert [warning.replace("\u00a0", " ") for warning in warnings] == [
        "messages between host0 and host1 are up to 537 % off what is written of them: "
        "measure again with nothing else running on these hosts, and a core for each worker",
        "all_reduce of 65.5 kB took 6.60 ms, predicted 400 µs: "
        "measure again with nothing else running on these hosts, and a core for each worker",
    ]


def test_one_device_is_refused(tmp_path: Path) -> None:
    cluster = msgspec.structs.replace(cluster_of("1x1"), links=(), switches=())
    (tmp_path / "one.json").write_bytes(encode_cluster(cluster))

    wrong = ("cluster", "measure", tmp_path / "one.json", "-o", tmp_path / "measured.json")
    refused(*wrong, what="nobody to send to", at="hosts", fix="two devices")
    assert not (tmp_path / "measured.json").exists()


def test_a_host_that_is_not_there_is_named(tmp_path: Path) -> None:
    cluster = cluster_of("2x1")
    hosts = tuple(msgspec.structs.replace(host, address="no.such.host.invalid") for host in cluster.hosts)
    (tmp_path / "far.json").write_bytes(encode_cluster(msgspec.structs.replace(cluster, hosts=hosts)))

    wrong = ("cluster", "measure", tmp_path / "far.json", "-o", tmp_path / "measured.json")
    answer = partc(*wrong)
    assert answer.code == 1
    assert "at:  address 'no.such.host.invalid'" in answer.error
    assert not (tmp_path / "measured.json").exists()
