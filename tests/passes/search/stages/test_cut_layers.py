"""Which devices of a host get which layers: what reads the same weights is one layer."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.models.catalogue import build_model
from partc.passes.layouts.place_nodes import place_nodes
from partc.passes.search.stages.cut_layers import cut_layers
from partc.runtime.errors import BadUsage
from tests.builders.graphs.foreign_steps import parse
from tests.passes.layouts.test_place_nodes import analysed
from tests.passes.search.stages.test_cut_stages import by_flops, deep


def translation() -> onnx.ModelProto:
    sizes = {"source_vocab": 24, "target_vocab": 24, "source_steps": 4, "target_steps": 3}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "cells": 8, "embedding": 8}
    forward = build_model("nmt", batch=4, **sizes, **layers)
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.1))


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.long), 3])
def test_the_cells_of_an_unrolled_layer_are_one_layer(devices: int, tmp_path: Path) -> None:
    analysis = analysed(translation(), tmp_path)

    device_of = cut_layers(analysis, devices, by_flops)

    assert set(device_of.values()) == set(range(devices))
    assert list(device_of) == [node.name for node in analysis.training.graph.nodes if node.name in device_of]
    nodes = {node.name: node for node in analysis.training.graph.nodes}
    readers: dict[str, set[int]] = {}
    for name, device in device_of.items():
        for tensor in nodes[name].inputs:
            if tensor.name in analysis.training.gradients:
                readers.setdefault(tensor.name, set()).add(device)
    assert readers and all(len(found) == 1 for found in readers.values())


def test_a_layer_follows_what_it_reads_and_its_first_state_is_its_own(tmp_path: Path) -> None:
    """Step by step, the second layer begins before the first one's recurrence has done anything."""
    forward = build_model("rnnlm", batch=4, vocab=32, embedding=16, cells=16, layers=2, steps=3)
    analysis = analysed(build_training_graph(forward, loss="loss", optimizer=SGD(0.1)), tmp_path)

    device_of = cut_layers(analysis, 5, by_flops)

    nodes = {node.name: node for node in analysis.training.graph.nodes}
    readers: dict[str, list[int]] = {}
    for name, device in device_of.items():
        for tensor in nodes[name].inputs:
            if tensor.name.endswith("weight"):
                readers.setdefault(tensor.name, []).append(device)
    order = ["layer0.input", "layer0.recurrent", "layer1.input", "layer1.recurrent", "output"]
    assert [set(readers[f"{name}_weight" if "layer" in name else f"{name}.weight"]) for name in order] == [
        {number} for number in range(5)
    ]
    assert len(readers["layer0.recurrent_weight"]) == 3, "of the first step too, which has a state of zeros"


def test_equal_layers_are_shared_out_equally(tmp_path: Path) -> None:
    analysis = analysed(deep(*[64] * 9), tmp_path)

    places = place_nodes(analysis, cut_layers(analysis, 4, by_flops), 4)

    layers = [place for name, place in places.variables.items() if name.endswith("weight")]
    assert sorted(layers) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_fewer_layers_than_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=r"(?s)2 layers for 3 devices.* a cluster of 2 devices a host, or --"):
        cut_layers(analysed(deep(8, 8, 8), tmp_path), 3, by_flops)


def test_a_model_without_layers_is_offered_no_name_that_divides_it(tmp_path: Path) -> None:
    step = build_training_graph(
        parse(
            "numbers (float[8] x) => (float loss) <float w = {2.0}> "
            "{ y = Mul (x, w) z = Mul (y, y) loss = ReduceMean <keepdims = 0> (z) }"
        ),
        loss="loss",
        optimizer=SGD(0.1),
        parameters=ParameterChoice(train=("w",)),
    )

    with pytest.raises(BadUsage, match=r"(?s)0 layers for 2 devices.*fix: use --strategy auto$"):
        cut_layers(analysed(step, tmp_path), 2, by_flops)
