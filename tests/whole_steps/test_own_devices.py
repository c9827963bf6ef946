"""Operators with devices of their own: by file and by name, in process and between processes."""

from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec.structs import replace

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.models.catalogue import build_model
from partc.runtime.errors import BadPlan, BadStrategy
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.check_references import check_references
from partc.runtime.plan.program import Exchange, Start
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)
from tests.checks.counted_bytes import check_bytes

FOUR = ("host0/cpu0", "host0/cpu1", "host1/cpu0", "host1/cpu1")
TURNED = ("host1/cpu1", "host0/cpu1", "host1/cpu0", "host0/cpu0")
SIZES, BATCH = (12, 24, 24, 24, 5), 8


def deep() -> onnx.ModelProto:
    forward = build_model("mlp", dtype="float64", sizes=list(SIZES), batch=BATCH)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))


def products(model: onnx.ModelProto) -> list[str]:
    graph = import_training_graph(model).graph
    weights = [f"layer{number}.weight" for number in range(4)]
    reads = {tensor.name: node.name for node in reversed(graph.nodes) for tensor in node.inputs}
    return [reads[weight] for weight in weights]


def by_file(batch: str = "global", **options: object) -> Strategy:
    """Samples on four, columns on four, two by two in another order, rows on three."""
    first, second, third, last = products(deep())
    ops = (
        OpConfig(first, {"batch": 4}, devices=FOUR),
        OpConfig(second, {"out:1": 4}, devices=FOUR),
        OpConfig(third, {"batch": 2, "out:1": 2}, devices=TURNED),
        OpConfig(last, {"in:0:1": 3}, devices=TURNED[:3]),
    )
    return Strategy(MESH_STRATEGY_FORMAT, batch, {}, ops=ops, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("own") / "out"
    return compile_step(import_training_graph(deep()), folder, "2x2", by_file(), "global")


def test_each_layer_on_devices_of_its_own_trains_as_one_device(compiled: Compiled) -> None:
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=5))


def test_between_processes_it_is_what_one_process_does(compiled: Compiled) -> None:
    batches = random_batches(compiled.plan, 2, high=5)

    actual, expected = Runner(compiled.folder).train(batches, 2), train_in_process(compiled.folder, batches)

    for variable, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-9, atol=1e-12)
    assert actual.payload_bytes == expected.payload_bytes


def test_weights_are_kept_as_their_devices_divide_them(compiled: Compiled) -> None:
    shapes = {variable.name: variable.shape for variable in compiled.plan.variables}
    parts = {
        piece.variable: prod(shapes[piece.variable]) // prod(local_shape(shapes[piece.variable], piece.box))
        for rank in compiled.plan.ranks
        for piece in rank.pieces
    }

    assert [parts[f"layer{number}.weight"] for number in range(4)] == [1, 4, 2, 3]
    assert [parts[f"layer{number}.weight.mean"] for number in range(4)] == [1, 4, 2, 3]
    gathered = [start.label for start in starts(compiled) if start.kind in ("all_gather", "all_gather_rows")]
    assert not [label for label in gathered if "layer" in label]


def test_what_crosses_is_what_devices_lack(compiled: Compiled) -> None:
    """Between layers 1 and 2: each of four has a quarter of the samples and wants all, and so on."""
    of_relus = [start for start in starts(compiled) if " Relu_" in start.label]

    width, size = 24, 8
    columns_to_two_by_two = BATCH * width * size * 2 - 4 * (BATCH // 2) * (width // 4) * size
    assert [(start.kind, start.payload_bytes) for start in of_relus[:2]] == [
        ("all_gather", BATCH * width * size),
        ("exchange", columns_to_two_by_two),
    ]


def test_sums_are_scattered_to_those_who_want_parts_on_another_mesh(tmp_path: Path) -> None:
    """The second layer's devices have terms of what the first one's want a quarter of the samples of."""
    first, second, third, last = products(deep())
    ops = (
        OpConfig(first, {"batch": 4}, devices=FOUR),
        OpConfig(second, {"out:1": 4}, devices=FOUR),
        *(OpConfig(node, {"batch": 4}, devices=FOUR) for node in (third, last)),
    )
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops)

    compiled = compile_step(import_training_graph(deep()), tmp_path / "out", "2x2", strategy, "global")

    scattered = [start for start in starts(compiled) if start.kind == "reduce_scatter"]
    assert [start.payload_bytes for start in scattered] == [BATCH * 24 * 8]
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=5))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda e: replace(e, moves=e.moves[1:]), "does not get what it wants"),
        (lambda e: replace(e, moves=(*e.moves, e.moves[0])), "does not get what it wants"),
        (lambda e: replace(e, moves=(replace(e.moves[0], source=1), *e.moves[1:])), "does not have or want"),
        (lambda e: replace(e, moves=(replace(e.moves[0], source=9), *e.moves[1:])), "does not have or want"),
        (lambda e: replace(e, has=e.has[1:]), "an exchange of 3 members"),
        (lambda e: replace(e, shape=(1, 1)), "of a tensor shaped"),
        (lambda e: None, "an account of moves missing"),
    ],
)
def test_an_exchange_that_leaves_somebody_without_is_refused(
    compiled: Compiled, damage: Callable[[Exchange], Exchange | None], what: str
) -> None:
    first = next(start for start in starts(compiled) if start.label.startswith("Exchange Relu_"))
    assert first.exchange is not None
    broken = replace(first, exchange=damage(first.exchange))
    instructions = tuple(broken if i is first else i for i in compiled.plan.instructions)

    with pytest.raises(BadPlan, match=what):
        check_references(replace(compiled.plan, instructions=instructions))


