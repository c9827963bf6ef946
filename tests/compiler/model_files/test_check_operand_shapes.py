"""Shapes that an op does not take together are refused with the node, as ONNX Runtime refuses to run them."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.numpy_helper import from_array
from onnx.shape_inference import infer_shapes

from partc.compiler.api import compile_step, inspect
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.model_files.check_operand_shapes import check_operand_shapes
from partc.compiler.options import GraphOptions, Options
from partc.runtime.errors import BadModel
from tests.builders.plans.compiled_steps import cluster_of

LSTM_SIZES = "float[3,12,2] x, float[1,16,2] w, float[1,16,4] r"
MISFITS = {
    "labels": ("float[12,5] x, int64[4] l", "y = SoftmaxCrossEntropyLoss (x, l)"),
    "labels of places": ("float[12,5,3] x, int64[12,2] l", "y = SoftmaxCrossEntropyLoss (x, l)"),
    "labels of log probabilities": (
        "float[12,5] h, int64[4] l",
        "x = LogSoftmax (h) y = SoftmaxCrossEntropyLoss (x, l)",
    ),
    "indices": ("float[12,5] x, int64[14,1] l", "y = GatherElements <axis = 1> (x, l)"),
    "scattered indices": (
        "float[12,5] x, int64[14,1] l, float[14,1] u",
        "y = ScatterElements <axis = 1> (x, l, u)",
    ),
    "scattered elements": (
        "float[12,5] x, int64[12,1] l, float[11,1] u",
        "y = ScatterElements <axis = 1> (x, l, u)",
    ),
    "batches of places": ("float[12,5] x, int64[5,1] l", "y = GatherND <batch_dims = 1> (x, l)"),
    "scattered rows": ("float[12,5] x, int64[3,1] l, float[2,5] u", "y = ScatterND (x, l, u)"),
    "lengths": (
        "float[12,5] x, int64[4] l",
        "y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, l)",
    ),
    "a first state": (f"{LSTM_SIZES}, float[1,4,4] h", "y = LSTM <hidden_size = 4> (x, w, r, , , h)"),
    "lengths of sequences": (f"{LSTM_SIZES}, int32[4] l", "y = LSTM <hidden_size = 4> (x, w, r, , l)"),
    "gates": (
        "float[3,12,2] x, float[1,12,2] w, float[1,16,4] r",
        "y = LSTM <hidden_size = 4> (x, w, r)",
    ),
    "a label of Einsum": ("float[12,5] x, float[4,5] w", 'y = Einsum <equation = "bi,bi->b"> (x, w)'),
    "what Gemm adds": ("float[12,5] x, float[5,4] w, float[3,4] b", "y = Gemm (x, w, b)"),
    "channels": ("float[12,5,3] x, float[4,4,1] w", "y = Conv (x, w)"),
    "a bias": ("float[12,5,3] x, float[4,5,1] w, float[3] b", "y = Conv (x, w, b)"),
    "channels, transposed": ("float[12,5,3] x, float[4,4,1] w", "y = ConvTranspose (x, w)"),
    "a scale": ("float[12,5,3] x, float[4] w", "y = InstanceNormalization (x, w, w)"),
    "a scale of features": ("float[12,5] x, float[4] w", "y = LayerNormalization (x, w)"),
}
FITS = {
    "labels": ("float[12,5] x, int64[12] l, float[5] w", "y = SoftmaxCrossEntropyLoss (x, l, w)"),
    "labels of places": ("float[12,5,3] x, int64[12,3] l", "y = SoftmaxCrossEntropyLoss (x, l)"),
    "fewer indices": ("float[12,5] x, int64[4,7] l", "y = GatherElements <axis = 1> (x, l)"),
    "scattered elements": (
        "float[12,5] x, int64[4,1] l, float[4,1] u",
        "y = ScatterElements <axis = 1> (x, l, u)",
    ),
    "batches of places": ("float[12,5] x, int64[12,2,1] l", "y = GatherND <batch_dims = 1> (x, l)"),
    "scattered rows": ("float[12,5] x, int64[3,1] l, float[3,5] u", "y = ScatterND (x, l, u)"),
    "both directions": (
        "float[3,12,2] x, float[2,12,2] w, float[2,12,4] r, float[2,24] b, int32[12] l, float[2,12,4] h",
        'y = GRU <hidden_size = 4, direction = "bidirectional"> (x, w, r, b, l, h)',
    ),
    "peepholes": (
        f"{LSTM_SIZES}, float[1,32] b, float[1,12,4] h, float[1,12] p",
        "y = LSTM <hidden_size = 4> (x, w, r, b, , h, h, p)",
    ),
    "a stretched label": ("float[12,5] x, float[1,5] w", 'y = Einsum <equation = "bi,bi->b"> (x, w)'),
    "what Gemm adds": ("float[5,12] x, float[4,5] w, float[4] b", "y = Gemm <transA=1, transB=1> (x, w, b)"),
    "groups": ("float[2,6,3] x, float[4,3,1] w, float[4] b", "y = Conv <group = 2> (x, w, b)"),
    "transposed groups": (
        "float[2,6,3] x, float[6,2,1] w, float[4] b",
        "y = ConvTranspose <group = 2> (x, w, b)",
    ),
    "a scale": ("float[2,6,3] x, float[6] w", "y = InstanceNormalization (x, w, w)"),
    "a scale of features": ("float[12,5] x, float[5] w", "y = LayerNormalization (x, w, w)"),
}


def parse(inputs: str, body: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({inputs}) => (float y) {{ {body} }}""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def run(model: onnx.ModelProto) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    feeds = {
        value.name: np.zeros(
            [size.dim_value for size in value.type.tensor_type.shape.dim],
            tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
        )
        for value in model.graph.input
    }
    onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


@pytest.mark.parametrize(("inputs", "body"), MISFITS.values(), ids=MISFITS.keys())
def test_what_onnx_runtime_does_not_run_is_refused(inputs: str, body: str) -> None:
    model = parse(inputs, body)
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        run(model)

    with pytest.raises(BadModel, match=r" takes \[.*\] beside .* is of \["):
        check_operand_shapes(infer_shapes(model, strict_mode=True))


@pytest.mark.parametrize(("inputs", "body"), FITS.values(), ids=FITS.keys())
def test_what_onnx_runtime_runs_is_taken(inputs: str, body: str) -> None:
    model = parse(inputs, body)

    run(model)

    check_operand_shapes(infer_shapes(model, strict_mode=True))


def test_a_bias_of_two_axes_is_told_with_what_helps() -> None:
    """PyTorch's exporter, unoptimised, writes one of zeros for Conv3d(bias=False)."""
    model = parse(
        "float[2,5,3] x, float[4,5,1] w, int64[2] sizes, float z", "b = Expand (z, sizes) y = Conv (x, w, b)"
    )

    with pytest.raises(
        BadModel, match=r"takes \[4\] beside 'x' of \[2,5,3\], and 'b' is of \[\?,\?\]"
    ) as caught:
        check_operand_shapes(infer_shapes(model))

    assert caught.value.fix.endswith("give the convolution a bias, or export the module optimised")
    with pytest.raises(BadModel) as caught:
        check_operand_shapes(parse(*MISFITS["a bias"]))
    assert caught.value.fix == "give 'b' the shape that fits, or export the model again"


