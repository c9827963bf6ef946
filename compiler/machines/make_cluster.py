"""Make a cluster of what an environment tells: this machine, Slurm, the MPI operator, a resource file.

                 hosts                        devices                              memory
this machine     one                          its GPUs, or workers on its cores    its own
Slurm            SLURM_JOB_NODELIST           SLURM_GPUS_ON_NODE, .._CPUS_..       SLURM_MEM_PER_NODE
MPI operator     the file of hosts            as many as a host has slots          this machine's
resource file    its lines, at their address  its GPU ids                          256 GiB

Hosts of Slurm and of the MPI operator have no address: whatever nodes a job is allotted take their places.
The network is assumed, unless it is told: `partc cluster measure` finds how quick it is.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from partc.compiler.machines.nvlinks import PCIE_ASSUMED, detect_nvlinks, join_gpus
from partc.compiler.machines.this_machine import Hardware, look_at_this_machine, short_name
from partc.compiler.report.units import plural
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster, read_resource_file
from partc.cost.cluster.detect_gpus import GPU_TYPES, Gpu, check_gpu_type, detect_gpus
from partc.cost.cluster.machines import Device, Host, Link
from partc.runtime.engines.allotted_nodes import allotted_slots, spell_out_counts, spell_out_nodes
from partc.runtime.errors import BadUsage

SWITCH = "switch"
NETWORK_BYTES_PER_S = 1.25e9
LATENCY_S = 25e-6  # of each link to the switch
MOST_WORKERS = 4  # on a host's cores, unless another number is asked for

Kind = Literal["cpu", "gpu"]

# Wish -> its option, and what to do where a cluster has no place for it.
_OPTIONS = {
    "devices": ("--devices", "edit the file: it names the GPUs"),
    "workers": ("--workers", "say --devices cpu"),
    "gpus": ("--gpus", "leave --devices out; a resource file names GPUs itself"),
    "gpu_type": (
        "--gpu-type",
        "say how many GPUs each host has, --gpus; or edit the resource file",
    ),
    "network_bytes_per_s": ("--network", "describe several hosts: --from with a resource file"),
}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user says besides. None: as the environment tells.

    devices    what is to compute        workers             on each host's cores
    gpus       of each host              network_bytes_per_s between two hosts
    gpu_type   of all GPUs               memory_bytes        of each host
    """

    devices: Kind | None = None
    workers: int | None = None
    gpus: int | None = None
    gpu_type: str | None = None
    memory_bytes: int | None = None
    network_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class MadeCluster:
    """A cluster, where it comes from, and what of it nobody told, in sentences."""

    cluster: Cluster
    source: str
    assumed: tuple[str, ...]


@dataclass
class _Environment:
    """What an environment tells of the hosts."""

    source: str
    hosts: dict[str, Hardware]
    workers: dict[str, int] = field(default_factory=dict)  # host -> how many, where that is told
    gpu_type: str | None = None  # as the environment calls it
    assumed: list[str] = field(default_factory=list)


def make_cluster(source: str, wishes: Wishes) -> MadeCluster:
    """Make a cluster of `auto`, `machine`, `slurm`, `mpi-operator`, or the path of a resource file.

    Raises BadUsage, BadCluster.
    """
    if wishes.gpu_type is not None:
        check_gpu_type(wishes.gpu_type, "--gpu-type")
    if source == "auto":
        source = _what_there_is()
    is_file = source not in ("machine", "slurm", "mpi-operator")
    made = _of_resource_file(Path(source), wishes) if is_file else _of_environment(source, wishes)
    _refuse_unused(wishes, made, is_file)
    return made


def _of_environment(source: str, wishes: Wishes) -> MadeCluster:
    environment = {"machine": _this_machine, "slurm": _slurm, "mpi-operator": _mpi_operator}[source]()
    hosts = tuple(_host(name, hardware, environment, wishes) for name, hardware in environment.hosts.items())
    if source == "machine":
        return _one_host(hosts[0], environment)
    return _joined(hosts, environment.source, environment.assumed, wishes)


