"""Where nodes and variables of a pipeline are, and what therefore goes from stage to stage."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Optimizer
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.passes.analysis import Analysis
from partc.passes.layouts.place_nodes import crossing, place_nodes
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.passes.search.stages.cut_stages import stage_line
from tests.builders.graphs.attention_block import attention_step
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.random_steps import random_step
from tests.builders.plans.compiled_steps import compile_step

BATCH, WIDTH = 16, 8


def mlp(optimizer: Optimizer, clip_global_norm: float | None = None) -> onnx.ModelProto:
    forward = build_model("mlp", sizes=[WIDTH] * 5, batch=BATCH)
    return build_training_graph(
        forward, loss="softmax_cross_entropy", optimizer=optimizer, clip_global_norm=clip_global_norm
    )


def analysed(step: onnx.ModelProto, folder: Path, replicas: int = 1, batch: str = "global") -> Analysis:
    training = import_training_graph(step)
    strategy = f"data={replicas}"
    return compile_step(training, folder / "out", f"1x{replicas}", strategy, batch).compilation.analysis


def products(analysis: Analysis) -> list[str]:
    nodes = forward_nodes(analysis.training, analysis.main)
    return [node.name for node in nodes if node.op == "MatMul"]


def test_activations_go_forward_and_their_gradients_back(tmp_path: Path) -> None:
    analysis = analysed(mlp(SGD(0.1)), tmp_path)
    begin = products(analysis)

    places = place_nodes(analysis, {begin[1]: 1, begin[3]: 2}, 3)

    sent = crossing(analysis.training.graph.nodes, places)
    shapes = {way: [analysis.facts.shape(name) for name in names] for way, names in sent.items()}
    activations = [(BATCH, WIDTH)]
    assert shapes == {(0, 1): activations, (1, 2): activations, (2, 1): activations, (1, 0): activations}


def test_gradients_that_are_averaged_over_replicas_are_made_where_their_layer_is(tmp_path: Path) -> None:
    analysis = analysed(mlp(SGD(0.1)), tmp_path, 2, "per-replica")

    places = place_nodes(analysis, {products(analysis)[1]: 1}, 2)

    sent = crossing(analysis.training.graph.nodes, places)
    assert {way: [analysis.facts.shape(name) for name in names] for way, names in sent.items()} == {
        (0, 1): [(BATCH, WIDTH)],
        (1, 0): [(BATCH, WIDTH)],
    }


def test_a_variable_its_slots_and_its_update_are_where_it_is_read(tmp_path: Path) -> None:
    analysis = analysed(mlp(Adam(0.1)), tmp_path)
    begin = products(analysis)

    places = place_nodes(analysis, {begin[2]: 1}, 2)

    for name in analysis.training.variables:
        if name.startswith("layer"):
            assert places.variables[name] == (int(name[5]) >= 2), name
    for node in analysis.training.graph.nodes:
        if node.name.startswith("layer") and node.name not in analysis.main:
            assert places.nodes[node.name] == (int(node.name[5]) >= 2), node.name


def test_of_a_norm_over_all_gradients_scalars_alone_are_sent(tmp_path: Path) -> None:
    analysis = analysed(mlp(SGD(0.1), clip_global_norm=1.0), tmp_path)

    places = place_nodes(analysis, {products(analysis)[2]: 1}, 2)

    sent = crossing(analysis.training.graph.nodes, places)
    sizes = [analysis.facts.shape(name) for names in sent.values() for name in names]
    assert sorted(size for size in sizes if size)[:1] == [(BATCH, WIDTH)]
    assert [size for size in sizes if size and size != (BATCH, WIDTH)] == []
    assert any(not size for size in sizes)


def test_sums_of_a_gradient_that_arrives_are_made_where_it_does(tmp_path: Path) -> None:
    """A batch normalisation behind a stage: of its way back only the activations' gradient is sent."""
    forward = build_model("resnet50", batch=8, width=8, image=32, classes=8)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    analysis = analysed(step, tmp_path)
    line = stage_line(analysis)
    inner = range(len(line.nodes) // 4, len(line.nodes) // 2)
    behind_block = min(inner, key=line.nbytes.__getitem__)

    places = place_nodes(analysis, line.begins([behind_block]), 2)

    sent = crossing(analysis.training.graph.nodes, places)
    ranks = {way: [len(analysis.facts.shape(name)) for name in names] for way, names in sent.items()}
    assert ranks[0, 1] == [4]
    assert ranks[1, 0] == [4]


def test_attention_sends_the_residual_alone(tmp_path: Path) -> None:
    analysis = analysed(attention_step(SGD(0.1)), tmp_path)
    # The second normalisation reads the residual, as does the sum behind the feed-forward layer.
    names = [n.name for n in forward_nodes(analysis.training, analysis.main)]
    second = next(node for node in analysis.training.graph.nodes if "b2" in [t.name for t in node.inputs])
    assert second.name in names

    places = place_nodes(analysis, {second.name: 1}, 2)

    sent = crossing(analysis.training.graph.nodes, places)
    shapes = {way: {analysis.facts.shape(name) for name in found} for way, found in sent.items()}
    assert set(shapes) == {(0, 1), (1, 0)}
    assert all(len(shape) == 3 or not shape for found in shapes.values() for shape in found)


@pytest.mark.parametrize("seed", range(8))
def test_every_node_has_a_stage_and_wishes_are_obeyed(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    analysis = analysed(random_step(seed), tmp_path)
    nodes = [node.name for node in analysis.training.graph.nodes]
    wished = {name: int(rng.integers(3)) for name in nodes if name in analysis.main and rng.random() < 0.3}

    places = place_nodes(analysis, wished, 3)

    assert places.nodes.keys() == set(nodes)
    assert places.variables.keys() == analysis.training.variables.keys()
    assert all(0 <= stage < 3 for stage in (*places.nodes.values(), *places.variables.values()))
    assert {name: places.nodes[name] for name in wished} == wished


def test_rows_of_a_table_are_read_where_they_are_needed_first(tmp_path: Path) -> None:
    analysis = analysed(two_tables(), tmp_path)
    begin = products(analysis)

    places = place_nodes(analysis, {begin[0]: 0, begin[1]: 1}, 2)

    assert (places.variables["early"], places.variables["late"]) == (0, 1)
    gathers = [n.name for n in forward_nodes(analysis.training, analysis.main) if n.op == "Gather"]
    assert [places.nodes[name] for name in gathers] == [0, 1]


def recurrence(steps: int = 3) -> onnx.ModelProto:
    """Return a step of a recurrence whose states are read by the next one, and by a layer of their own.

    What the layers' gradients multiply is stacked over the steps.
    """
    lines = []
    for step in range(steps):
        lines += [
            f"first{step} = MatMul (h{step}, R)",
            f"part{step} = Gather <axis = 0> (x, step{step})",
            f"second{step} = Add (first{step}, part{step})",
            f"h{step + 1} = Tanh (second{step})",
            f"y{step} = MatMul (h{step + 1}, W)",
        ]
    steps_of = ", ".join(f"int64 step{step} = {{{step}}}" for step in range(steps))
    forward = parse(f"""
        forward (float[{steps}, 2, 16] data) => (float[] loss) <{steps_of}> {{
            h0 = Constant <value = float[2, 16] {{{", ".join(["0"] * 32)}}}> ()
            x = MatMul (data, I)
            {" ".join(lines)}
            y = Sum ({", ".join(f"y{step}" for step in range(steps))})
            axes = Constant <value_ints = [0, 1]> ()
            loss = ReduceMean <keepdims = 0> (y, axes)
        }}
    """)
    rng = np.random.default_rng(0)
    for name in "IRW":
        values = rng.normal(size=(16, 16)).astype(np.float32)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.1))


