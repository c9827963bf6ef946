import json

import onnx

from partc.models.graph_builder import METADATA_KEY, MODEL_IR_VERSION, OPSET, GraphBuilder, ModelOptions


def scaled_input() -> GraphBuilder:
    b = GraphBuilder("scaled", ModelOptions())
    x = b.input("x", b.element_type, ["batch", 4])
    weight = b.normal("weight", (4,), scale=1.0)
    mean, mean_next = b.state("mean", (4,), 0.0)
    b.op("Identity", mean, name=mean_next)
    b.op("Mul", b.op("Mul", x, weight), b.number(2), name="y")
    b.output("y", ["batch", 4])
    return b


def test_a_model_is_valid_and_readable_by_stock_onnxruntime() -> None:
    model = scaled_input().model()

    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, model.opset_import[0].version) == (MODEL_IR_VERSION, OPSET)


def test_the_metadata_names_parameters_state_and_sample_axes() -> None:
    model = scaled_input().model()

    facts = json.loads({entry.key: entry.value for entry in model.metadata_props}[METADATA_KEY])
    assert facts == {
        "parameters": ["weight"],
        "state": {"mean": "mean_next"},
        "sample_axes": {"x": 0},
    }


def test_only_parameters_and_state_are_floats_made_from_nothing() -> None:
    model = scaled_input().model()

    made = ("RandomNormal", "RandomUniform", "ConstantOfShape")
    assert {n.output[0] for n in model.graph.node if n.op_type in made} == {"weight", "mean"}
    assert not model.graph.initializer


def test_every_draw_has_a_seed_of_its_own_and_every_node_a_name() -> None:
    b = scaled_input()
    b.uniform("other", (4,), limit=1.0)

    nodes = b.model().graph.node

    seeds = [a.f for node in nodes for a in node.attribute if a.name == "seed"]
    assert seeds == [1.0, 2.0]
    assert len({node.name for node in nodes}) == len(nodes)


def test_building_twice_gives_identical_bytes() -> None:
    assert scaled_input().model().SerializeToString() == scaled_input().model().SerializeToString()