def _refuse_unused(wishes: Wishes, made: MadeCluster, is_file: bool) -> None:
    """Refuse wishes that nothing came of. Raises BadUsage."""
    devices = [device for host in made.cluster.hosts for device in host.devices]
    kinds = {device.kind for device in devices}
    used = {
        "devices": wishes.devices is None or kinds == {wishes.devices},
        "workers": "cpu" in kinds,
        "gpus": not is_file and ("gpu" in kinds or wishes.gpus == 0),
        "gpu_type": any(device.profile == wishes.gpu_type for device in devices),
        "network_bytes_per_s": len(made.cluster.hosts) > 1,
    }
    hosts = plural(len(made.cluster.hosts), "host")
    what = f"{hosts} with {' and '.join(sorted(kinds))} devices, by {made.source}"
    for name, is_used in used.items():
        if getattr(wishes, name) is not None and not is_used:
            option, instead = _OPTIONS[name]
            raise BadUsage(f"nothing comes of it for {what}", at=option, fix=f"leave it out, or {instead}")


def _what_there_is() -> str:
    if "SLURM_JOB_ID" in os.environ and "SLURM_JOB_NODELIST" in os.environ:
        return "slurm"
    return "mpi-operator" if allotted_slots() else "machine"


def _one_host(host: Host, environment: _Environment) -> MadeCluster:
    """Return this machine, whose GPUs NVLink may join."""
    has_gpus = any(device.kind == "gpu" for device in host.devices)
    switches, links = join_gpus(host.name, host.devices, detect_nvlinks() if has_gpus else {})
    cluster = Cluster(CLUSTER_FORMAT, host.name, (host,), switches=switches, links=links)
    assumed = (*environment.assumed, PCIE_ASSUMED) if links else tuple(environment.assumed)
    return MadeCluster(cluster, environment.source, assumed)


def _joined(hosts: Sequence[Host], source: str, assumed: Sequence[str], wishes: Wishes) -> MadeCluster:
    """Join hosts by one switch, if they are several."""
    if len(hosts) == 1:
        return MadeCluster(Cluster(CLUSTER_FORMAT, hosts[0].name, tuple(hosts)), source, tuple(assumed))
    rate = wishes.network_bytes_per_s or NETWORK_BYTES_PER_S
    network = [] if wishes.network_bytes_per_s else [f"{rate * 8 / 1e9:g} Gbit/s between hosts"]
    links = tuple(Link((host.name, SWITCH), bytes_per_s=rate, latency_s=LATENCY_S) for host in hosts)
    cluster = Cluster(CLUSTER_FORMAT, f"{len(hosts)} hosts", tuple(hosts), switches=(SWITCH,), links=links)
    return MadeCluster(cluster, source, (*assumed, *network, "50 microseconds from host to host"))


# ---------------------------------------------------------------- what environments tell


def _this_machine() -> _Environment:
    return _Environment("this machine", {short_name(): look_at_this_machine()})


