from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.model_files.model_file import check_model, read_model
from partc.compiler.model_files.run_checker import newest_opset
from partc.runtime.errors import BadModel
from tests.builders.graphs.foreign_steps import SGD, parse

GRAPH = "graph (float[2] x) => (float[2] y) {{ {} }}"


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (b"", "export the model again"),
        (b"hello world, this is no model", "copy or export the file again"),
        (parse(SGD).SerializeToString()[:-20], "copy or export the file again"),
        (
            onnx.ModelProto(ir_version=10).SerializeToString(),
            "give a file that onnx.save",
        ),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes, fix: str) -> None:
    (tmp_path / "m.onnx").write_bytes(content)

    with pytest.raises(BadModel, match=f"fix: {fix}"):
        read_model(tmp_path / "m.onnx")


def test_an_oversized_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "m.onnx").open("wb") as file:
        file.truncate(2**31)

    with pytest.raises(BadModel, match=r"fix: save it with onnx.save\(..., save_as_external_data=True\)"):
        read_model(tmp_path / "m.onnx")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"nowhere.onnx\n  fix: give the path"):
        read_model(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = Relu (z)", "input 'z' is made by no node.*at:  node Relu -> 'y'.*fix: add the node"),
        (
            "a = Relu (b)\n b = Abs (a)\n y = Relu (a)",
            "in a cycle.*node Abs -> 'b'.*fix: cut the cycle",
        ),
        ("a = Relu (b)\n b = Abs (x)\n y = Relu (a)", "out of order.*fix: sort the nodes"),
        ("y = Fuo (x)", r"unknown op 'Fuo' \(domain 'ai.onnx', opset 21\).*fix: correct the op"),
        ("y = acme.Foo (x)", "fix: add domain 'acme' to opset_import"),
        ("y = Relu (x)\n y = Abs (x)", "tensor 'y' is made twice.*fix: rename one"),
        ("z = Relu (x)", "output 'y' is made by no node.*fix: add the node that makes 'y'"),
        ("y = Relu (x, x)", "input size 2.*fix: mend the node"),
    ],
)
def test_a_malformed_graph_is_refused_with_its_repair(body: str, message: str) -> None:
    with pytest.raises(BadModel, match=f"(?s){message}"):
        check_model(parse(GRAPH.format(body)))


def test_a_subgraph_sees_the_tensors_around_it_and_is_checked() -> None:
    text = """
    graph (float[2] x, bool c) => (float[2] y) {
        z = Abs (x)
        y = If (c) <then_branch = yes () => (float[2] r) { r = Relu (z) },
                    else_branch = no () => (float[2] s) { s = Neg (NAME) }>
    }
    """
    check_model(parse(text.replace("NAME", "z")))

    with pytest.raises(BadModel, match=r"input 'gone'.*\n.*node Neg -> 's'"):
        check_model(parse(text.replace("NAME", "gone")))


def test_an_opset_that_onnxruntime_cannot_read_is_refused() -> None:
    with pytest.raises(BadModel, match=f"fix: export the model with opset {newest_opset()} or lower"):
        check_model(parse(GRAPH.format("y = Relu (x)"), opset=newest_opset() + 1))


def test_two_initializers_of_one_name_are_refused() -> None:
    model = parse(GRAPH.format("y = Add (x, w)"))
    for _ in range(2):
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "w"))

    with pytest.raises(BadModel, match="fix: rename or drop one initializer"):
        check_model(model)


def test_external_data_that_is_too_short_is_refused(tmp_path: Path) -> None:
    model = parse(GRAPH.format("y = Add (x, w)"))
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").write_bytes(b"1234")

    with pytest.raises(BadModel, match=r"'w.bin' has 4 bytes.*\n.*'w'\n  fix: put the whole file"):
        check_model(read_model(tmp_path / "m.onnx"), tmp_path)


def test_an_output_may_leave_its_shape_to_inference() -> None:
    model = parse(SGD)
    model.graph.output[0].type.tensor_type.ClearField("shape")

    check_model(model)

    assert not model.graph.output[0].type.tensor_type.HasField("shape")  # the check changes nothing


GROUPED = """
step (float[2,4,3] x, float[2] scale, float[2] bias) => (float[2,4,3] y) {
    y = GroupNormalization ATTRIBUTES (x, scale, bias)
}
"""


@pytest.mark.parametrize("opset", [18, 20, 21])
def test_an_op_that_is_deprecated_but_computed_is_held_to_its_successor(opset: int) -> None:
    for attributes in ("<num_groups = 2>", ""):
        model = parse(GROUPED.replace("ATTRIBUTES", attributes))
        model.opset_import[0].version = opset
        if attributes:
            check_model(model)
        else:
            with pytest.raises(BadModel, match="num_groups"):
                check_model(model)
