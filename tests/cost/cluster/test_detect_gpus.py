from pathlib import Path

import pytest

from partc.cost.cluster.cluster import detect_gpus, read_resource_file
from partc.runtime.errors import BadCluster


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands, found before all others."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def install(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_another_host_is_asked_through_ssh(command: Path) -> None:
    install(
        command / "ssh", 'case "$*" in *"-o BatchMode=yes"*"10.0.0.7 nvidia-smi"*) printf "0\\n3\\n";; esac'
    )

    assert detect_gpus("10.0.0.7", "line 1") == [0, 3]


def test_a_resource_file_may_leave_ids_out_on_any_host(command: Path) -> None:
    install(command / "ssh", 'printf "0\\n1\\n"')
    path = command / "resource-info.txt"
    path.write_text("10.0.0.1: 4,5\n10.0.0.2\n")

    hosts = read_resource_file(path).hosts

    assert [[device.index for device in host.devices] for host in hosts] == [[4, 5], [0, 1]]


def test_a_host_that_does_not_answer_is_named_with_its_reason(command: Path) -> None:
    install(command / "ssh", 'echo "no route to host" >&2; exit 255')

    with pytest.raises(BadCluster, match=r"10\.0\.0\.7.*no route to host") as caught:
        detect_gpus("10.0.0.7", "line 1")
    assert "`10.0.0.7: 0,1`" in caught.value.fix


def test_a_host_without_gpus_is_refused(command: Path) -> None:
    install(command / "nvidia-smi", "exit 0")

    with pytest.raises(BadCluster, match="no GPU was detected"):
        detect_gpus("localhost", "line 1")
