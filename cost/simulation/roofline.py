"""What a segment takes on a device, from its work and the device's rates.

    t = o + v V + s S + k N + K         a CPU
    t = o + v V + s S + max(k N, K)     a GPU, whose launches overlap with kernels
    K = sum of t_i + max((B - M) / b, F / f + P / c) + M / b    P / c on a CPU alone

o  starting a segment          V  values that it reads and writes
k  starting a node             N  nodes
t_i  of a kernel that was measured (measured_kernels.py), beyond starting it; what follows is of the others
s  putting an id in order      S  ids that are put in order
f  flops a second              F  flops
b  bytes of memory a second    B  bytes that nodes read and write, M of them by nodes that memory holds up
c  of these, its own cores'     P  bytes of matrices that products arrange anew

The last two terms of K are the roofline (Williams, Waterman and Patterson, CACM 52 (2009) 65-76) of products,
and of all that only streams through memory: one does not hide the other, for nodes run one after the other.
Before a CPU's product multiplies, it packs its second factor, however few rows the first has (as GotoBLAS:
Goto and van de Geijn, ACM TOMS 34 (2008), article 12), mostly from a cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from partc.cost.cluster.cluster import Cluster, ClusterRank
from partc.cost.cluster.profiles import PER_SORTED_ID_S, PER_VALUE_S, PROFILES, DeviceProfile
from partc.cost.simulation.measured_kernels import NO_TIMES, KernelTimes
from partc.runtime.plan.program import ABSORBED, KernelWork, Rank, Run


@dataclass(frozen=True, slots=True)
class _Rates:
    """What a rank's device does in a second: of its threads together for a CPU."""

    profile: DeviceProfile
    threads: int
    flops_per_s: float
    bytes_per_s: float
    packed_bytes_per_s: float


class CountedWork(Protocol):
    """What nodes do together: see Run, which has these fields."""

    @property
    def flops(self) -> int:
        """Return operations."""

    @property
    def touched_bytes(self) -> int:
        """Return bytes read and written."""

    @property
    def streamed_bytes(self) -> int:
        """Return bytes of nodes that memory holds up."""

    @property
    def nodes(self) -> int:
        """Return how many nodes."""

    @property
    def sorted_ids(self) -> int:
        """Return how many ids are put in order."""

    @property
    def packed_bytes(self) -> int:
        """Return bytes of second factors of products."""

    @property
    def kernels(self) -> Sequence[KernelWork]:
        """Return of all that, what could be measured by itself."""


def run_s(run: Run, rank: Rank, cluster: Cluster, times: KernelTimes = NO_TIMES) -> float:
    """Return how long a segment takes on a rank's device."""
    values_s = (len(run.reads) + len(run.writes)) * PER_VALUE_S
    return start_s(rank, cluster) + values_s + work_s(run, rank, cluster, times, run.one_thread)


def start_s(rank: Rank | ClusterRank, cluster: Cluster) -> float:
    """Return how long starting a segment takes on a rank's device."""
    return _rates(rank, cluster).profile.start_s


def work_s(
    work: CountedWork,
    rank: Rank | ClusterRank,
    cluster: Cluster,
    times: KernelTimes = NO_TIMES,
    one_thread: bool = False,
) -> float:
    """Return how long nodes take on a rank's device, once their segment has been started."""
    return max(apart_s(work, rank, cluster, times, one_thread))


def apart_s(
    work: CountedWork,
    rank: Rank | ClusterRank,
    cluster: Cluster,
    times: KernelTimes = NO_TIMES,
    one_thread: bool = False,
) -> tuple[float, float]:
    """Return the seconds that the host launches nodes for, none on a CPU, and those that they compute."""
    rates = _rates(rank, cluster, one_thread)
    measured = times.on((rank.kind, rates.profile.name, rates.threads))
    measured_s, rest = _take(work, measured) if measured else (0.0, work)
    products_s = max(
        rest.flops / rates.flops_per_s + rest.packed_bytes / rates.packed_bytes_per_s,
        (rest.touched_bytes - rest.streamed_bytes) / rates.bytes_per_s,
    )
    kernels_s = measured_s + products_s + rest.streamed_bytes / rates.bytes_per_s
    nodes_s = work.nodes * rates.profile.node_s
    sorting_s = rest.sorted_ids * PER_SORTED_ID_S
    if rank.kind == "gpu":
        return sorting_s + nodes_s, sorting_s + kernels_s
    return 0.0, sorting_s + nodes_s + kernels_s


@dataclass(frozen=True, slots=True)
class _Rest:
    """What is left of work without the kernels that were measured."""

    flops: int
    touched_bytes: int
    streamed_bytes: int
    sorted_ids: int
    packed_bytes: int


def _take(work: CountedWork, seconds: Mapping[str, float]) -> tuple[float, _Rest]:
    """Return what the measured kernels among the work take, and the rest of it."""
    measured_s = 0.0
    flops, touched, streamed = work.flops, work.touched_bytes, work.streamed_bytes
    sorted_ids, packed = work.sorted_ids, work.packed_bytes
    for kernel in work.kernels:
        kernel_s = 0.0 if kernel.key == ABSORBED else seconds.get(kernel.key)
        if kernel_s is not None:
            measured_s += kernel.count * kernel_s
            flops, touched = flops - kernel.flops, touched - kernel.touched_bytes
            streamed, sorted_ids = streamed - kernel.streamed_bytes, sorted_ids - kernel.sorted_ids
            packed -= kernel.packed_bytes
    return measured_s, _Rest(flops, touched, streamed, sorted_ids, packed)


def node_s(
    flops: int, touched_bytes: int, packed_bytes: int = 0, *, rank: Rank | ClusterRank, cluster: Cluster
) -> float:
    """Return how long a single node takes on a rank's device."""
    rates = _rates(rank, cluster)
    product_s = flops / rates.flops_per_s + packed_bytes / rates.packed_bytes_per_s
    return rates.profile.node_s + max(product_s, touched_bytes / rates.bytes_per_s)


def _rates(rank: Rank | ClusterRank, cluster: Cluster, one_thread: bool = False) -> _Rates:
    """Return the rates of a rank's device; its host's memory limits a CPU's."""
    host = next(host for host in cluster.hosts if host.name == rank.host)
    device = next((device for device in host.devices if device.name == rank.device), None)
    profile = PROFILES[device.profile if device else "cpu-core"]
    threads = (1 if one_thread else rank.threads) if rank.kind == "cpu" else 1
    bytes_per_s, packed_bytes_per_s = profile.memory_bytes_per_s * threads, inf
    if rank.kind == "cpu":
        packed_bytes_per_s = bytes_per_s
        bytes_per_s = min(bytes_per_s, host.memory_bytes_per_s)
    flops_per_s = (device.flops_per_s if device else None) or profile.matmul_flops_per_s
    return _Rates(profile, threads, flops_per_s * threads, bytes_per_s, packed_bytes_per_s)
