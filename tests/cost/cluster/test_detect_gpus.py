import re
from pathlib import Path

import pytest

from partc.cost.cluster.cluster import read_resource_file
from partc.cost.cluster.detect_gpus import Gpu, detect_gpus, gpus_of
from partc.runtime.errors import BadCluster

H100 = "0, NVIDIA H100 80GB HBM3, 81559"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands, found before all others."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def install(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def resource_file(folder: Path, text: str) -> Path:
    path = folder / "resource-info.txt"
    path.write_text(text)
    return path


def test_another_host_is_asked_through_ssh(command: Path) -> None:
    install(
        command / "ssh",
        'case "$*" in *"-o BatchMode=yes"*"10.0.0.7 nvidia-smi"*) printf "0, Tesla K80, 11441\\n3\\n";; esac',
    )

    assert detect_gpus("10.0.0.7") == [Gpu(0, "Tesla K80", 11441 * 2**20), Gpu(3)]


def test_a_resource_file_may_leave_ids_and_types_out_on_any_host(command: Path) -> None:
    install(
        command / "ssh",
        f'printf "{H100}\\n1, NVIDIA H200, 143771\\n4, NVIDIA A100-SXM4-80GB, 81920\\n"',
    )

    hosts = read_resource_file(resource_file(command, "10.0.0.1: 4\n10.0.0.2\n10.0.0.3: 0,1 v100\n")).hosts

    devices = [[(device.index, device.profile) for device in host.devices] for host in hosts]
    assert devices == [[(4, "a100")], [(0, "h100"), (1, "h200"), (4, "a100")], [(0, "v100"), (1, "v100")]]
    assert hosts[0].devices[0].memory_bytes == 81920 * 2**20, "not that of the type's smaller product"
    assert hosts[2].devices[0].memory_bytes is None, "nobody was asked"


@pytest.mark.parametrize(
    ("product", "profile"),
    [
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla P100-SXM2-16GB", "p100-sxm2"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("NVIDIA TITAN Xp", "titan-xp"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_products_have_profiles_or_none(product: str, profile: str | None) -> None:
    assert Gpu(0, product).profile == profile


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ('printf "0, NVIDIA GeForce RTX 4090, 24564\\n"', "it is called 'NVIDIA GeForce RTX 4090'"),
        ('echo "no route to host" >&2; exit 255', "no route to host"),
    ],
)
def test_a_type_that_nobody_knows_is_asked_for_not_assumed(command: Path, script: str, what: str) -> None:
    install(command / "ssh", script)

    with pytest.raises(BadCluster, match=re.escape(what)) as caught:
        read_resource_file(resource_file(command, "10.0.0.7: 0\n"))
    assert "the type of GPU 0 of '10.0.0.7'" in caught.value.what
    assert "`10.0.0.7: 0 a100`" in caught.value.fix and "--gpu-type" in caught.value.fix


def test_a_wrong_type_names_the_nearest(command: Path) -> None:
    with pytest.raises(BadCluster, match="no GPU type 'h10'") as caught:
        read_resource_file(resource_file(command, "10.0.0.7: 0 h10\n"))
    assert "'h100' is the nearest" in caught.value.fix


def test_a_host_that_does_not_answer_is_named_with_its_reason(command: Path) -> None:
    install(command / "ssh", 'echo "no route to host" >&2; exit 255')

    with pytest.raises(BadCluster, match=r"10\.0\.0\.7.*no route to host") as caught:
        gpus_of("10.0.0.7", "line 1", None, None)
    assert "`10.0.0.7: 0,1 a100`" in caught.value.fix


def test_a_host_without_gpus_is_refused(command: Path) -> None:
    install(command / "nvidia-smi", "exit 0")

    with pytest.raises(BadCluster, match="no GPU was detected"):
        gpus_of("localhost", "line 1", None, "a100")
