"""Where a pipeline is cut whose layers share weights: the quickest of all cuts, whatever the link."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy

WIDTH, SAMPLES = 512, 512


def layers(weights: str) -> onnx.ModelProto:
    """Return a step of layers, each of the weight that a letter names."""
    names = sorted(set(weights))
    declared = "".join(f", float[{WIDTH},{WIDTH}] {name}" for name in names)
    body = " ".join(f"p{n} = MatMul (h{n}, {name}) h{n + 1} = Tanh (p{n})" for n, name in enumerate(weights))
    last = f"h{len(weights)}"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> net (float[{SAMPLES},{WIDTH}] h0{declared}) =>
        (float loss) {{ {body} square = Mul ({last}, {last}) loss = ReduceMean <keepdims = 0> (square) }}"""
    )
    for value in model.graph.input[1:]:
        zeros = np.zeros((WIDTH, WIDTH), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(zeros, value.name))
    del model.graph.input[1:]
    return build_training_graph(model, loss="loss", optimizer=SGD(0.1))


def linked(bytes_per_s: float) -> Cluster:
    """Return two hosts of one worker."""
    hosts = tuple(
        Host(name, (Device(f"{name}/cpu0", "cpu", "cpu-core"),), memory_bytes=2**32) for name in ("a", "b")
    )
    links = tuple(Link((host.name, "switch"), bytes_per_s, latency_s=25e-6) for host in hosts)
    return Cluster(CLUSTER_FORMAT, "two hosts", hosts, switches=("switch",), links=links)


def compiled(weights: str, bytes_per_s: float, strategy: str | Strategy, folder: Path) -> Compilation:
    training = import_training_graph(layers(weights))
    options = Options(strategy=strategy, batch="global")
    return compile_graph(training, linked(bytes_per_s), folder, options)


def cut_before(op: str) -> Strategy:
    ops = (OpConfig(op, stage=1),)
    return Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh={"data": 1}, ops=ops, stages=2, microbatches=4)


@pytest.mark.parametrize(
    ("weights", "bytes_per_s", "expected"),
    [
        ("abbc", 10e9, "MatMul:p2"),  # b is sent, beside other work
        ("abbc", 300e6, "Tanh:h3"),  # it would be waited for
        ("abbc", 30e6, "Tanh:h1"),
        pytest.param("abcdda", 10e9, "MatMul:p3", marks=pytest.mark.long),
        ("abcdda", 30e6, "Tanh:h6"),  # nothing is sent but the last activations: the loss is alone
    ],
)
def test_the_cut_is_the_quickest_of_all(
    weights: str, bytes_per_s: float, expected: str, tmp_path: Path
) -> None:
    chosen = compiled(weights, bytes_per_s, "pipeline=2,microbatches=4", tmp_path / "chosen")

    places = [op for n in range(len(weights)) for op in (f"MatMul:p{n}", f"Tanh:h{n + 1}")][1:]
    seconds = {
        op: compiled(weights, bytes_per_s, cut_before(op), tmp_path / str(n)).timeline.step_s
        for n, op in enumerate(places)
    }
    assert isinstance(chosen.strategy, Strategy)
    assert [config.op for config in chosen.strategy.ops] == [expected]
    assert chosen.timeline.step_s == min(seconds.values())


def test_layers_of_their_own_weights_are_cut_as_they_are_balanced(tmp_path: Path) -> None:
    cuts = {
        rate: [config.op for config in found.strategy.ops]
        for rate in (10e9, 30e6)
        if isinstance(
            (found := compiled("abcdef", rate, "pipeline=2", tmp_path / str(rate))).strategy, Strategy
        )
    }

    assert cuts[10e9] == cuts[30e6] != []
