"""Gradients at the inputs of ONNX's own cases, against central differences."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.builders.graphs.backend_cases import IN_FLOAT32, Case, cases_of, differentiate_case, slope

# Modules of onnx.backend.test.case.node; `long` ones run in make test-all, but for a sample.
MODULES = """
    affinegrid attention averagepool batch_normalization col2im conv convtranspose dft
    dropout globalaveragepool
    globalmaxpool gridsample groupnormalization gru instance_normalization layernormalization
    lpnormalization lppool lrn lstm maxpool maxunpool meanvariancenormalization negativeloglikelihoodloss
    rmsnormalization rnn rotaryembedding softmax_cross_entropy_loss tensorscatter
"""
LARGE = 10_000  # elements of an input
SAMPLED = 4  # cases of a module in the normal suite: the first, the last, and evenly between

# ONNX's own shape inference rejects what these cases expect.
REJECTED = {"averagepool_2d_ceil_last_window_starts_on_pad", "maxpool_2d_ceil_output_size_reduce_by_one"}
REJECTED |= {"maxunpool_export_with_output_shape"}  # read differently by onnx and onnxruntime: refused
# Outputs whose gradient has no meaning: next running statistics, and scores of -inf.
FIRST_OUTPUT_ONLY = ("batchnorm", "attention_4d_with_past_and_present_qk_matmul_bias")
RANDOM = ("training_dropout",)


def collected() -> Iterator[object]:
    for module in MODULES.split():
        cases = [(name, case) for name, case in cases_of(module).items() if _counts(name, case)]
        sample = {round(i * (len(cases) - 1) / (SAMPLED - 1)) for i in range(SAMPLED)}
        for position, (name, case) in enumerate(cases):
            size = max(value.size for value in case.inputs.values())
            marks = [] if position in sample and size <= LARGE else [pytest.mark.long]
            yield pytest.param(case, id=name, marks=marks)


def _counts(name: str, case: Case) -> bool:
    is_random = name.startswith(RANDOM) and "zero_ratio" not in name
    return name not in REJECTED and bool(_float_outputs(case)) and not is_random


def _float_outputs(case: Case) -> list[str]:
    return [name for name, value in case.outputs.items() if value.dtype == np.float32]


@pytest.mark.parametrize("case", collected())
def test_gradient_at_inputs_of_onnx(case: Case) -> None:
    outputs = _float_outputs(case)
    if case.name.removeprefix("test_").startswith(FIRST_OUTPUT_ONLY):
        outputs = outputs[:1]
    rng = np.random.default_rng(3)
    # Away from ties and zeros, where differences are no gradient.
    inputs = {
        name: value + 1e-2 * rng.normal(size=value.shape)
        if value.dtype == np.float32 and value.ndim
        else value
        for name, value in case.inputs.items()
    }
    forward = differentiate_case(case, case.inputs, outputs)
    backward = differentiate_case(case, inputs, outputs)

    for name in outputs:
        np.testing.assert_allclose(forward.outputs[name], case.outputs[name], rtol=1e-3, atol=1e-5)
    is_exact = backward.dtype is np.float64 and not case.name.startswith(IN_FLOAT32)
    tolerance = 1e-5 if is_exact else 2e-3
    for name, gradient in backward.gradients.items():
        if not np.isfinite(inputs[name]).all():
            continue
        way = rng.normal(size=gradient.shape)
        expected = slope(case, inputs, outputs, {name: way})
        scale = float(np.abs(gradient * way).sum())
        assert (gradient * way).sum() == pytest.approx(expected, abs=tolerance * max(scale, 1.0)), name
