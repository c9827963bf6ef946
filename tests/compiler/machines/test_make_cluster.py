"""Clusters of what an environment tells: this machine, Slurm, the MPI operator, a resource file."""

from pathlib import Path

import pytest

from partc.compiler.machines import make_cluster as module
from partc.compiler.machines.make_cluster import Wishes, make_cluster
from partc.compiler.machines.this_machine import Hardware, look_at_this_machine, unusable_gpus
from partc.cost.cluster.cluster import Cluster, encode_cluster, read_cluster
from partc.cost.cluster.detect_gpus import Gpu
from partc.runtime.engines.allotted_nodes import HOST_FILES
from partc.runtime.errors import BadCluster, BadUsage
from tests.checks.command_line import EXAMPLES, done, partc, refused

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * 2**20)


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 cores and 32 GB without GPUs, and nobody who allots nodes."""
    for name in (*HOST_FILES, "SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "look_at_this_machine", lambda: Hardware(8, 32 * 10**9))
    has_gpus(monkeypatch)


def has_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    found = list(gpus) or "nvidia-smi is not installed"
    monkeypatch.setattr(module, "detect_gpus", lambda host: found)


def devices(cluster: Cluster) -> list[list[tuple[str, int, int | None]]]:
    return [[(d.profile, d.threads, d.memory_bytes) for d in host.devices] for host in cluster.hosts]


def test_this_machine_has_workers_on_its_cores() -> None:
    cluster = make_cluster("auto", Wishes()).cluster

    assert devices(cluster) == [[("cpu-core", 2, None)] * 4]
    assert (cluster.hosts[0].cores, cluster.hosts[0].memory_bytes) == (8, 32 * 10**9)
    assert devices(make_cluster("machine", Wishes(workers=8)).cluster) == [[("cpu-core", 1, None)] * 8]


def test_gpus_are_used_as_nvidia_smi_tells_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, H100, Gpu(1, "NVIDIA A100-SXM4-40GB", 40960 * 2**20))

    cluster = make_cluster("machine", Wishes()).cluster

    assert devices(cluster) == [[("h100", 1, 81559 * 2**20), ("a100", 1, 40960 * 2**20)]]
    assert devices(make_cluster("machine", Wishes(devices="cpu")).cluster)[0][0][0] == "cpu-core"


def test_a_type_is_asked_for_where_nobody_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, Gpu(0, "NVIDIA GeForce RTX 4090", 24 * 2**30))

    with pytest.raises(BadUsage, match="'NVIDIA GeForce RTX 4090'") as caught:
        make_cluster("machine", Wishes())
    assert "--gpu-type with one of titan-xp" in caught.value.fix

    assert devices(make_cluster("machine", Wishes(gpu_type="a100")).cluster) == [[("a100", 1, None)]]
    with pytest.raises(BadCluster, match="no GPU type 'a10'"):
        make_cluster("machine", Wishes(gpu_type="a10"))


def test_slurms_allocation_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "gpu[08-09],big1",
        "SLURM_JOB_CPUS_PER_NODE": "16(x2),64",
        "SLURM_MEM_PER_NODE": "1024",
    }.items():
        monkeypatch.setenv(name, value)

    made = make_cluster("auto", Wishes(network_bytes_per_s=12.5e9))

    assert made.source == "Slurm's allocation 7"
    assert [host.name for host in made.cluster.hosts] == ["gpu08", "gpu09", "big1"]
    assert {host.address for host in made.cluster.hosts} == {"localhost"}, "whatever nodes a job is allotted"
    assert [host.cores for host in made.cluster.hosts] == [16, 16, 64]
    assert devices(made.cluster)[2] == [("cpu-core", 16, None)] * 4
    assert made.cluster.hosts[0].memory_bytes == 2**30
    assert {link.bytes_per_s for link in made.cluster.links} == {12.5e9}


@pytest.mark.parametrize(("told", "count"), [("a100:2", 2), ("gpu:A100:4", 4)])
def test_slurm_may_tell_the_type_of_gpus(monkeypatch: pytest.MonkeyPatch, told: str, count: int) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "8")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", told)

    assert devices(make_cluster("slurm", Wishes()).cluster) == [[("a100", 1, None)] * count] * 2

    monkeypatch.setenv("SLURM_GPUS_PER_NODE", str(count))
    with pytest.raises(BadUsage, match="type of the GPUs is not known"):
        make_cluster("slurm", Wishes())
    has_gpus(monkeypatch, H100)
    assert {d[0] for d in devices(make_cluster("slurm", Wishes()).cluster)[1]} == {"h100"}


def test_outside_of_an_allocation_slurm_is_refused() -> None:
    with pytest.raises(BadUsage, match="SLURM_JOB_NODELIST is not set\n  at:  --from slurm"):
        make_cluster("slurm", Wishes())


def test_the_mpi_operators_hosts_have_as_many_devices_as_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostfile").write_text("job-worker-0.job slots=2\njob-worker-1.job:2\n")
    monkeypatch.setenv("HYDRA_HOST_FILE", str(tmp_path / "hostfile"))

    made = make_cluster("auto", Wishes())
    assert devices(made.cluster) == [[("cpu-core", 4, None)] * 2] * 2
    assert "every worker's pod has this pod's cores and memory" in made.assumed
    assert "10 Gbit/s between hosts" in made.assumed

    gpus = make_cluster("mpi-operator", Wishes(gpu_type="h200")).cluster
    assert devices(gpus) == [[("h200", 1, None)] * 2] * 2


def test_a_resource_file_keeps_its_addresses(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("10.0.0.1: 0,1\n10.0.0.2: 3\n")

    made = make_cluster(str(path), Wishes(gpu_type="v100", memory_bytes=64 * 10**9))

    assert [(h.address, h.memory_bytes) for h in made.cluster.hosts] == [
        ("10.0.0.1", 64 * 10**9),
        ("10.0.0.2", 64 * 10**9),
    ]
    assert devices(made.cluster) == [[("v100", 1, None)] * 2, [("v100", 1, None)]]
    with pytest.raises(BadUsage, match="no such source"):
        make_cluster("nowhere.txt", Wishes())


@pytest.mark.parametrize(
    ("source", "gpus", "wishes", "option"),
    [
        ("machine", 0, Wishes(devices="cpu", gpus=2, gpu_type="h100"), "--gpus"),
        ("machine", 0, Wishes(gpu_type="h100"), "--gpu-type"),
        ("machine", 1, Wishes(devices="gpu", workers=3), "--workers"),
        ("machine", 1, Wishes(workers=3), "--workers"),
        ("machine", 0, Wishes(network_bytes_per_s=1e9), "--network"),
        ("hosts.txt", 0, Wishes(workers=3), "--workers"),
        ("hosts.txt", 0, Wishes(gpus=2), "--gpus"),
        ("hosts.txt", 0, Wishes(gpu_type="v100"), "--gpu-type"),
        ("hosts.txt", 0, Wishes(devices="cpu"), "--devices"),
    ],
)
def test_a_wish_that_nothing_comes_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, gpus: int, wishes: Wishes, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.txt").write_text("10.0.0.1: 0,1 h100\n10.0.0.2: 3 a100\n")
    has_gpus(monkeypatch, *[H100] * gpus)

    with pytest.raises(BadUsage, match=f"nothing comes of it for .*\n  at:  {option}\n  fix: leave it"):
        make_cluster(source, wishes)


def test_init_writes_a_file_that_compile_reads_and_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster.json"

    shown = done("cluster", "init", "-o", path, "--workers", "3", "--memory", "2GB")

    assert "3 cpu-core, by this machine" in shown
    cluster = read_cluster(path)
    assert (len(cluster.hosts[0].devices), cluster.hosts[0].memory_bytes) == (3, 2 * 10**9)
    assert encode_cluster(cluster) == path.read_bytes()
    refused("cluster", "init", "-o", path, what="a file is there already", fix="--force")
    done("cluster", "init", "-o", path, "--force")
    refused(
        "cluster", "init", "-o", tmp_path / "c", "--devices", "gpu", what="no GPU", fix="--gpus 4 --gpu-type"
    )
    refused("cluster", "init", "-o", tmp_path / "c", "--network", "0", what="0.0 Gbit/s", fix="100")


def test_the_limits_of_a_container_are_those_of_its_processes(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("500000000\n")
    (tmp_path / "meminfo").write_text("MemTotal:       99999999 kB\n")
    assert look_at_this_machine(tmp_path, tmp_path / "meminfo") == Hardware(1, 500000000)

    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\n")
    assert look_at_this_machine(tmp_path, tmp_path / "meminfo").memory_bytes == 1_024_000


def test_gpus_that_cannot_be_used_here_are_told_when_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    here = make_cluster("machine", Wishes(gpus=2, gpu_type="a100")).cluster
    (tmp_path / "here.json").write_bytes(encode_cluster(here))
    done("model", "mlp", "--set", "sizes=6,8,3", "--set", "batch=4", "-o", tmp_path / "f.onnx")
    done("grad", tmp_path / "f.onnx", "--loss", "softmax_cross_entropy", "-o", tmp_path / "t.onnx")

    answer = partc("compile", tmp_path / "t.onnx", "-c", tmp_path / "here.json", "-o", tmp_path / "out")

    assert answer.code == 0
    (warning,) = [line for line in answer.out.splitlines() if line.startswith("warning: ")]
    assert "onnxruntime has no CUDA provider" in warning and "1 more" in warning
    assert "install onnxruntime-gpu" in warning
    assert unusable_gpus(read_cluster(EXAMPLES / "cluster-8x6-titanxp.json")) == [], "elsewhere"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    assert unusable_gpus(here) == [], "whatever nodes are allotted"