def unrolled() -> dict[str, onnx.ModelProto]:
    sizes = {"batch": 2, "embedding": 16, "cells": 16}
    forward = {
        "lm": build_model("lm", **sizes, vocab=40, projection=16, steps=3, samples=8),
        "nmt": build_model("nmt", **sizes, source_vocab=40, target_vocab=40, source_steps=3, target_steps=3),
        "rnnlm": build_model("rnnlm", **sizes, vocab=40, steps=3),
    }
    models = {name: build_training_graph(m, loss="loss", optimizer=SGD(0.1)) for name, m in forward.items()}
    return models | {"recurrence": recurrence()}


@pytest.mark.parametrize("name", unrolled())
def test_stacked_gradients_of_weights_are_made_where_these_are(name: str, tmp_path: Path) -> None:
    """Each product of the way forward is a stage of its own, so that no stage has all that is stacked."""
    analysis = analysed(unrolled()[name], tmp_path)
    stage_of = {product: number for number, product in enumerate(products(analysis))}

    places = place_nodes(analysis, stage_of, len(stage_of))

    forward = {node.name for node in forward_nodes(analysis.training, analysis.main)}
    reading: dict[str, set[int]] = {}
    for node in analysis.training.graph.nodes:
        if node.name in forward:
            for tensor in node.inputs:
                reading.setdefault(tensor.name, set()).add(places.nodes[node.name])
    maker = {t.name: node for node in analysis.training.graph.nodes for t in node.outputs}
    stacked = 0
    for parameter, gradient in analysis.training.gradients.items():
        last = maker[gradient.dense] if gradient.dense else None
        if last is not None and last.op == "MatMul":
            assert places.nodes[last.name] in reading[parameter], parameter
            stacked += len(reading[parameter]) > 1
    assert stacked


def test_constants_are_at_hand_at_every_stage(tmp_path: Path) -> None:
    """Steps of an LSTM read the axes of other stages: their gradients, which two stages read, stay there."""
    analysis = analysed(unrolled()["lm"], tmp_path)
    stage_of = {product: number for number, product in enumerate(products(analysis))}

    places = place_nodes(analysis, stage_of, len(stage_of))

    readers: dict[str, set[int]] = {}
    for node in analysis.training.graph.nodes:
        for tensor in node.inputs:
            readers.setdefault(tensor.name, set()).add(places.nodes[node.name])
    maker = {t.name: node.name for node in analysis.training.graph.nodes for t in node.outputs}
    backs = [node for node in analysis.training.graph.nodes if node.name.endswith("/gradient/Unsqueeze")]
    read_twice = [node for node in backs if len(readers[node.outputs[0].name]) == 2]
    assert read_twice
    for node in read_twice:
        assert places.nodes[node.name] == places.nodes[maker[node.inputs[0].name]]


def two_tables() -> onnx.ModelProto:
    forward = parse("""
        forward (int64[16] ids, int64[16] words) => (float[] loss) {
            own = Gather (early, ids)
            h = MatMul (own, A)
            r = Relu (h)
            y = MatMul (r, B)
            other = Gather (late, words)
            o = Mul (y, other)
            s = Tanh (o)
            axes = Constant <value_ints = [0, 1]> ()
            loss = ReduceMean <keepdims = 0> (s, axes)
        }
    """)
    rng = np.random.default_rng(0)
    for name, shape in {"early": (20, 8), "late": (20, 8), "A": (8, 8), "B": (8, 8)}.items():
        values = rng.normal(size=shape).astype(np.float32)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.1))
