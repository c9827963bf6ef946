"""A model file may claim anything: what cannot be true is refused before it is read, the file named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.model_files.check_tensors import check_tensors
from partc.compiler.options import GraphOptions
from partc.runtime.errors import BadModel
from tests.builders.graphs.foreign_steps import SGD, parse, with_zeros
from tests.checks.command_line import CLUSTER, refused

Damage = Callable[[onnx.ModelProto], object]


def step() -> onnx.ModelProto:
    return with_zeros(parse(SGD), "W")


def weight(model: onnx.ModelProto) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == "W")


def size_of_x(model: onnx.ModelProto) -> "onnx.TensorShapeProto.Dimension":
    return model.graph.input[0].type.tensor_type.shape.dim[0]


def not_utf_8(text: str) -> Damage:
    """Return a damage of the file's bytes: protobuf's Python lets nobody set such a text."""

    def damage(model: onnx.ModelProto) -> None:
        data = model.SerializeToString()
        assert text.encode() in data
        model.ParseFromString(data.replace(text.encode(), b"\xff" * len(text)))

    return damage


def call_each_other(model: onnx.ModelProto) -> None:
    for name, other in (("F", "G"), ("G", "F")):
        call = helper.make_node(other, ["a"], ["b"], domain="own")
        opsets = [helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", name, ["a"], ["b"], [call], opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))


def refer_to_a_function(model: onnx.ModelProto) -> None:
    attribute = helper.make_attribute("axis", 1)
    attribute.ref_attr_name = "axis"
    model.graph.node[0].attribute.append(attribute)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda m: setattr(weight(m), "data_type", 99), "element type 99"),
        (lambda m: setattr(weight(m), "data_type", 0), "element type 0"),
        (lambda m: weight(m).dims.__setitem__(0, -4), "negative size"),
        (lambda m: weight(m).dims.__setitem__(0, 1 << 62), "where shape"),
        (lambda m: weight(m).dims.append(2), "where shape"),
        (lambda m: weight(m).ClearField("float_data"), "where shape"),
        (lambda m: weight(m).double_data.append(1.0), "not in float_data"),
        (lambda m: weight(m).segment.SetInParent(), "in segments"),
        (lambda m: setattr(size_of_x(m), "dim_value", 1 << 62), "no machine holds"),
        (lambda m: setattr(size_of_x(m), "dim_value", -1), "negative size"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77), "element type 77"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 0), "without an element type"),
        (lambda m: setattr(m.graph.node[4].attribute[0], "i", 3), "not its type"),
        (refer_to_a_function, "outside of any function"),
        (not_utf_8("MatMul"), "not UTF-8"),
        (not_utf_8("loss"), "not UTF-8"),
        (call_each_other, "calls itself: F -> G -> F"),
    ],
)  # fmt: skip
def test_a_claim_that_cannot_be_true_is_refused(tmp_path: Path, damage: Damage, what: str) -> None:
    model = step()
    damage(model)

    with pytest.raises(BadModel) as refusal:
        check_tensors(model, None)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())

    assert what in refusal.value.what
    state = ("--state", "W=W_next")
    refused("inspect", tmp_path / "m.onnx", *state, at=str(tmp_path / "m.onnx"), fix="m")
    out = ("-c", CLUSTER, "-o", tmp_path / "out")
    refused("compile", tmp_path / "m.onnx", *state, *out, at=str(tmp_path / "m.onnx"), fix="m")
    refused("grad", tmp_path / "m.onnx", "--loss", "loss", "-o", tmp_path / "t.onnx", at="m.onnx", fix="m")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize(
    "element", [TensorProto.BFLOAT16, TensorProto.INT4, TensorProto.COMPLEX64, TensorProto.BOOL]
)
@pytest.mark.parametrize("raw", [True, False])
def test_every_element_type_is_measured_as_onnx_stores_it(element: int, raw: bool) -> None:
    values = np.zeros(5, helper.tensor_dtype_to_np_dtype(element))
    stored = numpy_helper.from_array(values) if raw else helper.make_tensor("t", element, [5], [0] * 5)
    stored.name = "t"
    model = step()
    model.graph.initializer.append(stored)

    check_tensors(model, None)


# ---------------------------------------------------------------- external data


def external(folder: Path, location: str, **numbers: str) -> onnx.ModelProto:
    """Return a step whose W lies in a file: 48 bytes are needed."""
    model = step()
    tensor = weight(model)
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **numbers}.items():
        tensor.external_data.add(key=key, value=value)
    onnx.save(model, folder / "m.onnx")
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, a secret beside it, links to the secret, and 48 bytes of values."""
    (tmp_path / "secret.txt").write_bytes(bytes(64))
    made = tmp_path / "model"
    made.mkdir()
    (made / "values").write_bytes(bytes(48))
    (made / "link").symlink_to(tmp_path / "secret.txt")
    (made / "up").symlink_to(tmp_path)
    (made / "inner").symlink_to(made / "values")
    return made


