"""`workers=K`: K workers make the grid, the others idle; `auto` takes it where it is quicker."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from partc.compiler.api import compile_step, search
from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam
from partc.compiler.options import Options, SearchOptions
from partc.compiler.search.whole_steps import names_of_fewer
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.memory import memory_of
from partc.cost.strategy import Strategy, read_strategy
from partc.models.catalogue import build_model
from partc.runtime.data.batches import share_of
from partc.runtime.errors import BadUsage
from partc.runtime.plan.boxes import first_index
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import instructions_of
from tests.builders.graphs.attention_block import attention_step
from tests.builders.plans.compiled_steps import cluster_of, random_batches
from tests.builders.plans.small_devices import small_devices
from tests.checks.command_line import done
from tests.sampling import sampled

GLOBAL = Options(batch="global")
QUICK, SLOW = 4e10, 1e10  # flops a second
MIXED = 1.1  # by which operators that are each divided otherwise may be quicker than any name


def mlp(sizes: Sequence[int] = (12, 16, 4), batch: int = 8) -> onnx.ModelProto:
    forward = build_model("mlp", sizes=list(sizes), batch=batch, dtype="float64")
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))


def compiled(
    step: onnx.ModelProto,
    cluster: Cluster,
    out: Path,
    strategy: str | Strategy = "auto",
    options: Options = GLOBAL,
) -> Compilation:
    return compile_step(step, cluster, out, replace(options, strategy=strategy))


def with_rates(shape: str, *flops_per_s: float) -> Cluster:
    """Return a cluster whose hosts' devices have these rates."""
    cluster = cluster_of(shape)
    hosts = tuple(
        msgspec.structs.replace(
            host, devices=tuple(msgspec.structs.replace(d, flops_per_s=rate) for d in host.devices)
        )
        for host, rate in zip(cluster.hosts, flops_per_s, strict=True)
    )
    return msgspec.structs.replace(cluster, hosts=hosts)


@pytest.mark.parametrize(
    ("name", "replicas", "batch"),
    [
        ("workers=1", 1, "global"),
        pytest.param("workers=3", 3, "global", marks=pytest.mark.long),
        pytest.param("workers=4", 4, "global", marks=pytest.mark.long),
        ("workers=2,microbatches=2", 2, "global"),
        ("workers=3", 3, "per-replica"),
        ("tensor=3,workers=3", 1, "global"),
        pytest.param("workers=2,tensor=2", 1, "per-replica", marks=pytest.mark.long),
        ("fsdp,workers=3", 3, "global"),
        pytest.param("pipeline=2,workers=2,microbatches=4", 1, "global", marks=pytest.mark.long),
        ("pipeline=3,workers=3,microbatches=2", 1, "global"),
        ("replicas=1,workers=2", 1, "global"),
    ],
)
def test_few_workers_train_as_one_device(name: str, replicas: int, batch: str, tmp_path: Path) -> None:
    step = attention_step(Adam(0.01), clip_global_norm=0.1)

    found = compiled(step, cluster_of("2x2"), tmp_path, name, Options(batch=batch))  # type: ignore[arg-type]

    batches = random_batches(found.plan, 2, high=3)
    assert verify(tmp_path, steps=2, data=batches, launcher=launch_in_process).passed
    assert found.plan.replicas == replicas
    asked = next(int(word[8:]) for word in name.split(",") if word.startswith("workers="))
    assert sum(bool(instructions_of(found.plan, rank)) for rank in found.plan.ranks) == asked


