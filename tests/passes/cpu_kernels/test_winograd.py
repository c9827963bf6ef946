"""Convolutions on tiles against the same as they are, in ONNX Runtime's kernels."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from partc.passes.cpu_kernels import winograd_tiles
from partc.passes.cpu_kernels.winograd import tile_convolutions
from partc.passes.cpu_kernels.winograd_tiles import Tiling
from partc.passes.windows import window_functions
from partc.passes.windows.windows import Windows
from tests.builders.graphs.rewritten_models import named, rewritten, run

OPSET = 21
Pads = tuple[int, int, int, int]

# samples, c, o, rows, columns, padding: whole tiles, ragged ones, uneven padding, few rows, none
CASES = [
    (4, 64, 64, 16, 16, (1, 1, 1, 1)),
    (3, 96, 160, 13, 9, (0, 2, 1, 1)),
    (8, 160, 128, 7, 7, (1, 1, 1, 1)),
    (6, 128, 96, 12, 15, (0, 0, 0, 0)),
]


def convolution(n: int, c: int, o: int, h: int, w: int, pads: Pads) -> onnx.ModelProto:
    """A convolution with bias and both of its gradients, as a segment has them."""
    target = h + pads[0] + pads[2] - 2, w + pads[1] + pads[3] - 2
    windows = Windows((3, 3), (1, 1), (1, 1), pads[:2], pads[2:], (h, w), target)
    data = window_functions.conv_data_gradient(windows, 1, OPSET)
    weight = window_functions.conv_weight_gradient(windows, (o, c, 3, 3), 1, OPSET)
    x, y, kernel = f"float[{n},{c},{h},{w}]", f"float[{n},{o},{target[0]},{target[1]}]", f"float[{o},{c},3,3]"
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {OPSET}, "{data.domain}" : 1]>
        step ({x} x, {kernel} W, float[{o}] b, {y} dy) => ({y} y, {x} dx, {kernel} dW) {{
            y = Conv <pads = {list(pads)}> (x, W, b)
            dx = {data.domain}.{data.name} (dy, W)
            dW = {weight.domain}.{weight.name} (x, dy)
        }}"""
    )
    model.functions.extend([data, weight])
    return named(model)


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_convolution_and_its_gradients_are_the_same_on_tiles(
    case: tuple[int, int, int, int, int, Pads],
) -> None:
    model = convolution(*case)

    on_tiles, changed = rewritten(model, tile_convolutions)

    assert changed == ["y", "dx", "dW"]
    assert not {"Conv", "ConvTranspose"} & {*ops(on_tiles)}
    for found, expected in zip(run(on_tiles), run(model), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_batch_of_any_size_is_tiled_alike() -> None:
    """The choice changes rounding: a replica's samples alone and all together give the same bits."""
    text = "(float[n,64,18,18] x, float[64,64,3,3] W) => (float[n,64,16,16] y) { y = Conv (x, W) }"
    model = named(parser.parse_model(f'<ir_version: 10, opset_import: ["" : {OPSET}]> step {text}'))
    on_tiles, changed = rewritten(model, tile_convolutions)
    one_thread = ort.SessionOptions()
    one_thread.intra_op_num_threads = 1
    session = ort.InferenceSession(
        on_tiles.SerializeToString(), one_thread, providers=["CPUExecutionProvider"]
    )
    random = np.random.default_rng(0)
    x, kernel = (random.normal(size=s).astype(np.float32) for s in ((6, 64, 18, 18), (64, 64, 3, 3)))

    (whole,) = session.run(None, {"x": x, "W": kernel})
    parts = [session.run(None, {"x": part, "W": kernel})[0] for part in np.split(x, 3)]

    assert changed == ["y"]
    assert np.array_equal(np.asarray(whole), np.concatenate([np.asarray(part) for part in parts]))


def test_the_matrices_convolve_exactly() -> None:
    """In float64: one tile of one channel."""
    random = np.random.default_rng(1)
    tile, kernel = random.normal(size=(6, 6)), random.normal(size=(3, 3))
    expected = [(tile[i : i + 3, j : j + 3] * kernel).sum() for i in range(4) for j in range(4)]

    products = (winograd_tiles.of_kernel() @ kernel.ravel()) * (winograd_tiles.of_source() @ tile.ravel())

    np.testing.assert_allclose(winograd_tiles.of_target() @ products, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "sizes", [((8, 8), (8, 8), (1, 1)), ((7, 5), (6, 6), (0, 2)), ((3, 3), (1, 1), (0, 0))]
)
def test_readers_are_the_reads_seen_from_the_pixels(sizes: tuple[tuple[int, int], ...]) -> None:
    tiling = Tiling(*sizes)
    reads = tiling.reads()
    pixels = sizes[0][0] * sizes[0][1]

    for pixel, readers in enumerate(tiling.readers().T):
        assert sorted(readers[readers < len(reads)]) == np.flatnonzero(reads == pixel).tolist()
    assert np.array_equal(tiling.outputs()[tiling.pieces()], np.arange(sizes[1][0] * sizes[1][1]))
    assert reads.max() <= pixels


def test_products_of_a_segment_share_their_factors() -> None:
    on_tiles, _ = rewritten(convolution(*CASES[0]), tile_convolutions)

    # x, W and dy once each; the three products; three maps back
    assert ops(on_tiles).count("MatMul") == 9


@pytest.mark.parametrize(
    "text",
    [
        "(float[4,64,16,16] x, float[64,64,3,3] W) => (float[4,64,7,7] y)"
        " { y = Conv <strides = [2, 2]> (x, W) }",
        "(float[4,64,16,16] x, float[64,64,3,3] W) => (float[4,64,12,12] y)"
        " { y = Conv <dilations = [2, 2]> (x, W) }",
        "(float[4,64,16,16] x, float[64,32,3,3] W) => (float[4,64,14,14] y) { y = Conv <group = 2> (x, W) }",
        "(float[4,64,16,16] x, float[64,64,5,5] W) => (float[4,64,12,12] y) { y = Conv (x, W) }",
        "(float[4,64,16,16] x, float[64,64,3,3] W) => (float[4,64,16,16] y)"
        ' { y = Conv <auto_pad = "SAME_UPPER"> (x, W) }',
        "(float16[4,64,16,16] x, float16[64,64,3,3] W) => (float16[4,64,14,14] y) { y = Conv (x, W) }",
        "(float[4,8,16,16] x, float[8,8,3,3] W) => (float[4,8,14,14] y) { y = Conv (x, W) }",
        "(float[4,512,4,4] x, float[512,512,3,3] W) => (float[4,512,2,2] y) { y = Conv (x, W) }",
    ],
    ids="strides dilations groups taps auto_pad 16-bits channels kernels".split(),
)
def test_others_stay_as_they_are(text: str) -> None:
    model = named(parser.parse_model(f'<ir_version: 10, opset_import: ["" : {OPSET}]> step {text}'))

    on_tiles, changed = rewritten(model, tile_convolutions)

    assert changed == []
    assert ops(on_tiles) == ["Conv"]
