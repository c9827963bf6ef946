"""Gradients of layers against PyTorch's: windows, normalisations, attention, recurrence, losses."""

import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import EVERYTHING, facts_of, train
from tests.compiler.differentiation.rules.test_gradient_rules import parse, with_weighted_sum

torch = pytest.importorskip("torch")
F = torch.nn.functional

Function = Callable[..., object]  # of the parameters, in the order of the graph's inputs
POOL = "kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1]"

EVEN_POOL = "kernel_shape = [2,2], strides = [2,2], pads = [1,1,1,1], ceil_mode = 1"  # 3 windows of 5 entries


def recurrent(kind: str, order: tuple[int, ...], bidirectional: bool) -> Function:
    """Make the layer of PyTorch whose gates lie in another order."""

    def run(x: object, *weights: object) -> object:
        layer = getattr(torch.nn, kind)(x.shape[2], weights[1].shape[2], bidirectional=bidirectional)
        given = {}
        for way, suffix in enumerate(("", "_reverse")[: 1 + bidirectional]):
            parts = [weights[0][way], weights[1][way], *weights[2][way].chunk(2)]
            for name, part in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), parts, strict=True):
                gates = part.chunk(len(order))
                given[f"{name}_l0{suffix}"] = torch.cat([gates[gate] for gate in order])
        y, _ = torch.func.functional_call(layer.double(), given, (x,))
        return y.unflatten(2, (1 + bidirectional, -1)).transpose(1, 2)

    return run


