"""Parameters that an exporter's optimiser dropped as 1 or 0 are refused; those that nothing reads are not."""

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.exported_models import as_exported, call, stored_model, with_operations

SCOPES = "pkg.torch.onnx.name_scopes"
RNG = np.random.default_rng(0)
V, W = RNG.normal(size=(4, 4)).astype(np.float32), RNG.normal(size=(4, 4)).astype(np.float32)
TWO_LAYERS = "net (float[6,4] x) => (float[6,4] y) { h = MatMul (x, W) y = MatMul (h, V) }"
READ = {"h": "%x, %p_W", "y": "%h, %p_V"}


def two_layers(*gone: str, **operations: str) -> onnx.ModelProto:
    model = stored_model(TWO_LAYERS, {"W": W, "V": V})
    return as_exported(model, parameters=("W", "V"), gone=gone, operations=READ | operations)


def returning(model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """Let the exported program return what has these names in it."""
    (signature,) = model.graph.metadata_props
    outputs = "\n".join(f"{name}: USER_OUTPUT" for name in names)
    signature.value = signature.value.replace("y: USER_OUTPUT", outputs)
    return model


def told(model: onnx.ModelProto, choice: ParameterChoice = ParameterChoice()) -> list[str]:  # noqa: B008
    lines: list[str] = []
    build_training_graph(model, loss="mse", optimizer=SGD(), parameters=choice, tell=lines.append)
    return lines


@pytest.mark.parametrize("operation", ["mul", "mul_3", "div", "add_1", "sub", "mul_tensor"])
def test_a_number_that_is_gone_with_what_read_it_is_refused(operation: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        told(two_layers("scale", y=f"%{operation}, %p_V"))

    assert f"biases of zeros: {operation}\n" in str(refusal.value)
    assert refusal.value.at.endswith("parameters without values in the file: scale")
    assert refusal.value.fix.startswith("add --freeze scale if the module does not use these")
    assert refusal.value.fix.endswith("; else export with torch.onnx.export(..., optimize=False)")


def test_one_that_was_applied_to_the_result_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="without values in the file: scale"):
        told(returning(two_layers("scale"), "mul"))


UNCALLED = (
    "pooler.weight",
    "pooler.bias",
    "teacher.token",
    "teacher.attn.in_proj_weight",
    "teacher.attn.in_proj_bias",
)


def test_layers_that_no_operation_came_from_are_not_what_a_constant_of_1_dropped() -> None:
    lines = told(two_layers(*UNCALLED, y="%mul, %p_V"))

    assert "not in the file: 5 parameters" in lines


@pytest.mark.parametrize(
    ("gone", "held"),
    [
        (("weight", "bias"), "weight, bias"),  # of the outermost module: they may be numbers
        (("gate.weight", "gate.bias"), "gate.weight, gate.bias"),  # an operation came from it
        (("unused.weight",), "unused.weight"),
        (("pooler.weight", "pooler.bias", "scale"), "scale"),
    ],
)
def test_what_may_be_a_number_is_refused_beside_a_constant_of_1(gone: tuple[str, ...], held: str) -> None:
    model = two_layers(*gone, y="%mul, %p_V")
    model.graph.node[1].metadata_props.add(key=SCOPES, value="['', 'gate', 'y']")

    with pytest.raises(UnsupportedModel) as refusal:
        told(model)

    assert refusal.value.at.endswith(f"without values in the file: {held}")


@pytest.mark.parametrize("result", ["mul", "add_2"])
def test_one_that_was_applied_last_is_refused_where_the_result_keeps_its_name(result: str) -> None:
    """return s.b(h) * s.scale, or + s.zero: the output `mul` is made by the nodes of `linear`."""
    model = stored_model(TWO_LAYERS.replace("y", result), {"W": W, "V": V})
    exported = as_exported(model, parameters=("W", "V"), gone=("scale",), operations={"h": "%x, %p_W"})
    with_operations(exported, {result: call("linear.default", "%h, %p_V").replace("%r", "%linear")})

    with pytest.raises(UnsupportedModel, match=f"zeros: {result}\n.*\n?.*without values in the file: scale"):
        told(returning(exported, result))


@pytest.mark.parametrize(("operand", "is_refused"), [(", %p_k", True), (", %exp", True), (", 1.0", False)])
def test_one_that_was_applied_to_one_of_two_results_is_refused(operand: str, is_refused: bool) -> None:
    """return h, h * k: an Identity makes the second."""
    text = """net (float[6,4] x) => (float h, float mul) {
        z = MatMul (x, W) h = ReduceMean <keepdims = 0> (z) mul = Identity (h) }"""
    model = as_exported(
        stored_model(text, {"W": W}), parameters=("W",), gone=("k",), operations={"z": "%x, %p_W", "h": "%z"}
    )
    with_operations(model, {"mul": call("mul.Tensor", f"%h{operand}").replace("%r", "%mul")})
    returning(model, "h", "mul")

    if not is_refused:
        build_training_graph(model, loss="mul", optimizer=SGD())
        return
    with pytest.raises(UnsupportedModel, match="without values in the file: k\n"):
        build_training_graph(model, loss="mul", optimizer=SGD())


@pytest.mark.parametrize(
    "choice",
    [ParameterChoice(freeze=("scale",)), ParameterChoice(freeze=("s*",)), ParameterChoice(train=("W", "V"))],
)
def test_what_is_not_to_be_trained_may_be_gone(choice: ParameterChoice) -> None:
    expected = told(two_layers(), ParameterChoice(choice.train))

    assert told(two_layers("scale", y="%mul, %p_V"), choice) == expected


def test_a_pattern_that_freezes_what_is_gone_freezes_what_is_there() -> None:
    lines = told(two_layers("V.scale", y="%mul, %p_V"), ParameterChoice(freeze=("V*",)))

    assert lines[3:] == ["  1 frozen by --freeze: V"]


def test_a_parameter_that_the_module_never_uses_is_trained_nowhere() -> None:
    assert told(two_layers("unused")) == told(two_layers())


def test_what_nothing_tells_of_is_told() -> None:
    """The exporter drops a module's dropout in evaluation, and may have dropped a product behind it."""
    assert told(two_layers("scale", y="%clone, %p_V"))[2:] == [
        "not in the file: 1 parameter",
        "  unused, tied to another, or dropped by the exporter's optimiser (optimize=False tells): scale",
    ]


@pytest.mark.parametrize(("value", "is_refused"), [(1, True), (0, True), (0.5, False)])
def test_a_number_that_is_read_elsewhere_too_is_refused(value: float, is_refused: bool) -> None:
    """y = (h * s) V + s: of an s of 1 the product is gone."""
    text = TWO_LAYERS.replace("y = MatMul (h, V)", "k = MatMul (h, V) y = Add (k, s)")
    model = as_exported(
        stored_model(text, {"W": W, "V": V, "s": np.array(value, np.float32)}),
        parameters=("W", "V", "s"),
        operations={"h": "%x, %p_W", "k": "%mul, %p_V", "y": "%k, %p_s"},
    )

    if not is_refused:
        assert "s" in told(model)[1]
        return
    with pytest.raises(UnsupportedModel, match="read more often, or parts of such: s\n"):
        told(model)


@pytest.mark.parametrize(("read", "is_refused"), [("%mul, %k", True), ("%h, %k", False)])
def test_a_part_whose_other_part_may_be_gone_is_refused(read: str, is_refused: bool) -> None:
    """y = w[0] * h + w[1] * t, with 1 and 0.5."""
    text = "net (float[6,4] x) => (float[6,4] y) { h = MatMul (x, W) k = Mul (h, select_1) y = Add (h, k) }"
    model = as_exported(
        stored_model(text, {"W": W, "select_1": np.array(0.5, np.float32)}),
        parameters=("W",),
        gone=("w",),
        folded={"select_1": ("w", "val_1")},
        operations={"h": "%x, %p_W", "k": "%h, %select_1", "y": read},
    )

    if not is_refused:
        assert any("select_1 (of w)" in line for line in told(model))
        return
    with pytest.raises(UnsupportedModel, match="parts of such: select_1\n"):
        told(model)


def test_a_bias_of_zeros_that_was_computed_is_refused() -> None:
    """A bias with a learning rate of its own: linear(x, W, bias.view(4))."""
    model = as_exported(
        stored_model("net (float[6,4] x) => (float[6,4] y) { y = Gemm (x, W) }", {"W": W}),
        parameters=("W",),
        gone=("bias",),
        operations={"y": "%x, %p_W, %view"},
    )

    with pytest.raises(UnsupportedModel, match="without values in the file: bias"):
        told(model)


MERGED = """
net (float[6,4] x) => (float[6,4] y) { h = MatMul (x, W) mul = Mul (h, h) s = Sin (mul) y = Mul (s, mul) }
"""


@pytest.mark.parametrize(("users", "is_merged"), [(1, True), (2, False)])
def test_products_that_were_merged_are_told_from_a_product_with_1(users: int, is_merged: bool) -> None:
    """Where one was merged, more operations read the other than in PyTorch."""
    model = as_exported(
        stored_model(MERGED, {"W": W}),
        parameters=("W",),
        gone=("scale",),
        operations={"h": "%x, %p_W", "mul": "%h, %h", "s": "%mul", "y": "%s, %mul_1"},
    )
    for entry in (entry for node in model.graph.node for entry in node.metadata_props):
        entry.value = entry.value.replace("num_users=1", f"num_users={users}")

    if is_merged:
        assert told(model)[-1].endswith(": scale")
        return
    with pytest.raises(UnsupportedModel, match="without values in the file: scale"):
        told(model)


def test_an_operation_of_integers_reads_no_parameter() -> None:
    """Positions, to which a step that is gone added 0."""
    text = (
        """net (int64[6] ids) => (float[6,4] y) { p = Cast <to = 7> (ids) q = Abs (p) y = Gather (E, q) }"""
    )
    model = as_exported(
        stored_model(text, {"E": W}),
        parameters=("E",),
        gone=("unused",),
        operations={"p": "%ids", "q": "%add", "y": "%p_E, %q"},
    )
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("p", onnx.TensorProto.INT64, [6]))

    assert told(model)[-1].endswith(": unused")


