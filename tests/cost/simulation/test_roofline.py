"""What a segment is priced at, term by term: seconds follow from the work and the profile's rates."""

import msgspec
import pytest

from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster, ranks_of
from partc.cost.cluster.machines import Device, Host
from partc.cost.cluster.profiles import PER_SORTED_ID_S, PER_VALUE_S, PROFILES
from partc.cost.simulation.measured_kernels import NO_TIMES, KernelTimes
from partc.cost.simulation.roofline import node_s, run_s
from partc.runtime.plan.program import ABSORBED, KernelWork, Rank, Run

EMPTY = Run("worker", "segments/s.onnx", reads=(), writes=())


def cluster_of(kind: str, profile: str) -> Cluster:
    device = Device("h/d", "gpu" if kind == "gpu" else "cpu", profile)
    return Cluster(CLUSTER_FORMAT, "one", (Host("h", (device,), memory_bytes=2**34),))


def price(kind: str, profile: str, times: KernelTimes = NO_TIMES, **work: object) -> float:
    """Return what work takes beyond the start of its segment."""
    cluster = cluster_of(kind, profile)
    placed = ranks_of(cluster)[0]
    rank = Rank(
        rank=0,
        host=placed.host,
        device=placed.device,
        kind=placed.kind,
        device_index=0,
        threads=1,
        sites=placed.sites,
        replica=0,
        groups={},
        constants={},
        slices=(),
        pieces=(),
    )
    run = msgspec.structs.replace(EMPTY, **work)
    return run_s(run, rank, cluster, times) - run_s(EMPTY, rank, cluster, times)


def test_every_node_costs_something_on_a_cpu_besides_what_it_computes() -> None:
    cpu = PROFILES["cpu-core"]
    second = round(cpu.matmul_flops_per_s)

    few = price("cpu", "cpu-core", flops=second, nodes=1)
    many = price("cpu", "cpu-core", flops=second, nodes=1001)

    assert many - few == pytest.approx(1000 * cpu.node_s)
    assert few == pytest.approx(1.0, rel=1e-4)


def test_launches_on_a_gpu_overlap_with_kernels() -> None:
    gpu = PROFILES["v100"]
    launches_s = 1000 * gpu.node_s
    longer = round(2 * launches_s * gpu.matmul_flops_per_s)

    assert price("gpu", "v100", nodes=1000) == pytest.approx(launches_s)
    assert price("gpu", "v100", nodes=1000, flops=longer) == pytest.approx(2 * launches_s, rel=1e-3)


def test_products_do_not_hide_what_streams_through_memory() -> None:
    cpu = PROFILES["cpu-core"]
    flops, nbytes = round(cpu.matmul_flops_per_s), round(cpu.memory_bytes_per_s)

    products = price("cpu", "cpu-core", flops=flops, touched_bytes=nbytes)
    streams = price("cpu", "cpu-core", flops=flops, touched_bytes=nbytes, streamed_bytes=nbytes)

    assert products == pytest.approx(1.0, rel=1e-4)
    assert streams == pytest.approx(2.0, rel=1e-4)


def test_a_cpu_packs_a_factor_before_it_multiplies() -> None:
    cpu = PROFILES["cpu-core"]
    flops, nbytes = round(cpu.matmul_flops_per_s), round(cpu.memory_bytes_per_s)

    packed = price("cpu", "cpu-core", flops=flops, packed_bytes=nbytes)
    hidden = price("cpu", "cpu-core", flops=flops, touched_bytes=3 * nbytes, packed_bytes=nbytes)

    assert packed == pytest.approx(2.0, rel=1e-4)
    assert hidden == pytest.approx(3.0, rel=1e-4)
    assert price("gpu", "v100", flops=flops, packed_bytes=nbytes) == price("gpu", "v100", flops=flops)


def test_a_node_packs_as_a_segment_does() -> None:
    cluster = cluster_of("cpu", "cpu-core")

    packed_s = node_s(10**9, 10**6, 10**8, rank=ranks_of(cluster)[0], cluster=cluster)

    priced_s = price("cpu", "cpu-core", flops=10**9, touched_bytes=10**6, packed_bytes=10**8, nodes=1)
    assert packed_s == pytest.approx(priced_s)