CASES: dict[str, tuple[str, Function]] = {
    "Conv_1d": (
        "f[2,4,9] a, f[6,2,3] b, f[6] c | y = Conv <group = 2, strides = [2], pads = [1,1]> (a, b, c)",
        lambda a, b, c: F.conv1d(a, b, c, 2, 1, 1, 2),
    ),
    "Conv_3d": (
        "f[1,4,5,4,5] a, f[6,2,2,2,3] b | y = Conv <group = 2, dilations = [2,1,1]> (a, b)",
        lambda a, b: F.conv3d(a, b, None, 1, 0, (2, 1, 1), 2),
    ),
    "ConvTranspose_1d": (
        "f[2,4,5] a, f[4,3,3] b, f[6] c | "
        "y = ConvTranspose <group = 2, strides = [3], pads = [1,1], output_padding = [2]> (a, b, c)",
        lambda a, b, c: F.conv_transpose1d(a, b, c, 3, 1, 2, 2),
    ),
    "ConvTranspose_2d": (
        "f[2,4,5,4] a, f[4,3,3,2] b | y = ConvTranspose <dilations = [1,2], strides = [2,1]> (a, b)",
        lambda a, b: F.conv_transpose2d(a, b, None, (2, 1), 0, 0, 1, (1, 2)),
    ),
    "ConvTranspose_3d": (
        "f[1,2,3,2,3] a, f[2,3,2,2,2] b | y = ConvTranspose <strides = [2,2,2], pads = [1,0,0,1,0,0]> (a, b)",
        lambda a, b: F.conv_transpose3d(a, b, None, 2, (1, 0, 0)),
    ),
    "MaxPool_3d": (
        "f[1,2,6,5,4] a | y = MaxPool <kernel_shape = [2,2,2], strides = [2,1,2], ceil_mode = 1> (a)",
        lambda a: F.max_pool3d(a, 2, (2, 1, 2), ceil_mode=True),
    ),
    "MaxPool_left_out": (
        f"f[2,3,5,5] a | y = MaxPool <{EVEN_POOL}> (a)",
        lambda a: F.max_pool2d(a, 2, 2, 1, ceil_mode=True),
    ),
    "AveragePool_left_out": (
        f"f[2,3,5,5] a | y = AveragePool <{EVEN_POOL}, count_include_pad = 1> (a)",
        lambda a: F.avg_pool2d(a, 2, 2, 1, ceil_mode=True),
    ),
    "AveragePool_counting": (
        f"f[2,3,6,6] a | y = AveragePool <{POOL}, count_include_pad = 1, ceil_mode = 1> (a)",
        lambda a: F.avg_pool2d(a, 3, 2, 1, ceil_mode=True),
    ),
    "AveragePool": (
        f"f[2,3,6,6] a | y = AveragePool <{POOL}> (a)",
        lambda a: F.avg_pool2d(a, 3, 2, 1, count_include_pad=False),
    ),
    "LpPool": (
        "f[2,3,6,6] a | y = LpPool <kernel_shape = [2,2], strides = [2,2], p = 3> (a)",
        # PyTorch takes the powers of signed values.
        lambda a: F.lp_pool2d(a.abs(), 3.0, 2),
    ),
    "LRN": (
        "f[2,7,3,2] a | y = LRN <size = 5, alpha = 0.9, beta = 0.6, bias = 1.2> (a)",
        lambda a: F.local_response_norm(a, 5, 0.9, 0.6, 1.2),
    ),
    "BatchNormalization": (
        "d[4,3,2,2] a, d[3] b, d[3] c, d[3] m, d[3] p | "
        "y, n, q = BatchNormalization <training_mode = 1> (a, b, c, m, p)",
        lambda a, b, c, m, p: F.batch_norm(a, None, None, b, c, training=True),
    ),
    "InstanceNormalization": (
        "f[2,3,4,2] a, f[3] b, f[3] c | y = InstanceNormalization (a, b, c)",
        lambda a, b, c: F.instance_norm(a, None, None, b, c),
    ),
    "RMSNormalization": (
        "d[2,3,4] a, d[4] b | y = RMSNormalization <epsilon = 0.00001> (a, b)",
        lambda a, b: F.rms_norm(a, (4,), b, 1e-5),
    ),
    "Attention_causal": (
        "d[2,4,5,6] a, d[2,4,5,6] b, d[2,4,5,3] c | y = Attention <is_causal = 1> (a, b, c)",
        lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True),
    ),
    "Attention_grouped": (
        "d[2,4,5,6] a, d[2,2,7,6] b, d[2,2,7,3] c, d[5,7] e | y = Attention <scale = 0.25> (a, b, c, e)",
        lambda a, b, c, e: F.scaled_dot_product_attention(a, b, c, e, scale=0.25, enable_gqa=True),
    ),
    "LSTM": (
        "d[5,2,3] a, d[2,16,3] b, d[2,16,4] c, d[2,32] e | "
        'y = LSTM <hidden_size = 4, direction = "bidirectional"> (a, b, c, e)',
        recurrent("LSTM", (0, 2, 3, 1), True),
    ),
    "GRU": (
        "d[5,2,3] a, d[1,12,3] b, d[1,12,4] c, d[1,24] e | "
        "y = GRU <hidden_size = 4, linear_before_reset = 1> (a, b, c, e)",
        recurrent("GRU", (1, 0, 2), False),
    ),
    "RNN": (
        "d[5,2,3] a, d[2,4,3] b, d[2,4,4] c, d[2,8] e | "
        'y = RNN <hidden_size = 4, direction = "bidirectional"> (a, b, c, e)',
        recurrent("RNN", (0,), True),
    ),
    "SoftmaxCrossEntropyLoss": (
        "d[6,4,2] a, long[6,2] i, d[4] w | y = SoftmaxCrossEntropyLoss <ignore_index = 1> (a, i, w)",
        lambda a, i, w: F.cross_entropy(a, i, w.detach(), ignore_index=1),
    ),
    "NegativeLogLikelihoodLoss": (
        'd[6,4] a, long[6] i, d[4] w | y = NegativeLogLikelihoodLoss <reduction = "sum"> (a, i, w)',
        lambda a, i, w: F.nll_loss(a, i, w.detach(), reduction="sum"),
    ),
}
for mode, padding, aligned in (
    ("linear", "zeros", 0),
    ("linear", "border", 1),
    ("nearest", "reflection", 0),
    ("cubic", "zeros", 1),
):
    CASES[f"GridSample_{mode}_{padding}"] = (
        f'd[2,3,5,4] a, d[2,3,2,2] b | y = GridSample <mode = "{mode}", padding_mode = "{padding}", '
        f"align_corners = {aligned}> (a, b)",
        lambda a, b, mode=mode, padding=padding, aligned=aligned: F.grid_sample(
            a, b, f"bi{mode}".replace("binearest", "nearest"), padding, bool(aligned)
        ),
    )


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_a_layer_equals_pytorchs(case: str) -> None:
    text, function = CASES[case]
    model = with_weighted_sum(parse(text, opset=23))
    start = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}

    built = build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
    _, after = train(built, [{}])

    expected = torch_gradients(model, start, function)
    tolerance = 1e-8 if re.search(r"\bd\[", text) else 1e-3
    trained = facts_of(built)["gradients"].keys()
    assert trained
    for name in trained:
        np.testing.assert_allclose(
            start[name] - after[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def torch_gradients(
    model: onnx.ModelProto, start: dict[str, np.ndarray], function: Function
) -> dict[str, np.ndarray]:
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in start.items()}
    wide = {
        name: tensor.double().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    weights = next(node for node in model.graph.node if node.output[0] == "loss_weights")
    total = (
        function(*wide.values()) * torch.from_numpy(numpy_helper.to_array(weights.attribute[0].t).copy())
    ).sum()
    total.backward()
    return {name: tensor.grad.numpy() for name, tensor in wide.items() if tensor.grad is not None}