def test_dense_layers_of_few_workers_are_divided(tmp_path: Path) -> None:
    found = compiled(mlp(), cluster_of("2x2"), tmp_path, "one-weird-trick,workers=2")

    assert found.strategy.mesh == {"data": 2}
    batches = random_batches(found.plan, 2)
    assert verify(tmp_path, steps=2, data=batches, launcher=launch_in_process).passed


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("data=1,tensor=2", "or let the others idle: --strategy data=1,tensor=2,workers=2"),
        ("tensor=2,workers=3", "or let the others idle: --strategy tensor=2,workers=2"),
        ("tensor=8,workers=4", "such as --strategy data=1,tensor=4,workers=4"),
        ("tensor=2,workers=8", "use at most 4"),
        ("layerwise,workers=2", "write layerwise alone, or with microbatches"),
        ("one-weird-trick,tensor=2", "write one-weird-trick alone, or with workers"),
    ],
)
def test_a_grid_that_few_workers_do_not_make_is_refused(name: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(BadUsage) as refused:
        compiled(mlp(), cluster_of("2x2"), tmp_path, name)

    assert fix in refused.value.fix


def test_the_idle_run_nothing_and_hold_nothing(tmp_path: Path) -> None:
    found = compiled(mlp(), cluster_of("2x2"), tmp_path, "workers=3")

    plan = found.plan
    (batch,) = random_batches(plan, 1)
    *busy, idle = plan.ranks
    assert all(instructions_of(plan, rank) and rank.pieces for rank in busy)
    assert [len(share_of(plan, rank, batch)["x"]) for rank in busy] == [3, 3, 2]
    assert (instructions_of(plan, idle), idle.pieces, share_of(plan, idle, batch)) == ((), (), {})
    need = memory_of(plan, cluster_of("2x2"))[3]
    assert need.variables_bytes == need.buffers_bytes == need.values_bytes == 0


def test_it_is_an_ordinary_file(tmp_path: Path) -> None:
    named = compiled(mlp(), cluster_of("2x2"), tmp_path / "named", "workers=2")

    again = compiled(mlp(), cluster_of("2x2"), tmp_path / "again", str(tmp_path / "named" / "strategy.json"))

    assert again.strategy.devices == named.strategy.devices == ("host0/cpu0", "host0/cpu1")
    assert again.plan.instructions == named.plan.instructions


@pytest.mark.parametrize(
    ("grid", "stages", "devices"),
    [
        ({"data": 1, "tensor": 2}, 1, "host1/cpu1 host0/cpu0"),
        ({"data": 2, "tensor": 2}, 1, "host1/cpu1 host0/cpu0 host1/cpu0 host0/cpu1"),
        ({"data": 1}, 3, "host1/cpu0 host0/cpu1 host0/cpu0"),
    ],
)
def test_a_grid_is_of_the_devices_that_a_file_names(
    grid: dict[str, int], stages: int, devices: str, tmp_path: Path
) -> None:
    words = ",".join([f"pipeline={stages}", *(f"{name}={size}" for name, size in grid.items())])
    asked = f"{words},workers={len(devices.split())}"
    named = compiled(mlp((12, 16, 8, 4)), cluster_of("2x2"), tmp_path / "named", asked).strategy
    strategy = msgspec.structs.replace(named, devices=tuple(devices.split()))

    found = compiled(mlp((12, 16, 8, 4)), cluster_of("2x2"), tmp_path / "out", strategy)

    batches = random_batches(found.plan, 2)
    assert verify(tmp_path / "out", steps=2, data=batches, launcher=launch_in_process).passed
    busy = {rank.device for rank in found.plan.ranks if instructions_of(found.plan, rank)}
    assert busy == set(devices.split())
    first = next(rank for rank in found.plan.ranks if rank.device == devices.split()[0])
    assert first.sites[0] == ("mesh0" if stages == 1 else "stage0")
    if "tensor" in grid:  # the first has the first columns
        parts = [first_index(piece.box) for piece in first.pieces if piece.box is not None]
        assert parts and not any(map(any, parts))


@pytest.mark.parametrize(("count", "hosts"), [(1, {"host1"}), (2, {"host1"}), (3, {"host0", "host1"})])
def test_quicker_hosts_come_first(count: int, hosts: set[str], tmp_path: Path) -> None:
    found = compiled(mlp(), with_rates("2x2", SLOW, QUICK), tmp_path, f"workers={count}")

    assert {device.split("/")[0] for device in found.strategy.devices} == hosts


def test_auto_leaves_a_small_step_on_one_device(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "train.onnx")
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(cluster_of("2x2")))

    shown = done(
        "compile", tmp_path / "train.onnx", "-c", tmp_path / "cluster.json", "--batch", "global",
        "-o", tmp_path / "out",
    )  # fmt: skip

    assert "strategy: workers=1," in shown
    assert "4 ranks, 3 of them idle," in shown
    page = (tmp_path / "out" / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert 'workers=1 <span class="tick">chosen</span>' in page
    assert "1 replica of 1 worker" in page
    assert "3 with nothing to do" in page
    assert read_strategy(tmp_path / "out" / "strategy.json").devices == ("host0/cpu0",)
    plan = read_plan_folder(tmp_path / "out").plan
    batches = random_batches(plan, 2)
    assert verify(tmp_path / "out", steps=2, data=batches, launcher=launch_in_process).passed


def test_auto_takes_one_host_where_that_is_quicker_than_all(tmp_path: Path) -> None:
    step, cluster = mlp((64, 128, 64), 256), with_rates("2x2", SLOW, QUICK)

    auto = compiled(step, cluster, tmp_path / "auto")

    assert {device.split("/")[0] for device in auto.strategy.devices} == {"host1"}
    others = [
        compiled(step, cluster, tmp_path / name, name) for name in ("allreduce", "workers=4", "tensor=4")
    ]
    assert all(auto.timeline.step_s < other.timeline.step_s for other in others)


def test_auto_takes_more_workers_where_one_has_no_memory_for_the_batch(tmp_path: Path) -> None:
    step = mlp((64, 4), 64)
    alone = compiled(step, cluster_of("2x2"), tmp_path / "alone", "workers=1")
    spread = compiled(step, cluster_of("2x2"), tmp_path / "spread", "workers=2")
    needed = [
        max(need.certain_bytes for need in memory_of(each.plan, cluster_of("2x2")))
        for each in (alone, spread)
    ]
    assert needed[1] < needed[0]

    free = compiled(step, cluster_of("2x2"), tmp_path / "free")
    bound = compiled(step, small_devices("2x2", needed[0] - 1), tmp_path / "bound")

    assert len(free.strategy.devices) == 1
    assert max(need.certain_bytes for need in memory_of(bound.plan, cluster_of("2x2"))) < needed[0]
    assert bound.timeline.step_s > free.timeline.step_s


@pytest.mark.parametrize("seed", sampled([9, 0, *range(10, 40)], range(1)))
def test_auto_finds_what_exhaustion_finds_but_for_mixes(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in 2 ** rng.integers(2, 10, size=int(rng.integers(2, 5)))]
    step = mlp(sizes, int(2 ** rng.integers(2, 8)))
    cluster = cluster_of(str(rng.choice(["1x2", "2x1", "1x4", "2x2"])))

    auto = compiled(step, cluster, tmp_path)

    asked = replace(GLOBAL, search=SearchOptions(method="exhaustive"))
    assert auto.timeline.step_s <= search(step, cluster, asked).best.step_s * MIXED


def test_links_that_no_worker_uses_change_nothing(tmp_path: Path) -> None:
    """Gradients of 2 MB on one host: buckets are as large whatever the link to the idle one is."""
    cluster = cluster_of("2x2")
    links = tuple(msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s / 2) for link in cluster.links)
    slower = msgspec.structs.replace(cluster, links=links)

    near = compiled(mlp((64, 64, 4000), 192), cluster, tmp_path / "near", "workers=2")
    far = compiled(mlp((64, 64, 4000), 192), slower, tmp_path / "far", "workers=2")

    assert far.plan.instructions == near.plan.instructions