def test_weights_of_other_classes_are_refused() -> None:
    """ONNX Runtime reads as many as there are: the standard wants one for each class."""
    model = parse("float[12,5] x, int64[12] l, float[4] w", "y = SoftmaxCrossEntropyLoss (x, l, w)")

    with pytest.raises(BadModel, match=r"takes \[5\] beside 'x' of \[12,5\], and 'w' is of \[4\]") as caught:
        check_operand_shapes(infer_shapes(model))

    assert "SoftmaxCrossEntropyLoss" in caught.value.at


def test_a_symbol_may_be_any_size() -> None:
    check_operand_shapes(parse("float[n,5] x, int64[4] l", "y = SoftmaxCrossEntropyLoss (x, l)"))
    with pytest.raises(BadModel, match=r"takes \[n\] beside"):
        check_operand_shapes(parse("float[n,5] x, int64[n,1] l", "y = SoftmaxCrossEntropyLoss (x, l)"))


@pytest.mark.parametrize("labels", ["", "<int64[4] l = {0, 1, 2, 3}>"])
def test_a_step_is_not_made_of_too_few_labels(labels: str) -> None:
    inputs = "" if labels else ", int64[4] l"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 17]>
        g (float[12,6] x{inputs}) => (float loss) {labels} {{
            h = MatMul (x, W) loss = SoftmaxCrossEntropyLoss (h, l) }}""")
    model.graph.initializer.append(from_array(np.ones((6, 5), np.float32), "W"))

    with pytest.raises(BadModel, match=r"takes \[12\] beside 'h' of \[12,5\], and 'l' is of \[4\]"):
        build_training_graph(model, loss="loss", optimizer=SGD(0.1))


def test_a_step_with_too_few_labels_is_not_compiled(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 17]>
        g (float[12,6] x, int64[4] l, float[6,5] W) => (float loss, float[6,5] W_next) {
            h = MatMul (x, W) loss = SoftmaxCrossEntropyLoss (h, l)
            xt = Transpose (x) dW = MatMul (xt, h) W_next = Sub (W, dW) }""")
    options = GraphOptions(state={"W": "W_next"}, sample_axes={"x": 0, "l": 0})

    with pytest.raises(BadModel, match=r"takes \[12\] beside 'h' of \[12,5\], and 'l' is of \[4\]"):
        inspect(model, options=options)
    with pytest.raises(BadModel, match=r"takes \[12\] beside"):
        compile_step(model, cluster_of("1x2"), tmp_path / "out", Options(options=options))

    assert list(tmp_path.iterdir()) == []
