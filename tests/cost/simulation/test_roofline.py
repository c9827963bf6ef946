"""What a segment is priced at, term by term: seconds follow from the work and the profile's rates."""

import msgspec
import pytest

from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster, ranks_of
from partc.cost.cluster.machines import Device, Host
from partc.cost.cluster.profiles import PER_SORTED_ID_S, PER_VALUE_S, PROFILES
from partc.cost.simulation.roofline import node_s, run_s
from partc.runtime.plan.program import Rank, Run

EMPTY = Run("worker", "segments/s.onnx", reads=(), writes=())


def cluster_of(kind: str, profile: str) -> Cluster:
    device = Device("h/d", "gpu" if kind == "gpu" else "cpu", profile)
    return Cluster(CLUSTER_FORMAT, "one", (Host("h", (device,), memory_bytes=2**34),))


def price(kind: str, profile: str, **work: object) -> float:
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
        held=(),
    )
    run = msgspec.structs.replace(EMPTY, **work)
    return run_s(run, rank, cluster) - run_s(EMPTY, rank, cluster)


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


def test_values_are_bound_and_ids_are_sorted_one_by_one() -> None:
    pairs = tuple((f"i{number}", f"v{number}") for number in range(10))

    assert price("cpu", "cpu-core", reads=pairs, writes=pairs[:5]) == pytest.approx(15 * PER_VALUE_S)
    assert price("cpu", "cpu-core", sorted_ids=1000) == pytest.approx(1000 * PER_SORTED_ID_S)


def test_a_single_node_starts_no_segment() -> None:
    cluster = cluster_of("cpu", "cpu-core")

    assert node_s(0, 0, ranks_of(cluster)[0], cluster) == PROFILES["cpu-core"].node_s
