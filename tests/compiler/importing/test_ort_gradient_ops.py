"""onnxruntime-training's gradient ops, each beside its forward op, against central differences of that."""

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from partc.compiler.importing.ort_training.gradient_ops import GRADIENT_OPS
from partc.compiler.importing.ort_training.lower_nodes import lower_training_nodes, move_misplaced
from partc.runtime.errors import BadModel, UnsupportedModel

OPSET = 21


@dataclass(frozen=True)
class Case:
    """`text`: the nodes, where y is the forward op's output and d<name> the gradient of an input <name>."""

    op: str
    text: str
    inputs: dict[str, tuple[int, ...]]  # differentiated
    y: tuple[int, ...]
    dtype: str = "double"
    step: float = 1e-5
    opset: int = OPSET

    def __str__(self) -> str:
        return f"{self.op} {self.text.strip()[:40]}"


SLICED = """s = Constant <value_ints = [1, -1]> () e = Constant <value_ints = [4, -5]> ()
    a = Constant <value_ints = [0, 1]> () t = Constant <value_ints = [2, -1]> ()
    y = Slice (x, s, e, a, t) shape = Shape (x)
    dx = com.microsoft.SliceGrad (dy, shape, s, e, a, t)"""
GATHERED_ND = """i = Constant <value = int64[3,1] {2, 0, 2}> () y = GatherND (x, i) shape = Shape (x)
    dx = com.microsoft.GatherNDGrad (shape, i, dy)"""
GATHERED_ELEMENTS = """i = Constant <value = int64[2,3] {0, -1, 0, 1, 2, 0}> ()
    y = GatherElements <axis = 0> (x, i) shape = Shape (x)
    dx = com.microsoft.GatherElementsGrad <axis = 0> (dy, shape, i, x)"""
DROPPED = """on = Constant <value = bool {1}> () r = Constant <value_float = 0.25> ()
    mask = Constant <value = bool[2,3] {1, 0, 1, 1, 1, 0}> () zero = Constant <value = double {0.0}> ()
    scale = Constant <value = double {0.75}> () kept = Div (x, scale) y = Where (mask, kept, zero)
    dx = com.microsoft.DropoutGrad (dy, mask, r, on)"""
QUICK = """alpha = Constant <value = double {1.5}> () ax = Mul (alpha, x) s = Sigmoid (ax) y = Mul (x, s)
    dx = com.microsoft.QuickGeluGrad <alpha = 1.5> (dy, x)"""
CONVOLVED = """y = Conv <kernel_shape = [2, 3], strides = [2, 1], pads = [1, 0, 0, 1], group = 2> (x, w, b)
    dx, dw, db = com.microsoft.ConvGrad <kernel_shape = [2, 3], strides = [2, 1], pads = [1, 0, 0, 1],
        group = 2> (dy, x, w)"""
TRANSPOSED = """y = ConvTranspose <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 0, 0],
        group = 2> (x, w, b)
    dx, dw, db = com.microsoft.ConvTransposeGrad <kernel_shape = [3, 2], strides = [2, 1],
        pads = [1, 0, 0, 0], group = 2> (dy, x, w)"""
NORMALISED = """y, mean, inverse = LayerNormalization <axis = 1, epsilon = 0.01> (x, g, b)
    dx, dg, db = com.microsoft.LayerNormalizationGrad <axis = 1> (dy, x, g, mean, inverse)"""
RMS = """y, inverse = com.microsoft.SimplifiedLayerNormalization <axis = -1, epsilon = 0.01> (x, g)
    dx, dg = com.microsoft.SimplifiedLayerNormalizationGrad <axis = -1> (dy, x, g, inverse)"""
GATHERED = """i = Constant <value = int64[2,2] {3, 0, 3, 1}> () y = Gather <axis = 0> (x, i) shape = Shape (x)
    dx = com.microsoft.GatherGrad <axis = 0> (shape, i, dy)"""
POOLED = """y, mask = MaxPool <kernel_shape = [2, 2], strides = [1, 2]> (x)
    dx = com.microsoft.MaxPoolGrad <kernel_shape = [2, 2], strides = [1, 2]> (dy, mask)"""