def test_few_replicas_may_share_their_variables(tmp_path: Path) -> None:
    forward = build_model("mlp", sizes=[64, 64, 8000], batch=192)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))

    auto = compiled(step, cluster_of("2x2"), tmp_path / "auto")
    shared = compiled(step, cluster_of("2x2"), tmp_path / "shared", "fsdp,workers=2")

    assert auto.compared[0].names == ("fsdp,workers=2",)
    assert auto.timeline.step_s == shared.timeline.step_s


def test_a_search_tells_gains_over_all_workers(tmp_path: Path) -> None:
    found = search(mlp(), cluster_of("2x2"), replace(GLOBAL, search=SearchOptions(proposals=1)))

    every = compiled(mlp(), cluster_of("2x2"), tmp_path, "allreduce")
    assert found.data_parallel is not None
    assert found.data_parallel.step_s == every.timeline.step_s
    assert found.best.name == "workers=1"


def test_wide_layers_stay_divided(tmp_path: Path) -> None:
    auto = compiled(mlp((512, 1024, 64)), cluster_of("2x2"), tmp_path)

    assert "tensor" in auto.compared[0].names[0]


@pytest.mark.parametrize(
    ("hosts", "counts", "shared"),
    [
        (["a"], [], []),
        (["a"] * 4, [1, 2], [(2, 2)]),
        (["a"] * 2 + ["b"] * 2, [1, 2], [(2, 2)]),
        (
            ["a"] * 6 + ["b"] * 6 + ["c"] * 6 + ["d"] * 6,
            [1, 2, 3, 6, 12],
            [(2, 2), (3, 3), (6, 6), (6, 12), (12, 12)],
        ),
    ],
)
def test_fewer_are_parts_of_a_host_or_whole_hosts(
    hosts: list[str], counts: list[int], shared: list[tuple[int, int]]
) -> None:
    assert names_of_fewer(hosts) == [
        *(f"workers={count}" for count in counts),
        *(f"tensor={parts},workers={count}" for parts, count in shared),
    ]
