import numpy as np
import onnx
import pytest
from onnx import parser

from partc.passes.cpu_kernels.gather_samples import gather_samples
from partc.passes.windows import window_functions
from partc.passes.windows.windows import Windows
from tests.builders.graphs.rewritten_models import named, rewritten, run

OPSET = 21
DATA_GRADIENT = window_functions.conv_data_gradient(
    Windows((1, 1), (1, 1), (1, 1), (0, 0), (0, 0), (7, 7), (7, 7)), 1, OPSET
)


def parsed(text: str) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {OPSET}, "partc" : 1]> step {text}')
    model.functions.append(DATA_GRADIENT)
    model.opset_import[1].domain = DATA_GRADIENT.domain
    return named(model)


def test_a_convolution_and_its_data_gradient_are_the_same_gathered() -> None:
    model = parsed(
        f"""(float[8,256,7,7] x, float[512,256,1,1] W, float[8,512,7,7] dy)
            => (float[8,512,7,7] y, float[8,256,7,7] dx) {{
            y = Conv (x, W)
            dx = {DATA_GRADIENT.domain}.{DATA_GRADIENT.name} (dy, W)
        }}"""
    )

    result, changed = rewritten(model, gather_samples)

    assert changed == ["y", "dx"]
    assert [node.op_type for node in result.graph.node].count("MatMul") == 2
    for found, expected in zip(run(result), run(model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_an_image_of_two_convolutions_is_turned_once() -> None:
    model = parsed(
        """(float[8,512,7,7] x, float[512,512,1,1] V, float[512,512,1,1] W)
            => (float[8,512,7,7] y, float[8,512,7,7] z) { y = Conv (x, V) z = Conv (x, W) }"""
    )

    result, _ = rewritten(model, gather_samples)

    assert sum("x" in node.input for node in result.graph.node) == 1


@pytest.mark.parametrize(
    "text",
    [
        "(float[8,256,8,8] x, float[512,256,1,1] W) => (float[8,512,8,8] y) { y = Conv (x, W) }",
        "(float[8,16,7,7] x, float[16,16,1,1] W) => (float[8,16,7,7] y) { y = Conv (x, W) }",
        "(float[8,256,7,7] x, float[512,256,1,1] W) => (float[8,512,4,4] y)"
        " { y = Conv <strides = [2,2]> (x, W) }",
        "(float[8,256,7,7] x, float[512,128,1,1] W) => (float[8,512,7,7] y) { y = Conv <group = 2> (x, W) }",
        "(float[8,256,7,7] x, float[512,256,1,1] W, float[512] b) => (float[8,512,7,7] y)"
        " { y = Conv (x, W, b) }",
        "(float[8,256,7,7] x, float[512,256,3,3] W) => (float[8,512,5,5] y) { y = Conv (x, W) }",
    ],
    ids="vectors channels strides groups bias taps".split(),
)
def test_others_stay_as_they_are(text: str) -> None:
    result, changed = rewritten(parsed(text), gather_samples)

    assert changed == []
    assert [node.op_type for node in result.graph.node] == ["Conv"]