AVERAGED = """y = AveragePool <kernel_shape = [2, 2], pads = [1, 0, 0, 1], count_include_pad = 1> (x)
    x_grad = com.microsoft.AveragePoolGrad <kernel_shape = [2, 2], pads = [1, 0, 0, 1],
        count_include_pad = 1> (dy) dx = Identity (x_grad)"""
SPLIT = """y = Concat <axis = 1> (x, w) whole, lengths = com.microsoft.ConcatTraining <axis = 1> (x, w)
    dx, dw = com.microsoft.SplitTraining <axis = 1> (dy, lengths)"""


def of_input(forward: str, gradient: str, attributes: str = "", reads: str = "x") -> str:
    return f"y = {forward} <{attributes}> (x) dx = com.microsoft.{gradient} <{attributes}> (dy, {reads})"


MATRIX = {"x": (2, 3)}
SMOOTH = ("float", 1e-2)  # without a kernel in double
CASES = [
    Case("SliceGrad", SLICED, {"x": (5, 6)}, (2, 4)),
    Case("GatherNDGrad", GATHERED_ND, {"x": (3, 4)}, (3, 4)),
    Case("GatherElementsGrad", GATHERED_ELEMENTS, {"x": (3, 3)}, (2, 3)),
    Case("GatherGrad", GATHERED, {"x": (4, 3)}, (2, 2, 3)),
    Case("DropoutGrad", DROPPED, MATRIX, (2, 3)),
    Case("QuickGeluGrad", QUICK, MATRIX, (2, 3)),
    Case("GeluGrad", of_input("Gelu", "GeluGrad").replace("<>", ""), MATRIX, (2, 3), *SMOOTH),
    Case(
        "FastGeluGrad",
        'y = Gelu <approximate = "tanh"> (x) dx = com.microsoft.FastGeluGrad (dy, x)',
        MATRIX,
        (2, 3),
    ),
    Case(
        "BiasGeluGrad_dX",
        "t = Add (x, b) y = Gelu (t) dx = com.microsoft.BiasGeluGrad_dX (dy, x, b) "
        "axes = Constant <value_ints = [0]> () db = ReduceSum <keepdims = 0> (dx, axes)",
        {"x": (2, 3), "b": (3,)},
        (2, 3),
        *SMOOTH,
    ),
    Case(
        "BiasFastGeluGrad_dX",
        't = Add (x, b) y = Gelu <approximate = "tanh"> (t) '
        "dx = com.microsoft.BiasFastGeluGrad_dX (dy, x, b)",
        {"x": (2, 3), "b": (3,)},
        (2, 3),
    ),
    Case("ReluGrad", of_input("Relu", "ReluGrad", reads="y").replace("<>", ""), MATRIX, (2, 3)),
    Case("TanhGrad", of_input("Tanh", "TanhGrad", reads="y").replace("<>", ""), MATRIX, (2, 3)),
    Case("SigmoidGrad", of_input("Sigmoid", "SigmoidGrad", reads="y").replace("<>", ""), MATRIX, (2, 3)),
    Case(
        "LeakyReluGrad", of_input("LeakyRelu", "LeakyReluGrad", "alpha = 0.2", "y"), MATRIX, (2, 3), *SMOOTH
    ),
    Case("SoftmaxGrad_13", of_input("Softmax", "SoftmaxGrad_13", "axis = 0", "y"), MATRIX, (2, 3)),
    Case("LogSoftmaxGrad_13", of_input("LogSoftmax", "LogSoftmaxGrad_13", "axis = 1", "y"), MATRIX, (2, 3)),
    Case(
        "DivGrad",
        "y = Div (x, w) dx, dw = com.microsoft.DivGrad (dy, x, w)",
        {"x": (2, 3), "w": (2, 3)},
        (2, 3),
    ),
    Case("LayerNormalizationGrad", NORMALISED, {"x": (3, 4), "g": (4,), "b": (4,)}, (3, 4)),
    Case("SimplifiedLayerNormalizationGrad", RMS, {"x": (3, 4), "g": (4,)}, (3, 4)),
    Case("SplitTraining", SPLIT, {"x": (2, 3), "w": (2, 2)}, (2, 5)),
    Case("MaxPoolGrad", POOLED, {"x": (1, 2, 4, 5)}, (1, 2, 3, 2), *SMOOTH),
    # Linear in each input, and in float32 alone: a difference of large steps is exact.
    Case("AveragePoolGrad", AVERAGED, {"x": (1, 2, 4, 5)}, (1, 2, 4, 5), "float", 1.0),
    Case(
        "ConvGrad", CONVOLVED, {"x": (2, 4, 5, 6), "w": (6, 2, 2, 3), "b": (6,)}, (2, 6, 3, 5), "float", 1.0
    ),
    Case(
        "ConvTransposeGrad",
        TRANSPOSED,
        {"x": (2, 4, 3, 3), "w": (4, 3, 3, 2), "b": (6,)},
        (2, 6, 6, 4),
        "float",
        1.0,
    ),
]


