"""Operators on one device each train as one device, and are no slower than all of them on one."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from partc.compiler.api import compile_step
from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.options import Options, SearchOptions
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.cluster.cluster import Cluster
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.runtime.errors import BadUsage, NoPlacement
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.siamese_step import siamese_step
from tests.builders.plans.compiled_steps import cluster_of, random_batches

BRANCHES = """
branches (double[6,384] x) => (double[6,4] logits) {
    a = MatMul (x, W1)
    b = MatMul (x, W2)
    c = MatMul (x, W3)
    p = Tanh (a)
    q = Sigmoid (b)
    r = Mul (p, q)
    s = Mul (r, c)
    logits = MatMul (s, W4)
}
"""
SHAPES = {"W1": (384, 512), "W2": (384, 512), "W3": (384, 512), "W4": (512, 4)}
PLACED = Options(strategy="placed", search=SearchOptions(budget_s=4.0))


@cache
def branches() -> onnx.ModelProto:
    """Return a step of three branches, on a batch that four devices do not divide."""
    forward = parse(BRANCHES)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        value = rng.normal(size=shape) / np.sqrt(shape[0])
        forward.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))


def cluster(memory_bytes: int = 2**32) -> Cluster:
    made = cluster_of("1x4")
    hosts = tuple(msgspec.structs.replace(host, memory_bytes=memory_bytes) for host in made.hosts)
    return msgspec.structs.replace(made, hosts=hosts)


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compilation, Path]:
    out = tmp_path_factory.mktemp("placed") / "out"
    return compile_step(branches(), cluster(), out, PLACED), out


def test_each_operator_has_one_device(placed: tuple[Compilation, Path]) -> None:
    entries = placed[0].strategy.ops

    assert len(entries) == 4
    assert all(len(entry.devices) == 1 for entry in entries)
    assert len({entry.devices for entry in entries}) > 1, "branches run side by side"


def test_it_is_no_slower_than_one_device(placed: tuple[Compilation, Path], tmp_path: Path) -> None:
    nodes = [entry.op for entry in placed[0].strategy.ops]
    ops = tuple(OpConfig(node, {}, devices=("host0/cpu0",)) for node in nodes)
    together = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops)

    alone = compile_step(branches(), cluster(), tmp_path / "out", Options(strategy=together))

    assert placed[0].timeline.step_s < alone.timeline.step_s


def test_it_trains_as_one_device(placed: tuple[Compilation, Path]) -> None:
    compiled, out = placed
    batches = random_batches(compiled.plan, 2, high=4)

    report = verify(out, steps=2, data=batches, launcher=launch_in_process)

    assert {check.verdict for check in report.variables} == {"equal"}


def test_networks_that_losses_compare_with_each_other_are_placed_and_train_as_one_device(
    tmp_path: Path,
) -> None:
    """Their gradients go from one to another and back, so that whole groups would wait for each other."""
    out = tmp_path / "out"
    compiled = compile_step(siamese_step(SGD(0.1)), cluster(), out, PLACED)
    apart = msgspec.structs.replace(
        compiled.strategy,
        ops=tuple(
            msgspec.structs.replace(entry, devices=(f"host0/cpu{n % 4}",))
            for n, entry in enumerate(compiled.strategy.ops)
        ),
    )
    spread = compile_step(siamese_step(SGD(0.1)), cluster(), tmp_path / "apart", Options(strategy=apart))

    assert len(compiled.strategy.ops) == 6
    for each, folder in ((compiled, out), (spread, tmp_path / "apart")):
        batches = random_batches(each.plan, 2)
        report = verify(folder, steps=2, data=batches, launcher=launch_in_process)
        assert {check.verdict for check in report.variables} == {"equal"}


def test_what_does_not_fit_is_refused_with_the_operators_that_conflict(tmp_path: Path) -> None:
    refused = cluster(memory_bytes=6_000_000)  # 1.5 MB a device, of which a branch's variables take 1.6

    with pytest.raises(NoPlacement, match="no placement fits: variables of 1 operators take") as refusal:
        compile_step(branches(), refused, tmp_path / "out", PLACED)

    assert "take 0.00157 GB together" in str(refusal.value)
    assert "devices of 0.00157 GB for variables" in str(refusal.value)
    assert "MatMul" in str(refusal.value)
    assert not (tmp_path / "out").exists()


def towers(sizes: tuple[int, ...]) -> onnx.ModelProto:
    """Return a step of one product a tower, which share nothing; `sizes`: of each weight, in MiB."""
    of_each = [
        f"a{i} = MatMul (x, W{i}) t{i} = Tanh (a{i}) l{i} = ReduceMean <keepdims = 0> (t{i})"
        for i in range(len(sizes))
    ]
    losses = ", ".join(f"l{i}" for i in range(len(sizes)))
    forward = parse(f"f (float[8,512] x) => (float loss) {{ {' '.join(of_each)} loss = Sum ({losses}) }}")
    for i, size in enumerate(sizes):
        value = np.full((512, 512 * size), 0.01, np.float32)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(value, f"W{i}"))
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.1))


def hosts_of(*sizes: float) -> Cluster:
    """Return hosts of one CPU each. `sizes`: their memory, in MiB."""
    made = cluster_of(f"{len(sizes)}x1")
    hosts = tuple(
        msgspec.structs.replace(host, memory_bytes=int(size * 2**20))
        for host, size in zip(made.hosts, sizes, strict=True)
    )
    return msgspec.structs.replace(made, hosts=hosts)


def devices_of(compiled: Compilation) -> list[tuple[str, ...]]:
    return [entry.devices for entry in compiled.strategy.ops]


def test_what_fits_without_room_for_gradients_is_placed(tmp_path: Path) -> None:
    compiled = compile_step(towers((4, 4)), hosts_of(6, 6), tmp_path / "out", PLACED)

    assert len(set(devices_of(compiled))) == 2


def test_each_device_is_filled_up_to_its_own_memory(tmp_path: Path) -> None:
    compiled = compile_step(towers((5, 5, 3, 3)), hosts_of(27, 7.5), tmp_path / "out", PLACED)

    large, *_ = first = devices_of(compiled)
    assert first == [large, large, *(each for each in first[2:] if each != large)]
    assert compiled.memory[1].certain_bytes > 6 * 2**20


def test_what_only_one_packing_of_the_devices_holds_is_placed(tmp_path: Path) -> None:
    compiled = compile_step(towers((3, 3, 2, 2, 2)), hosts_of(6.5, 6.5), tmp_path / "out", PLACED)

    first, second, *others = devices_of(compiled)
    assert first == second
    assert set(others).isdisjoint({first})


def test_memory_that_differs_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(NoPlacement, match=r"2 devices have from 0\.00629 GB to 0\.0105 GB"):
        compile_step(towers((6, 6, 6)), hosts_of(10, 6), tmp_path / "out", PLACED)


TWO_TOWERS = """
towers (float[16,240] x, float[16,80] z) => (float loss) {
    a = MatMul (x, A)
    p = Tanh (a)
    c = MatMul (p, C)
    q = Tanh (c)
    b = MatMul (z, B)
    r = Tanh (b)
    d = MatMul (r, D)
    s = Tanh (d)
    both = Concat <axis = 1> (q, s)
    y = MatMul (both, V)
    loss = ReduceMean <keepdims = 0> (y)
}
"""
TOWERS_SHAPES = {"A": (240, 192), "C": (192, 48), "B": (80, 88), "D": (88, 256), "V": (304, 7)}


def slow_hosts() -> Cluster:
    """Return two hosts of one CPU each, of 0.2 GFLOP/s."""
    made = cluster_of("2x1")
    hosts = tuple(
        msgspec.structs.replace(
            host, devices=tuple(msgspec.structs.replace(device, flops_per_s=2e8) for device in host.devices)
        )
        for host in made.hosts
    )
    return msgspec.structs.replace(made, hosts=hosts)


def test_no_operator_makes_the_plan_quicker_elsewhere(tmp_path: Path) -> None:
    forward = parse(TWO_TOWERS)
    for name, shape in TOWERS_SHAPES.items():
        forward.graph.initializer.append(onnx.numpy_helper.from_array(np.full(shape, 0.1, np.float32), name))
    step, on = build_training_graph(forward, loss="loss", optimizer=SGD(0.1)), slow_hosts()
    options = replace(PLACED, search=SearchOptions(proposals=50, budget_s=4.0))

    compiled = compile_step(step, on, tmp_path / "out", options)

    for moved in range(len(TOWERS_SHAPES)):
        ops = list(compiled.strategy.ops)
        (other,) = {"host0/cpu0", "host1/cpu0"} - set(ops[moved].devices)
        ops[moved] = msgspec.structs.replace(ops[moved], devices=(other,))
        strategy = msgspec.structs.replace(compiled.strategy, ops=tuple(ops))
        whole = compile_step(step, on, tmp_path / str(moved), Options(strategy=strategy))
        assert compiled.timeline.step_s <= whole.timeline.step_s


@pytest.mark.parametrize(
    "options",
    [replace(PLACED, batch="per-replica"), replace(PLACED, asynchronous=True)],
    ids=["per-replica", "asynchronous"],
)
def test_what_it_does_not_go_with_is_refused(options: Options, tmp_path: Path) -> None:
    with pytest.raises(BadUsage):
        compile_step(branches(), cluster(), tmp_path / "out", options)