def _slurm() -> _Environment:
    nodes = spell_out_nodes(_variable("SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST")
    cores_text = os.environ.get("SLURM_JOB_CPUS_PER_NODE") or _variable("SLURM_CPUS_ON_NODE")
    cores = spell_out_counts(cores_text, "SLURM_JOB_CPUS_PER_NODE")
    cores = cores if len(cores) == len(nodes) else cores[:1] * len(nodes)
    gpus, gpu_type = _slurm_gpus()
    here = look_at_this_machine()
    environment = _Environment(
        f"Slurm's allocation {os.environ.get('SLURM_JOB_ID', '')}".rstrip(), {}, gpu_type=gpu_type
    )
    for node, count in zip(nodes, cores, strict=True):
        environment.hosts[node] = Hardware(count, _slurm_memory_bytes(count) or here.memory_bytes, gpus)
    if not _slurm_memory_bytes(1):
        environment.assumed.append("every host has this machine's memory")
    return environment


def _slurm_gpus() -> tuple[int, str | None]:
    """Return how many GPUs a node has, and their type if it is said: `4`, `a100:4`, `gpu:a100:4`."""
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if text := os.environ.get(name):
            kind, _, count = text.rpartition(":")
            if count.isdigit():
                return int(count), kind.rpartition(":")[2] or None
    return 0, None


def _slurm_memory_bytes(cores: int) -> int:
    for name, factor in (("SLURM_MEM_PER_NODE", 1), ("SLURM_MEM_PER_CPU", cores)):
        if (text := os.environ.get(name, "")).isdigit() and int(text):
            return int(text) * 2**20 * factor
    return 0


def _mpi_operator() -> _Environment:
    slots = allotted_slots()
    if not slots:
        raise BadUsage(
            "no file of hosts",
            at="--from mpi-operator",
            fix="run it in the launcher's pod of an MPIJob, where HYDRA_HOST_FILE, or its like, names one",
        )
    here = look_at_this_machine()
    hosts = {name: Hardware(max(here.cores, count), here.memory_bytes) for name, count in slots.items()}
    assumed = ["every worker's pod has this pod's cores and memory"]
    return _Environment("the MPI operator's file of hosts", hosts, dict(slots), assumed=assumed)


def _variable(name: str) -> str:
    text = os.environ.get(name)
    if not text:
        raise BadUsage(
            f"{name} is not set",
            at="--from slurm",
            fix="run it in an allocation: `salloc -N 2`, or a batch job",
        )
    return text


# ---------------------------------------------------------------- hosts


def _host(name: str, hardware: Hardware, environment: _Environment, wishes: Wishes) -> Host:
    """Return a host with its GPUs, if it has any, or else with workers on its cores."""
    memory_bytes = wishes.memory_bytes or hardware.memory_bytes
    gpus = [] if wishes.devices == "cpu" else _gpus(name, hardware, environment, wishes)
    if gpus:
        return Host(name, tuple(gpus), memory_bytes=memory_bytes)
    if wishes.devices == "gpu":
        raise BadUsage(
            f"no GPU is known of {name!r}",
            at="--devices gpu",
            fix="say how many each host has: --gpus 4 --gpu-type a100",
        )
    count = wishes.workers or environment.workers.get(name) or min(MOST_WORKERS, hardware.cores)
    threads = max(1, hardware.cores // count)
    cpus = (Device(f"{name}/cpu{i}", "cpu", "cpu-core", threads=threads) for i in range(count))
    return Host(name, tuple(cpus), memory_bytes=memory_bytes, cores=float(hardware.cores))


def _gpus(name: str, hardware: Hardware, environment: _Environment, wishes: Wishes) -> list[Device]:
    here = detect_gpus("localhost")
    detected = here if isinstance(here, list) else []
    if wishes.gpus is not None:
        count = wishes.gpus
    elif hardware.gpus is not None:
        count = hardware.gpus
    elif environment.workers:  # pods: this one, the launcher's, is not one of them
        count = environment.workers[name] if wishes.devices == "gpu" or wishes.gpu_type else 0
    else:
        count = len(detected)
    known = {gpu.index: gpu for gpu in detected}
    alike = detected[0] if detected else Gpu(0)
    gpus = [known.get(index, Gpu(index, alike.name, alike.memory_bytes)) for index in range(count)]
    return [
        Device(
            f"{name}/gpu{gpu.index}",
            "gpu",
            _profile(gpu, environment, wishes),
            index=gpu.index,
            memory_bytes=gpu.memory_bytes if wishes.gpu_type in (None, gpu.profile) else None,
        )
        for gpu in gpus
    ]


def _profile(gpu: Gpu, environment: _Environment, wishes: Wishes) -> str:
    named = environment.gpu_type.lower() if environment.gpu_type else None
    profile = wishes.gpu_type or gpu.profile or (named if named in GPU_TYPES else None)
    if profile is None:
        called = gpu.name or environment.gpu_type
        raise BadUsage(
            f"the type of the GPUs is not known{f': they are called {called!r}' if called else ''}",
            at="partc cluster init",
            fix=f"say which is nearest: --gpu-type with one of {', '.join(GPU_TYPES)}",
        )
    return profile


def _of_resource_file(path: Path, wishes: Wishes) -> MadeCluster:
    if not path.is_file():
        raise BadUsage(
            f"no such source: {path}",
            at="--from",
            fix="use machine, slurm, mpi-operator, or the path of a resource file",
        )
    read = read_resource_file(path, wishes.gpu_type)
    memory = [] if wishes.memory_bytes else ["256 GiB of memory on every host"]
    hosts = [
        msgspec.structs.replace(host, memory_bytes=wishes.memory_bytes or host.memory_bytes)
        for host in read.hosts
    ]
    return _joined(hosts, f"the resource file {path}", memory, wishes)