@pytest.mark.parametrize(
    ("location", "what"),
    [
        ("../secret.txt", "leads out of the folder"),
        ("sub/../../secret.txt", "leads out of the folder"),
        ("/etc/passwd", "is an absolute path"),
        ("link", "is a link that leads out"),
        ("up/secret.txt", "is a link that leads out"),
        (".", "is the folder itself"),
        ("", "is no name"),
        ("gone", "is missing"),
    ],
)
def test_external_data_outside_the_models_folder_is_refused(folder: Path, location: str, what: str) -> None:
    external(folder, location)

    for command in (
        ("inspect", folder / "m.onnx", "--state", "W=W_next"),
        ("compile", folder / "m.onnx", "--state", "W=W_next", "-c", CLUSTER, "-o", folder / "out"),
        ("grad", folder / "m.onnx", "--loss", "loss", "-o", folder / "t.onnx"),
    ):
        refused(*command, what=what, at="m.onnx: tensor 'W'", fix="beside the model")
    assert not (folder / "out").exists() and not (folder / "t.onnx").exists()


def test_external_data_of_several_names_is_refused(folder: Path) -> None:
    """ONNX does not read it."""
    (folder / "again").hardlink_to(folder / "values")
    external(folder, "again")

    refused(
        "inspect", folder / "m.onnx", "--state", "W=W_next", what="hard links", at="tensor 'W'", fix="a copy"
    )


@pytest.mark.parametrize(
    ("numbers", "what"),
    [
        ({"offset": "-1"}, "offset '-1' is no size"),
        ({"length": "many"}, "length 'many' is no size"),
        ({"offset": "8"}, "56 are needed"),
        ({"length": str(1 << 62)}, "its length is said to be"),
        ({"length": "8"}, "48 are needed, its length is said to be 8"),
    ],
)
def test_external_data_that_is_not_there_is_refused(folder: Path, numbers: dict[str, str], what: str) -> None:
    external(folder, "values", **numbers)

    refused("inspect", folder / "m.onnx", "--state", "W=W_next", what=what, at="m.onnx", fix="m")


def test_external_data_in_the_folder_is_read_through_a_link_too(folder: Path) -> None:
    for location in ("values", "inner"):
        external(folder, location)

        training = import_training_graph(folder / "m.onnx", GraphOptions(state={"W": "W_next"}))

        assert training.variables["W"].shape == (4, 3)


def test_external_data_of_any_other_tensor_is_refused(folder: Path) -> None:
    model = external(folder, "values")
    constant = helper.make_node("Constant", [], ["c"], value=weight(model))
    model.graph.node.insert(0, constant)

    with pytest.raises(BadModel, match="but not of an initializer"):
        check_tensors(model, folder)


def test_a_sidecar_names_no_file_elsewhere(folder: Path) -> None:
    onnx.save(parse(SGD), folder / "m.onnx")
    np.savez(folder.parent / "start.npz", W=np.zeros((4, 3), np.float32))
    sidecar = folder / "m.onnx.json"
    sidecar.write_text('{"state": {"W": "W_next"}, "initial": "../start.npz"}')

    refused("inspect", folder / "m.onnx", what="leads out of the folder", at="m.onnx", fix="--initial")