def test_what_was_folded_and_merged_with_its_equal_reads_no_parameter() -> None:
    text = TWO_LAYERS.replace("y = MatMul (h, V)", "y = Add (h, mul_8)")
    model = as_exported(
        stored_model(text, {"W": W, "mul_8": V[0]}),
        parameters=("W",),
        gone=("unused",),
        folded={"mul_8": ("arange",)},
        operations={"h": "%x, %p_W", "y": "%h, %mul_19"},
    )

    assert told(model)[-1].endswith(": unused")


def test_other_names_of_a_tied_table_are_not_missed() -> None:
    """T5's embeddings read the table of its head, which a module that is never called has, too."""
    text = """net (int64[6] ids, int64[6] targets) => (float loss) {
        e = Gather (weight, ids) t = Transpose <perm = [1, 0]> (weight) s = MatMul (e, t)
        loss = SoftmaxCrossEntropyLoss (s, targets) }"""
    model = as_exported(
        stored_model(text, {"weight": W}),
        parameters=("weight",),
        gone=("shared.weight", "encoder.table.weight"),
        operations={"e": "%p_weight, %ids", "s": "%mul, %p_weight"},
    )
    model.graph.node[0].metadata_props.add(key=SCOPES, value="['', 'encoder', 'encoder.table', 'embedding']")
    lines: list[str] = []

    build_training_graph(model, loss="loss", optimizer=SGD(), tell=lines.append)

    assert lines[-2] == "not in the file: 1 parameter"
    assert lines[-1].endswith(": shared.weight")


def test_computed_sizes_of_a_view_are_no_operations_that_are_gone() -> None:
    text = TWO_LAYERS.replace("y =", "r = Reshape (h, size) y =").replace("(h, V)", "(r, V)")
    model = as_exported(
        stored_model(text, {"W": W, "V": V, "size": np.array([6, 4])}),
        parameters=("W", "V"),
        gone=("unused",),
        operations={**READ, "r": "%h, [%add, 4]", "y": "%r, %p_V"},
    )
    for entry in (entry for node in model.graph.node for entry in node.metadata_props):
        if "%r :" in entry.value:
            entry.value = entry.value.replace("aten.op.", "aten.view.")

    assert len(told(model)) == 2
