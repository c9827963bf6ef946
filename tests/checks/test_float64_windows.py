"""What stands for float64 convolutions and averages is what ONNX Runtime computes in float32."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.checks.float64_windows import open_in_float64

CASES = [
    ("Conv <pads = [1, 0, 2, 1], strides = [2, 1], dilations = [1, 2]> (x, w, b)", (6, 4, 3, 2)),
    ("Conv <group = 2> (x, w, b)", (6, 2, 2, 3)),
    ("Conv (x, w)", (6, 4, 1, 1)),
    (
        "ConvTranspose <kernel_shape = [3, 2], pads = [1, 0, 0, 1], strides = [2, 3], "
        "output_padding = [1, 0]> (x, w)",
        (4, 5, 3, 2),
    ),
    ("ConvTranspose <kernel_shape = [3, 2], dilations = [2, 1], group = 2> (x, w, b)", (4, 3, 3, 2)),
    ("AveragePool <kernel_shape = [3, 2], pads = [1, 0, 1, 1], strides = [2, 1]> (x)", ()),
    ("AveragePool <kernel_shape = [2, 2], pads = [1, 1, 0, 0], count_include_pad = 1> (x)", ()),
    ("LpPool <kernel_shape = [3, 2], pads = [1, 0, 1, 1], strides = [2, 1], p = 3> (x)", ()),
    ("GlobalAveragePool (x)", ()),
]


@pytest.mark.parametrize(("node", "weight"), CASES)
def test_windows_in_float64_are_those_in_float32(
    node: str, weight: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(3, 4, 7, 5)), "w": rng.normal(size=weight), "b": rng.normal(size=6)}

    expected = run(node, "float", {name: array.astype(np.float32) for name, array in feeds.items()})
    open_in_float64(monkeypatch)
    actual = run(node, "double", feeds)

    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def run(node: str, dtype: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
    names = [name for name in feeds if name in node[node.rindex("(") :]]
    inputs = ", ".join(f"{dtype}[{','.join(map(str, feeds[name].shape))}] {name}" for name in names)
    text = f'<ir_version: 10, opset_import: ["": 18]> g ({inputs}) => ({dtype}[N,C,H,W] y) {{ y = {node} }}'
    model = onnx.parser.parse_model(text).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {name: feeds[name] for name in names})[0]