def test_values_are_bound_and_ids_are_sorted_one_by_one() -> None:
    pairs = tuple((f"i{number}", f"v{number}") for number in range(10))

    assert price("cpu", "cpu-core", reads=pairs, writes=pairs[:5]) == pytest.approx(15 * PER_VALUE_S)
    assert price("cpu", "cpu-core", sorted_ids=1000) == pytest.approx(1000 * PER_SORTED_ID_S)


def test_a_single_node_starts_no_segment() -> None:
    cluster = cluster_of("cpu", "cpu-core")

    assert node_s(0, 0, rank=ranks_of(cluster)[0], cluster=cluster) == PROFILES["cpu-core"].node_s


# ---------------------------------------------------------------- measured kernels

WORK = {
    "flops": 9_000_000,
    "touched_bytes": 3_000_000,
    "streamed_bytes": 2_000_000,
    "nodes": 9,
    "sorted_ids": 50,
    "packed_bytes": 900_000,
    "kernels": (
        KernelWork("known", 3, 4_000_000, 1_000_000, 500_000, 20, 600_000),
        KernelWork("other", 2, 1_000_000, 800_000, 700_000, 10),
        KernelWork(ABSORBED, 1, 0, 300_000, 300_000, 0),
    ),
}


def test_measured_kernels_take_the_place_of_their_work() -> None:
    cpu = PROFILES["cpu-core"]
    rest = {
        "flops": 5_000_000,
        "touched_bytes": 1_700_000,
        "streamed_bytes": 1_200_000,
        "sorted_ids": 30,
        "packed_bytes": 300_000,
    }
    times = KernelTimes({("cpu", "cpu-core", 1): {"known": 7e-3, "never asked for": 1.0}}, "x")

    priced = price("cpu", "cpu-core", times, **WORK)

    assert priced == pytest.approx(3 * 7e-3 + price("cpu", "cpu-core", nodes=9, **rest))
    assert priced - price("cpu", "cpu-core", times, **(WORK | {"nodes": 0})) == pytest.approx(9 * cpu.node_s)


def test_measured_kernels_overlap_with_launches_on_a_gpu() -> None:
    gpu = PROFILES["p100"]
    quick = KernelTimes({("gpu", "p100", 1): {"known": 0.0, "other": 0.0}}, "x")
    slow = KernelTimes({("gpu", "p100", 1): {"known": 1.0, "other": 0.0}}, "x")
    many = WORK | {"nodes": 1000, "sorted_ids": 30}

    assert price("gpu", "p100", quick, **many) == pytest.approx(1000 * gpu.node_s)
    assert 3.0 <= price("gpu", "p100", slow, **many) < 3.001


@pytest.mark.parametrize("device", [("cpu", "cpu-core", 2), ("gpu", "cpu-core", 1), ("cpu", "p100", 1)])
def test_times_of_another_device_change_nothing(device: tuple[str, str, int]) -> None:
    times = KernelTimes({device: {"known": 7e-3}}, "x")

    assert price("cpu", "cpu-core", times, **WORK) == price("cpu", "cpu-core", **WORK)


def test_what_runs_on_one_thread_takes_the_times_of_one() -> None:
    times = KernelTimes({("cpu", "cpu-core", 1): {"known": 7e-3}}, "x")
    cluster = Cluster(
        CLUSTER_FORMAT, "c", (Host("h", (Device("h/d", "cpu", "cpu-core", threads=4),), memory_bytes=2**34),)
    )
    run = msgspec.structs.replace(EMPTY, **WORK)
    placed = ranks_of(cluster)[0]

    assert run_s(run, placed, cluster, times) < 7e-3  # type: ignore[arg-type]
    alone = msgspec.structs.replace(run, one_thread=True)
    assert run_s(alone, placed, cluster, times) > 3 * 7e-3  # type: ignore[arg-type]


def test_a_measured_rate_of_products_takes_the_profiles_place() -> None:
    def took_s(flops_per_s: float | None) -> float:
        cluster = cluster_of("cpu", "cpu-core")
        (host,) = cluster.hosts
        device = msgspec.structs.replace(host.devices[0], flops_per_s=flops_per_s)
        measured = msgspec.structs.replace(cluster, hosts=(msgspec.structs.replace(host, devices=(device,)),))
        return node_s(10**12, 8, rank=ranks_of(measured)[0], cluster=measured)

    rate = PROFILES["cpu-core"].matmul_flops_per_s
    assert took_s(rate) == took_s(None)
    assert took_s(4 * rate) == pytest.approx(took_s(None) / 4, rel=1e-3)
