"""Windows on parts: what ranks compute of their rows and halos is what the whole does, to the last bit."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN
from partc.passes.windows import window_functions as functions
from partc.passes.windows.read_windows import FUNCTION_NAME
from partc.passes.windows.windows import AxisSizes, Windows, averages_alike, lay_windows
from partc.runtime.plan.boxes import part_range
from tests.sampling import sampled

OPSET = 21
FLOAT32 = np.dtype(np.float32)
LOWEST = np.nextafter(np.finfo(np.float32).min, np.float32(0))


@dataclass(frozen=True)
class Case:
    """Windows of height and width, and images of small integers: sums are exact in any order."""

    windows: Windows
    parts: int
    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray

    @property
    def rows(self) -> tuple[int, int]:
        """Of a part: of x, and of dy."""
        return self.windows.source[0] // self.parts, self.windows.target[0] // self.parts


def random_case(seed: int, dilates: bool = True) -> Case:
    rng = np.random.default_rng(seed)
    kernel, stride, dilation = int(rng.choice([1, 2, 3, 5, 7])), int(rng.choice([1, 2, 3])), 1
    dilation = int(rng.choice([1, 2])) if dilates and kernel < 5 else 1
    parts, rows = int(rng.choice([2, 3, 4])), int(rng.integers(4, 7))
    padding = max(0, (kernel - 1) * dilation + 1 - stride)
    before = int(rng.integers(padding + 1))
    target = (parts * rows, 4)
    source = (target[0] * stride, 4)
    pads = (before, 1, padding - before, 1)
    windows = lay_windows((kernel, 3), (stride, 1), (dilation, 1), pads, "NOTSET", source, target)
    x, dy, weight = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in ((2, 3, *source), (2, 4, *target), (4, 3, kernel, 3))
    )
    return Case(windows, parts, x, dy, weight)


def widened(image: np.ndarray, rank: int, rows: int, halo: tuple[int, int], fill: float = 0) -> np.ndarray:
    padded = np.pad(image, [(0, 0), (0, 0), halo, (0, 0)], constant_values=fill)
    return padded[:, :, rank * rows : (rank + 1) * rows + sum(halo)]


def call(function: onnx.FunctionProto, *operands: np.ndarray) -> np.ndarray:
    node = helper.make_node(function.name, list(function.input), ["y"], domain=FUNCTION_DOMAIN)
    return run(node, dict(zip(function.input, operands, strict=True)), [function])


def run(
    node: onnx.NodeProto, feeds: dict[str, np.ndarray], bodies: list[onnx.FunctionProto] | None = None
) -> np.ndarray:
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, a.shape) for n, a in feeds.items()]
    graph = helper.make_graph([node], "one", inputs, [helper.make_empty_tensor_value_info("y")])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUNCTION_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=bodies or [], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], feeds)[0])


SEEDS = sampled(range(24), range(0, 24, 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_convolutions_of_parts_are_parts_of_the_convolution(seed: int) -> None:
    case = random_case(seed)
    windows, local = case.windows, case.windows.of_part(0, case.parts)

    def convolve(at: Windows, x: np.ndarray) -> np.ndarray:
        node = helper.make_node("Conv", ["x", "w"], ["y"], **at.forward())
        return run(node, {"x": x, "w": case.weight})

    wide = [widened(case.x, rank, case.rows[0], windows.halo(0)) for rank in range(case.parts)]
    whole = np.concatenate([convolve(local, part) for part in wide], 2)
    np.testing.assert_array_equal(whole, convolve(windows, case.x))


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_parts_are_parts_of_the_gradient(seed: int) -> None:
    case = random_case(seed)
    windows, local = case.windows, case.windows.back_to_part(0, case.parts)

    wide = [widened(case.dy, rank, case.rows[1], windows.halo_back(0)) for rank in range(case.parts)]
    here = functions.conv_data_gradient(local, 1, OPSET)
    whole = np.concatenate([call(here, part, case.weight) for part in wide], 2)
    expected = call(functions.conv_data_gradient(windows, 1, OPSET), case.dy, case.weight)
    np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_gradients_of_parts_add_up(seed: int) -> None:
    case = random_case(seed)
    windows, shape = case.windows, case.weight.shape

    here = functions.conv_weight_gradient(windows.of_part(0, case.parts), shape, 1, OPSET)
    total = np.zeros(shape, np.float32)
    for rank in range(case.parts):
        x = widened(case.x, rank, case.rows[0], windows.halo(0))
        total += call(here, x, widened(case.dy, rank, case.rows[1], (0, 0)))
    expected = call(functions.conv_weight_gradient(windows, shape, 1, OPSET), case.x, case.dy)
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_winners_of_parts_are_those_of_the_whole_where_entries_tie(seed: int) -> None:
    """Images are of seven numbers, so that most windows tie."""
    case = random_case(seed, dilates=False)  # ONNX Runtime pads a pooling by less than its kernel
    windows, local = case.windows, case.windows.of_readers(0, case.parts)
    dy = case.dy[:, :3]

    here = functions.max_pool_gradient(local, FLOAT32, OPSET)
    before, own = windows.halo_of_readers(0)[0], case.rows[0]
    parts = []
    for rank in range(case.parts):
        x = widened(case.x, rank, own, windows.halo_of_readers(0), LOWEST)
        wide = call(here, x, widened(dy, rank, case.rows[1], windows.halo_back(0)))
        parts.append(wide[:, :, before : before + own])
    expected = call(functions.max_pool_gradient(windows, FLOAT32, OPSET), case.x, dy)
    np.testing.assert_array_equal(np.concatenate(parts, 2), expected)


# ---------------------------------------------------------------- parts of different sizes


@dataclass(frozen=True)
class UnevenCase:
    """Windows of any height on any number of rows; parts of the rows that they make, and that they read."""

    windows: Windows
    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray
    made: list[tuple[int, int]]
    read: list[tuple[int, int]]


def uneven_case(seed: int, dilates: bool = True) -> UnevenCase:
    rng = np.random.default_rng(1000 + seed)
    while True:
        kernel, stride = int(rng.integers(1, 6)), int(rng.integers(1, 4))
        dilation, parts = int(rng.integers(1, 3)) if dilates else 1, int(rng.integers(2, 5))
        pads, rows = tuple(map(int, rng.integers(0, kernel, 2))), int(rng.integers(5, 18))
        target = (rows + sum(pads) - (kernel - 1) * dilation - 1) // stride + 1
        if target >= parts:
            break
    sizes = (rows, 4), (target, 4)
    windows = lay_windows((kernel, 3), (stride, 1), (dilation, 1), (pads[0], 1, pads[1], 1), "NOTSET", *sizes)
    x, dy, weight = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in ((2, 3, *sizes[0]), (2, 4, *sizes[1]), (4, 3, kernel, 3))
    )
    made, read = ([part_range(size, parts, part) for part in range(parts)] for size in (target, rows))
    return UnevenCase(windows, x, dy, weight, made, read)


def rows_of(image: np.ndarray, start: int, stop: int, fill: float = 0) -> np.ndarray:
    """Return rows of an image, `fill` where it has none."""
    before, after = max(0, -start), max(0, stop - image.shape[2])
    padded = np.pad(image, [(0, 0), (0, 0), (before, after), (0, 0)], constant_values=fill)
    return padded[:, :, start + before : stop + before]


UNEVEN_SEEDS = sampled(range(60), range(0, 60, 3))


@pytest.mark.parametrize("seed", UNEVEN_SEEDS)
def test_any_part_of_a_convolution_reads_no_rows_but_its_windows(seed: int) -> None:
    case = uneven_case(seed)
    local = {**case.windows.forward(), "pads": (0, 1, 0, 1)}

    def convolve(attributes: Mapping[str, AxisSizes], x: np.ndarray) -> np.ndarray:
        return run(helper.make_node("Conv", ["x", "w"], ["y"], **attributes), {"x": x, "w": case.weight})

    parts = [convolve(local, rows_of(case.x, *case.windows.entries_read(0, *part))) for part in case.made]
    assert [part.shape[2] for part in parts] == [stop - start for start, stop in case.made]
    np.testing.assert_array_equal(np.concatenate(parts, 2), convolve(case.windows.forward(), case.x))


@pytest.mark.parametrize("seed", UNEVEN_SEEDS)
def test_any_part_of_a_gradient_is_made_of_the_windows_that_meet_it(seed: int) -> None:
    case = uneven_case(seed)
    windows = case.windows
    readers = [windows.readers(0, *part) for part in case.read]
    here = functions.conv_data_gradient(windows.varying(0, 99), 1, OPSET)

    parts = []
    for part, some in zip(case.read, readers, strict=True):
        wide = call(here, case.dy[:, :, slice(*some)], case.weight)
        first, last = windows.entries_read(0, *some)
        assert wide.shape[2] == last - first
        parts.append(rows_of(wide, part[0] - first, part[1] - first))
    expected = call(functions.conv_data_gradient(windows, 1, OPSET), case.dy, case.weight)
    np.testing.assert_array_equal(np.concatenate(parts, 2), expected)


@pytest.mark.parametrize("seed", UNEVEN_SEEDS)
@pytest.mark.parametrize("channels", [3, 5])  # few are multiplied otherwise
def test_weights_gradients_of_parts_of_different_sizes_add_up(seed: int, channels: int) -> None:
    case = uneven_case(seed)
    x = np.concatenate([case.x, case.x[:, : channels - 3]], 1)
    shape = (4, channels, *case.weight.shape[2:])
    most = max(stop - start for start, stop in case.made)

    here = functions.conv_weight_gradient(case.windows.varying(0, most), shape, 1, OPSET)
    total = np.zeros(shape, np.float32)
    for part in case.made:
        own = rows_of(x, *case.windows.entries_read(0, *part))
        total += call(here, own, case.dy[:, :, slice(*part)])
    expected = call(functions.conv_weight_gradient(case.windows, shape, 1, OPSET), x, case.dy)
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("seed", UNEVEN_SEEDS)
def test_winners_and_averages_of_parts_of_different_sizes_are_those_of_the_whole(seed: int) -> None:
    case = uneven_case(seed, dilates=False)
    windows, dy = case.windows, case.dy[:, :3]
    counted = windows.before, tuple(max(0, after) for after in windows.after)
    varying = windows.varying(0, 99)
    bodies = {
        "winners": functions.max_pool_gradient(varying, FLOAT32, OPSET),
        "averages": functions.average_pool_gradient(varying, 3, ((0, 1), (0, 1)), FLOAT32, OPSET),
    }

    parts: dict[str, list[np.ndarray]] = {name: [] for name in bodies}
    for part in case.read:
        some = windows.readers(0, *part)
        first, last = windows.entries_of_readers(0, *part)
        operands = {"winners": [rows_of(case.x, first, last, LOWEST)], "averages": []}
        for name, body in bodies.items():
            wide = call(body, *operands[name], dy[:, :, slice(*some)])
            parts[name].append(rows_of(wide, part[0] - first, part[1] - first))
    winners = call(functions.max_pool_gradient(windows, FLOAT32, OPSET), case.x, dy)
    averages = call(functions.average_pool_gradient(windows, 3, counted, FLOAT32, OPSET), dy)
    np.testing.assert_array_equal(np.concatenate(parts["winners"], 2), winners)
    np.testing.assert_allclose(np.concatenate(parts["averages"], 2), averages, rtol=1e-6, atol=1e-6)


def laid(kernel: int, stride: int, pads: tuple[int, int], source: int, dilation: int = 1) -> Windows:
    target = (source + sum(pads) - (kernel - 1) * dilation - 1) // stride + 1
    return lay_windows((kernel,), (stride,), (dilation,), pads, "NOTSET", (source,), (target,))


@pytest.mark.parametrize(
    ("windows", "halo", "back"),
    [
        (laid(3, 1, (1, 1), 8), (1, 1), (1, 1)),
        (laid(3, 1, (0, 2), 8), (0, 2), (2, 0)),
        (laid(3, 1, (2, 2), 8, dilation=2), (2, 2), (2, 2)),
        (laid(7, 2, (3, 3), 16), (3, 2), (1, 2)),
        (laid(3, 2, (1, 1), 16), (1, 0), (0, 1)),
        (laid(1, 2, (0, 0), 16), (0, 0), (0, 0)),
        (laid(2, 2, (0, 0), 16), (0, 0), (0, 0)),
    ],
)
def test_a_halo_is_what_windows_reach_over(
    windows: Windows, halo: tuple[int, int], back: tuple[int, int]
) -> None:
    assert windows.has_parts(0)
    assert windows.halo(0) == halo
    assert windows.halo_back(0) == back


@pytest.mark.parametrize(
    "windows",
    [
        laid(3, 1, (0, 0), 8),  # fewer rows than were read
        laid(3, 2, (1, 1), 15),
        laid(1, 2, (1, 0), 16),  # rows at the end that another window would read
    ],
)
def test_parts_that_do_not_lie_alike_are_told(windows: Windows) -> None:
    assert not windows.has_parts(0)


def test_averages_of_fewer_entries_at_the_ends_differ() -> None:
    padded, plain = laid(3, 1, (1, 1), 8), laid(2, 2, (0, 0), 8)

    assert averages_alike(padded, 0, ((1,), (1,)))
    assert not averages_alike(padded, 0, None)
    assert averages_alike(plain, 0, None)


def test_a_functions_name_tells_its_windows() -> None:
    windows = random_case(1).windows
    made = [
        functions.conv_data_gradient(windows, 2, OPSET),
        functions.conv_weight_gradient(windows, (4, 3, *windows.kernel), 2, OPSET),
        functions.max_pool_gradient(windows, FLOAT32, OPSET),
        functions.average_pool_gradient(windows, 3, None, FLOAT32, OPSET),
        functions.average_pool_gradient(windows, 3, ((1, 1), (0, 1)), FLOAT32, OPSET),
    ]

    found = [FUNCTION_NAME.fullmatch(function.name) for function in made]

    assert [match["kind"] for match in found if match] == [
        *("ConvDataGrad", "ConvWeightGrad", "MaxPoolGrad"),
        *("AveragePoolGrad", "AveragePoolGrad"),
    ]
    assert all(match and match["strides"] == "x".join(map(str, windows.strides)) for match in found)
    assert [match and match["counted"] for match in found] == [None, None, None, None, "1x1x0x1"]