def lowered(case: Case) -> onnx.ModelProto:
    shapes = {**case.inputs, "dy": case.y}
    declared = ", ".join(f"{case.dtype}{list(shape)} {name}" for name, shape in shapes.items())
    wanted = [name for name in case.inputs if f"d{name}" in case.text.replace(",", " ").split()]
    outputs = ", ".join(f"{case.dtype}{list(shapes[name])} d{name}" for name in wanted)
    header = f'<ir_version: 10, opset_import: ["": {case.opset}, "com.microsoft": 1]>'
    model = parser.parse_model(
        f"{header} step ({declared}) => ({case.dtype}{list(case.y)} y, {outputs}) {{ {case.text} }}"
    )
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
    move_misplaced(model)
    lower_training_nodes(model, case.opset)
    return model


def opened(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    used = {entry.name for entry in session.get_inputs()}
    return dict(zip(names, session.run(None, {k: v for k, v in feeds.items() if k in used}), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gradient_op_is_what_differences_say(case: Case) -> None:
    model = lowered(case)
    dtype = np.float64 if case.dtype == "double" else np.float32
    rng = np.random.default_rng(0)
    feeds = {name: rng.uniform(0.3, 2.0, shape).astype(dtype) for name, shape in case.inputs.items()}
    feeds = {name: value * rng.choice([-1, 1], value.shape).astype(dtype) for name, value in feeds.items()}
    dy = rng.normal(size=case.y).astype(dtype)

    session = opened(model)
    found = run(session, {**feeds, "dy": dy})

    assert all(node.domain != "com.microsoft" for node in model.graph.node)
    assert len(found) > 1
    for name in (name.removeprefix("d") for name in found if name != "y"):
        expected = np.zeros_like(feeds[name])
        for place in np.ndindex(feeds[name].shape):
            ends = []
            for sign in (1, -1):
                moved = feeds[name].copy()
                moved[place] += sign * case.step
                ends.append(run(session, {**feeds, name: moved, "dy": dy})["y"])
            expected[place] = ((ends[0] - ends[1]) * dy).sum() / (2 * case.step)
        tolerance = 1e-7 if case.dtype == "double" else 1e-3
        np.testing.assert_allclose(found[f"d{name}"], expected, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (CONVOLVED.replace("strides = [2, 1]", "strides = [2]"), "windows of 2 axes over 2, 1 strides"),
        (CONVOLVED.replace("group", "dilations = [1], group"), "windows of 2 axes over 2, 2 strides, 1 dil"),
    ],
)
def test_windows_of_another_rank_are_refused(text: str, what: str) -> None:
    with pytest.raises(BadModel, match=what):
        lowered(
            Case("ConvGrad", text, {"x": (2, 4, 5, 6), "w": (6, 2, 2, 3), "b": (6,)}, (2, 6, 3, 5), "float")
        )


def test_log_probabilities_without_classes_are_refused() -> None:
    text = """labels = Constant <value = int64[3] {0, 1, 0}> () y = ReduceSum (x)
        dx = com.microsoft.SoftmaxCrossEntropyLossGrad (dy, x, labels)"""
    with pytest.raises(UnsupportedModel, match="without an axis of classes"):
        lowered(Case("SoftmaxCrossEntropyLossGrad", text, {"x": (3,)}, (1,), "float"))


def test_every_lowering_has_a_case() -> None:
    """The others are in whole artifacts: tests/compiler/importing/test_import_ort_training.py."""
    in_artifacts = {
        "BatchNormalizationGrad",
        "BroadcastGradientArgs",
        "SoftmaxCrossEntropyLossGrad",
        "SoftmaxCrossEntropyLossInternalGrad",
    }
    assert GRADIENT_OPS.keys() - in_artifacts <= {case.op for case in CASES}
