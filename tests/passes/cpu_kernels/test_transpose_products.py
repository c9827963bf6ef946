import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser, shape_inference

from partc.passes.cpu_kernels.transpose_products import transpose_products

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
RECURRENT = """
step (float[16,1024] h0, float[1024,1024] W) => (float[16,1024] h3) {
    h1 = MatMul (h0, W)
    g1 = Tanh (h1)
    h2 = MatMul (g1, W)
    g2 = Tanh (h2)
    h3 = MatMul (g2, W)
}
"""
# Enough products that their gain pays for the transpose.
LONG = RECURRENT.replace("h3 = MatMul (g2, W)", "h4 = MatMul (g2, W) h5 = MatMul (h4, W) h3 = MatMul (h5, W)")
BACKWARD = """
back (float[1,16,512] dy, float[1024,512] W) => (float[1,16,1024] dx) {
    Wt = Transpose <perm = [1, 0]> (W)
    dx = MatMul (dy, Wt)
}
"""


def turned(text: str) -> tuple[onnx.ModelProto, int]:
    model = parser.parse_model(HEADER + text)
    for node in model.graph.node:
        node.name = node.output[0]
    changed = transpose_products(model, shape_inference.infer_shapes(model))
    onnx.checker.check_model(model, full_check=True)
    return model, changed


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def run(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    shapes = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.input
    }
    feeds = {name: random.normal(scale=0.05, size=shape).astype(np.float32) for name, shape in shapes.items()}
    return np.asarray(session.run(None, feeds)[0])


def test_a_transposed_matrix_is_multiplied_as_it_lies() -> None:
    model, changed = turned(BACKWARD)

    assert changed == 1
    assert ops(model) == ["Reshape", "Transpose", "MatMul", "Transpose", "Reshape"]
    assert model.graph.node[2].input[0] == "W"


def test_a_matrix_of_many_products_is_transposed_once() -> None:
    model, changed = turned(LONG)

    assert changed == 5
    assert ops(model).count("Einsum") == 1
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert {node.input[0] for node in products} == {"h1/transposed/matrix"}


@pytest.mark.parametrize("text", [LONG, BACKWARD], ids=["forward", "backward"])
def test_the_values_stay_the_same(text: str) -> None:
    before = run(parser.parse_model(HEADER + text))

    np.testing.assert_allclose(run(turned(text)[0]), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        RECURRENT,
        LONG.replace("[16,", "[4,"),
        LONG.replace("[16,", "[65,"),
        LONG.replace("[16,", "[N,"),
        LONG.replace("1024", "256"),
        LONG.replace("float[", "double["),
    ],
    ids=["few products", "few rows", "many rows", "unknown rows", "a small matrix", "float64"],
)
def test_a_product_that_would_gain_nothing_is_left_alone(text: str) -> None:
    model, changed = turned(text)

    assert changed == 0
    assert ops(model) == [node.op_type for node in parser.parse_model(HEADER + text).graph.node]


def test_an_initializer_is_left_to_be_packed_once() -> None:
    model = parser.parse_model(
        HEADER
        + BACKWARD.replace("[1024,512] W", "[512,1024] Wt").replace(
            "    Wt = Transpose <perm = [1, 0]> (W)\n", ""
        )
    )
    weight = onnx.numpy_helper.from_array(np.ones((512, 1024), np.float32), "Wt")
    model.graph.initializer.append(weight)

    assert transpose_products(model, shape_inference.infer_shapes(model)) == 0
