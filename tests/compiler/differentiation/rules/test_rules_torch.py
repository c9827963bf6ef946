"""Gradients of plain ops against PyTorch's, also at kinks, at ties and at zeros, where limits disagree."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.builders.graphs.onnx_cases import gradients, in_onnxruntime
from tests.compiler.differentiation.rules.test_gradient_rules import parse, with_weighted_sum

torch = pytest.importorskip("torch")
F = torch.nn.functional

# The values of every parameter: the kinks of all activations, and ties.
KINKS = [-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 3.0, 6.0, -0.5, 25.0]

# Inputs | nodes that make y (as in test_gradient_rules.py), and the same in PyTorch.
CASES: dict[str, tuple[str, Callable[..., object]]] = {
    "Relu": ("f[3,4] a | y = Relu (a)", F.relu),
    "LeakyRelu": ("f[3,4] a | y = LeakyRelu <alpha = 0.2> (a)", lambda a: F.leaky_relu(a, 0.2)),
    "PRelu": ("f[3,4] a, f[1] b | y = PRelu (a, b)", F.prelu),
    "Elu": ("f[3,4] a | y = Elu <alpha = 0.7> (a)", lambda a: F.elu(a, 0.7)),
    "Selu": ("f[3,4] a | y = Selu (a)", F.selu),
    "Celu": ("f[3,4] a | y = Celu <alpha = 2.0> (a)", lambda a: F.celu(a, 2.0)),
    "ThresholdedRelu": (
        "f[3,4] a | y = ThresholdedRelu <alpha = 0.5> (a)",
        lambda a: F.threshold(a, 0.5, 0.0),
    ),
    "Hardshrink": ("f[3,4] a | y = Shrink (a)", F.hardshrink),
    "Softshrink": ("f[3,4] a | y = Shrink <bias = 0.5> (a)", F.softshrink),
    "HardSigmoid": ("f[3,4] a | y = HardSigmoid <alpha = 0.16666667> (a)", F.hardsigmoid),
    "HardSwish": ("f[3,4] a | y = HardSwish (a)", F.hardswish),
    "Softplus": ("f[3,4] a | y = Softplus (a)", F.softplus),
    "Softsign": ("f[3,4] a | y = Softsign (a)", F.softsign),
    "Mish": ("f[3,4] a | y = Mish (a)", F.mish),
    "Gelu": ("f[3,4] a | y = Gelu (a)", F.gelu),
    "Gelu_tanh": (
        'f[3,4] a | y = Gelu <approximate = "tanh"> (a)',
        lambda a: F.gelu(a, approximate="tanh"),
    ),
    "Abs": ("d[3,4] a | y = Abs (a)", torch.abs),
    "Clip": (
        "d[3,4] a | l = Constant <value = double {-0.5}> () h = Constant <value = double {3}> () "
        "y = Clip (a, l, h)",
        lambda a: torch.clamp(a, -0.5, 3.0),
    ),
    "Max": ("d[3,4] a, d[3,1] b | y = Max (a, b)", torch.maximum),
    "Min": ("d[3,4] a, d[3,1] b | y = Min (a, b)", torch.minimum),
    "Max_constant": (
        "d[3,4] a | z = Constant <value = double {0}> () y = Max (z, a)",
        lambda a: torch.clamp(a, min=0.0),
    ),
    "Mod": (
        "d[3,4] a, d[1,4] b | n = Constant <value = double {7}> () c = Add (b, n) y = Mod <fmod = 1> (a, c)",
        lambda a, b: torch.fmod(a, b + 7),
    ),
    "Pow": (
        "d[3,1] a | n = Constant <value = double[4] {0, 1, 2, 3}> () y = Pow (a, n)",
        lambda a: torch.pow(a, torch.tensor([0.0, 1, 2, 3], dtype=a.dtype)),
    ),
    "Pow_exponent": (
        "d[3,4] a, d[3,4] b | c = Abs (a) d = Abs (b) y = Pow (c, d)",
        lambda a, b: torch.pow(a.abs(), b.abs()),
    ),
    "ReduceMax": (
        "d[3,4] a | s = [1] y = ReduceMax <keepdims = 0> (a, s)",
        lambda a: a.amax(1),
    ),
    "ReduceProd": (
        "d[3,4] a | s = [1] y = ReduceProd <keepdims = 0> (a, s)",
        lambda a: a.prod(1),
    ),
    "ReduceL2": (
        "d[1,4] a | n = Constant <value = double {0}> () b = Mul (a, n) "
        "s = [1] y = ReduceL2 <keepdims = 0> (b, s)",
        lambda a: (a * 0).norm(dim=1),
    ),
    "ReduceLogSumExp": (
        "d[3,4] a | s = [-1] y = ReduceLogSumExp <keepdims = 0> (a, s)",
        lambda a: a.logsumexp(-1),
    ),
    "CumSum": ("d[3,4] a | n = Constant <value_int = 1> () y = CumSum (a, n)", lambda a: a.cumsum(1)),
    "Softmax": ("d[3,4] a | y = Softmax (a)", lambda a: a.softmax(-1)),
    "LogSoftmax": ("d[3,4] a | y = LogSoftmax <axis = 0> (a)", lambda a: a.log_softmax(0)),
    "Einsum": (
        'd[2,3,3] a, d[2,3] b | y = Einsum <equation = "bii,bj->ij"> (a, b)',
        lambda a, b: torch.einsum("bii,bj->ij", a, b),
    ),
    "TopK": ("d[3,4] a | s = [2] y, i = TopK (a, s)", lambda a: a.topk(2).values),
    "ScatterElements_max": (
        "d[3,4] a, d[2,4] b | s = [2,0,1,2,0,1,2,1] n = [2,4] i = Reshape (s, n) "
        'y = ScatterElements <reduction = "max"> (a, i, b)',
        lambda a, b: a.scatter_reduce(0, torch.tensor([[2, 0, 1, 2], [0, 1, 2, 1]]), b, "amax"),
    ),
    "ScatterElements_mul": (
        "d[3,4] a, d[2,4] b | s = [2,0,1,2,0,1,2,1] n = [2,4] i = Reshape (s, n) "
        'y = ScatterElements <reduction = "mul"> (a, i, b)',
        lambda a, b: a.scatter_reduce(0, torch.tensor([[2, 0, 1, 2], [0, 1, 2, 1]]), b, "prod"),
    ),
    "Pad_reflect": (
        'd[1,3,4] a | s = [0,0,2,0,0,1] y = Pad <mode = "reflect"> (a, s)',
        lambda a: F.pad(a, (2, 1), mode="reflect"),
    ),
    "Pad_edge": (
        'd[1,3,4] a | s = [0,0,2,0,0,1] y = Pad <mode = "edge"> (a, s)',
        lambda a: F.pad(a, (2, 1), mode="replicate"),
    ),
    "Resize_linear": (
        'f[1,1,3,4] a | s = [1,1,6,8] y = Resize <mode = "linear"> (a, , , s)',
        lambda a: F.interpolate(a, size=(6, 8), mode="bilinear"),
    ),
    "Resize_cubic": (
        'f[1,1,3,4] a | s = [1,1,6,8] y = Resize <mode = "cubic", cubic_coeff_a = -0.75> (a, , , s)',
        lambda a: F.interpolate(a, size=(6, 8), mode="bicubic"),
    ),
    "DepthToSpace": (
        'd[1,12,1,1] a | y = DepthToSpace <blocksize = 2, mode = "CRD"> (a)',
        lambda a: F.pixel_shuffle(a, 2),
    ),
    "Det": ("f[2,2,3] a, f[2,3,2] b | c = MatMul (a, b) y = Det (c)", lambda a, b: torch.linalg.det(a @ b)),
}


def with_kinks(model: onnx.ModelProto) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        given = numpy_helper.to_array(tensor)
        if given.dtype.kind == "f":
            values = np.resize(KINKS, given.shape).astype(given.dtype)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return model


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_that_of_pytorch(name: str) -> None:
    case, function = CASES[name]
    model = with_weighted_sum(with_kinks(parse(case)))
    weights = numpy_helper.to_array(
        next(node for node in model.graph.node if "loss_weights" in node.output).attribute[0].t
    )
    leaves = {
        tensor.name: torch.tensor(numpy_helper.to_array(tensor), requires_grad=True)
        for tensor in model.graph.initializer
    }

    (function(*leaves.values()) * torch.tensor(weights)).sum().backward()  # type: ignore[operator]

    for parameter, gradient in gradients(model, in_onnxruntime).items():
        expected = leaves[parameter].grad.numpy()
        np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=2e-5, err_msg=parameter)
