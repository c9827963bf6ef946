"""A step that fits no device under data parallelism is refused by naming a strategy that fits."""

from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest

from partc.compiler.api import compile
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.report.methods import meaning_of
from partc.compiler.search.name_what_fits import names_by_need
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.cluster.cluster import Cluster, encode_cluster
from partc.cost.simulation.memory import memory_of
from partc.runtime.errors import DoesNotFit
from partc.runtime.plan.program import Plan
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import cluster_of, random_batches
from tests.builders.plans.small_devices import small_devices
from tests.checks.command_line import partc

FORWARD = """
forward (double[8,16] x) => (double[8,4] logits) {
    a = MatMul (x, W1)
    r = Tanh (a)
    logits = MatMul (r, W2)
}
"""
SHAPES = {"W1": (16, 256), "W2": (256, 4)}


@cache
def wide_mlp() -> onnx.ModelProto:
    forward = parse(FORWARD)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        forward.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))


def fullest_bytes(plan: Plan, cluster: Cluster) -> int:
    return max(need.certain_bytes for need in memory_of(plan, cluster))


def refusal_of(folder: Path, cluster: Cluster, strategy: str) -> str:
    with pytest.raises(DoesNotFit) as refused:
        compile(wide_mlp(), cluster, folder / "refused", strategy=strategy, batch="global")
    assert not (folder / "refused").exists()
    return refused.value.fix


@cache
def needed_bytes(strategy: str) -> int:
    """Return what the fullest of four devices needs, by the check that refuses."""
    cluster = cluster_of("1x4")
    with TemporaryDirectory() as folder:
        plan = compile(wide_mlp(), cluster, Path(folder) / "out", strategy=strategy, batch="global").plan
    return fullest_bytes(plan, cluster)


@pytest.mark.parametrize(
    ("strategy", "fitting"), [("hybrid", "fsdp"), ("allreduce", "tensor=2"), ("data=4", "tensor=4")]
)
def test_the_first_name_that_fits_is_named_and_trains(strategy: str, fitting: str, tmp_path: Path) -> None:
    cluster = small_devices("1x4", needed_bytes(fitting))

    fix = refusal_of(tmp_path, cluster, strategy)

    assert fix.startswith(f"compile with --strategy {fitting}: ")
    assert f"the fullest device then needs {needed_bytes(fitting)} bytes" in fix
    folder = compile(wide_mlp(), cluster, tmp_path / "out", strategy=fitting, batch="global")
    assert fullest_bytes(folder.plan, cluster) == needed_bytes(fitting)
    batches = random_batches(folder.plan, 2, high=3)
    assert verify(folder, steps=2, data=batches, launcher=launch_in_process).passed


def test_what_the_best_misses_is_told_where_nothing_fits(tmp_path: Path) -> None:
    cluster = small_devices("1x4", needed_bytes("tensor=4") - 100)

    fix = refusal_of(tmp_path, cluster, "data=4")

    assert "raise its memory_bytes by" in fix
    assert fix.endswith("the nearest, --strategy tensor=4, misses by 100 bytes on a device")


@pytest.mark.parametrize("strategy", ["tensor=2", "fsdp"])
def test_a_strategy_that_shares_variables_is_refused_by_its_figures_alone(
    strategy: str, tmp_path: Path
) -> None:
    cluster = small_devices("1x4", needed_bytes("tensor=4"))

    fix = refusal_of(tmp_path, cluster, strategy)

    assert fix.startswith("raise its memory_bytes by")
    assert "--strategy" not in fix


def test_names_need_less_in_the_order_that_these_tests_take() -> None:
    weights_bytes = sum(prod(shape) for shape in SHAPES.values()) * 8

    assert needed_bytes("data=4") >= 4 * weights_bytes  # with two slots each, and the sums of gradients
    assert needed_bytes("data=4") > needed_bytes("fsdp") > needed_bytes("tensor=2") > needed_bytes("tensor=4")


def test_the_command_ends_with_code_2_and_the_name(tmp_path: Path) -> None:
    onnx.save(wide_mlp(), tmp_path / "train.onnx")
    cluster = small_devices("1x4", needed_bytes("fsdp"))
    (tmp_path / "cluster.json").write_bytes(encode_cluster(cluster))

    answer = partc(
        *("compile", tmp_path / "train.onnx", "-c", tmp_path / "cluster.json"),
        *("-o", tmp_path / "out", "--strategy", "allreduce", "--batch", "global"),
    )

    assert answer.code == 2
    assert "fix: compile with --strategy fsdp" in answer.error


ODD = 15  # no number of workers divides it, so that neither replicas nor operators share it
LAYERS = 8


@cache
def odd_chain() -> onnx.ModelProto:
    layers = "\n".join(
        f"a{n} = MatMul ({f'h{n - 1}' if n else 'x'}, W{n})\n h{n} = Tanh (a{n})" for n in range(LAYERS)
    )
    forward = parse(f"forward (double[8,{ODD}] x) => (double[8,{ODD}] h{LAYERS - 1}) {{ {layers} }}")
    rng = np.random.default_rng(0)
    for n in range(LAYERS):
        forward.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=(ODD, ODD)), f"W{n}"))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))


def test_a_pipeline_is_named_where_nothing_else_shares_the_variables_and_trains(tmp_path: Path) -> None:
    cluster = small_devices("1x4", 2 * LAYERS * ODD * ODD * 8)  # two of the four that Adam keeps of each

    with pytest.raises(DoesNotFit) as refused:
        compile(odd_chain(), cluster, tmp_path / "refused", strategy="data=4", batch="global")

    name = refused.value.fix.removeprefix("compile with --strategy ").split(":")[0]
    assert name in ("pipeline=2", "pipeline=4"), refused.value.fix
    folder = compile(odd_chain(), cluster, tmp_path / "out", strategy=name, batch="global")
    batches = random_batches(folder.plan, 2, high=3)
    assert verify(folder, steps=2, data=batches, launcher=launch_in_process).passed


def test_the_report_has_words_for_every_name_that_may_be_taken() -> None:
    for name in names_by_need(12):
        assert meaning_of(name)
