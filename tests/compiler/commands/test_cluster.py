"""`partc cluster measure` on this machine."""

from pathlib import Path

import msgspec
import pytest

from partc.cost.cluster.cluster import encode_cluster, read_cluster
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