def starts(compiled: Compiled) -> list[Start]:
    return [instruction for instruction in compiled.plan.instructions if isinstance(instruction, Start)]


@pytest.mark.parametrize("microbatches", [2, 4])
def test_micro_batches_divide_samples_alike_everywhere(microbatches: int, tmp_path: Path) -> None:
    training, strategy = import_training_graph(deep()), by_file(microbatches=microbatches)

    with pytest.raises(BadStrategy, match="samples are divided among 1 devices, and others among 4"):
        compile_step(training, tmp_path / "out", "2x2", strategy, "global")


def test_replicas_of_a_batch_each_are_everywhere_as_many(tmp_path: Path) -> None:
    training, strategy = import_training_graph(deep()), by_file("per-replica")

    with pytest.raises(BadStrategy, match="--batch global"):
        compile_step(training, tmp_path / "out", "2x2", strategy, "per-replica")


def translation() -> onnx.ModelProto:
    sizes = {"source_vocab": 24, "target_vocab": 24, "source_steps": 3, "target_steps": 2}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "cells": 4, "embedding": 4}
    forward = build_model("nmt", dtype="float64", batch=8, **sizes, **layers)
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.3))


@pytest.mark.parametrize(
    ("cluster", "name", "batch"),
    [
        ("2x2", "layerwise", "per-replica"),
        ("2x2", "layerwise,microbatches=2", "global"),
        ("1x3", "layerwise", "global"),
    ],
)
def test_layers_on_the_devices_of_each_host(cluster: str, name: str, batch: str, tmp_path: Path) -> None:
    training = import_training_graph(translation())
    compiled = compile_step(training, tmp_path / "out", cluster, name, batch)  # type: ignore[arg-type]

    devices = Counter(config.devices for config in compiled.compilation.strategy.ops)
    assert sorted(map(len, devices)) == ([2, 2] if cluster == "2x2" else [1, 1, 1])
    assert all(len({device.split("/")[0] for device in own}) == len(own) for own in devices)
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


def test_rows_whose_number_the_data_tells_stay_where_they_are_summed(tmp_path: Path) -> None:
    """What clips them is a scalar of another mesh, which comes to them."""
    training = import_training_graph(onnx.ModelProto.FromString(training_model("lm, adagrad, clipped")))
    forward = [
        node.name for node in training.graph.nodes if node.op == "MatMul" and "/gradient" not in node.name
    ]
    ops = (
        OpConfig(forward[-1], {"batch": 1}, devices=TURNED[:1]),
        *(OpConfig(name, {"batch": 2}, devices=FOUR[:2]) for name in forward[:-1]),
    )

    compiled = compile_step(
        training, tmp_path / "out", "2x2", Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops), "global"
    )

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=2))


def test_names_by_their_beginning_leave_out_what_cannot_be_placed(tmp_path: Path) -> None:
    """Under a node's name are its gradients, and under a batch each what averages these over replicas."""
    training = import_training_graph(deep())
    first = products(deep())[0]
    under = OpConfig(f"{first}/gradient", {"batch": 2}, devices=FOUR[:2])
    ops = (OpConfig(first, {"batch": 2}, devices=TURNED[:2]), under)
    strategy = Strategy(MESH_STRATEGY_FORMAT, "per-replica", {}, ops=ops)

    compiled = compile_step(training, tmp_path / "out", "2x2", strategy, "per-replica")

    nodes = compiled.compilation.training.graph.nodes
    assert any(node.name.startswith(f"{first}/gradient") and "average" in node.name for node in nodes)
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


def test_bytes_of_parts_of_different_sizes_are_those_of_the_largest(tmp_path: Path) -> None:
    """A sum of [8, 5] doubles: three of eight rows, which no bucket holds."""
    training = import_training_graph(deep())
    last = products(deep())[-1]
    devices = tuple(f"host{host}/cpu{cpu}" for host in range(2) for cpu in range(3))
    strategy = Strategy(
        MESH_STRATEGY_FORMAT, "global", {}, ops=(OpConfig(last, {"batch": 3, "in:0:1": 2}, devices=devices),)
    )

    compiled = compile_step(training, tmp_path / "out", "2x3", strategy, "global")

    sums = [i for i in compiled.plan.instructions if isinstance(i, Start) and i.kind == "all_reduce"]
    assert 3 * SIZES[-1] * 8 in [start.payload_bytes for start in sums]
    assert check_bytes(compiled) >= len(sums) > 0


def test_terms_of_a_weight_that_steps_share_are_summed_among_ranks_once(tmp_path: Path) -> None:
    """All operators on all devices, one by one, sum the bytes that data parallelism sums by name."""
    sizes = {"layers": 2, "steps": 5, "cells": 12, "embedding": 12, "vocab": 40}
    model = build_model("rnnlm", batch=8, dtype="float64", **sizes)
    training = import_training_graph(build_training_graph(model, loss="loss", optimizer=SGD(0.1)))
    divided = OpConfig("*", {"batch": 4}, devices=FOUR)
    strategies = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=(divided,)), "allreduce"

    one_by_one, by_name = (
        compile_step(training, tmp_path / str(number), "2x2", strategy, "global")
        for number, strategy in enumerate(strategies)
    )

    summed = [
        sum(
            i.payload_bytes for i in each.plan.instructions if isinstance(i, Start) and i.kind == "all_reduce"
        )
        for each in (one_by_one, by_name)
    ]
    assert summed[0] == summed[1]
    assert_trains_as_one_device(one_by_one, random_batches(one_by_one.plan, 2, high=40))
