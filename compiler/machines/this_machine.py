"""What this process may use of the machine it runs on: cores and memory, within a container; and its GPUs."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from partc.cost.cluster.cluster import Cluster
from partc.runtime.engines.allotted_nodes import allotted_nodes
from partc.runtime.engines.host_check import gpu_lacks
from partc.runtime.errors import BadUsage

_GROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Hardware:
    """Of one machine. `cores`: as many threads as can run at once; `gpus`: how many; None: not known."""

    cores: int
    memory_bytes: int
    gpus: int | None = None


def look_at_this_machine(group: Path = _GROUP, meminfo: Path = _MEMINFO) -> Hardware:
    """Return the cores and memory that this process may use."""
    return Hardware(_cores(group), _memory_bytes(group, meminfo))


def short_name() -> str:
    """Return this machine's name without its domain."""
    return socket.gethostname().partition(".")[0] or "host"


def _cores(group: Path) -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no limit reads "max 100000"
        quota, period = (group / "cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count


def _memory_bytes(group: Path, meminfo: Path) -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):  # no limit reads "max"
        limits.append(int((group / "memory.max").read_text()))
    with suppress(OSError):
        lines = meminfo.read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    return min(limits)


_HERE = ("localhost", "127.0.0.1", "::1")


def unusable_gpus(cluster: Cluster) -> list[str]:
    """Return a sentence where this machine has no use for GPUs that are to be its own; `partc run` refuses.

    Hosts without an address are this machine, unless a batch system allots nodes: those are looked at by the
    ranks there, before their first step.
    """
    here = (*_HERE, socket.gethostname())
    devices = [
        device
        for host in cluster.hosts
        if host.address in here
        for device in host.devices
        if device.kind == "gpu"
    ]
    if not devices or _has_nodes():
        return []
    for device in devices:
        for lack in gpu_lacks(device.name, device.index):
            others = f", as do {len(devices) - 1} more" if len(devices) > 1 else ""
            return [
                f"here, `partc run` will be refused: {lack.what}{others}. To run here, {lack.fix}; to run "
                "elsewhere, write the hosts' addresses in the cluster file"
            ]
    return []


def _has_nodes() -> bool:
    try:
        return bool(allotted_nodes())
    except BadUsage:
        return True
