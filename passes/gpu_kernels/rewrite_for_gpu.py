"""Rewrite a segment for ONNX Runtime's CUDA provider, so that its kernels are quick and can be replayed.

SumRows          in one order                         ordered_sums.py
ConvWeightGrad   per tap: the other way, a convolution by an image, is quicker on a CPU, but takes cuDNN 11 ms
                 of ResNet-50's first weight at batch 8 (H200)
functions        inlined
sizes, constants folded                               fold_constants.py
reductions, products, Concats    split                split_nodes.py
"""

import onnx

from partc.passes.gpu_kernels.fold_constants import fold_constants
from partc.passes.gpu_kernels.gpu_segment import GpuSegment
from partc.passes.gpu_kernels.ordered_sums import sum_rows_in_order
from partc.passes.gpu_kernels.split_nodes import split_concats, split_products, split_reductions
from partc.passes.graph.infer_shapes import infer_shapes
from partc.passes.graph.inline_functions import inline_local_functions
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS
from partc.passes.windows.read_windows import weight_gradient_of
from partc.passes.windows.window_functions import conv_weight_gradient


def rewrite_for_gpu(model: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a segment for a GPU, and the same with the shapes of its values as far as they are known."""
    for function in model.functions:
        _replace_body(function, model.opset_import[0].version)
    model = inline_local_functions(model)
    inferred = infer_shapes(model, data_prop=True)
    segment = GpuSegment(model, inferred)
    fold_constants(segment)
    split_reductions(segment)
    split_products(segment)
    split_concats(segment)
    segment.name_nodes()
    return model, infer_shapes(model, data_prop=True) if segment.is_rewritten else inferred


def _replace_body(function: onnx.FunctionProto, opset: int) -> None:
    if function.domain != FUNCTION_DOMAIN:
        return
    if function.name == SUM_ROWS:
        function.CopyFrom(sum_rows_in_order(opset))
    elif (found := weight_gradient_of(function.name)) is not None:
        windows, weight, group = found
        function.CopyFrom(conv_weight_gradient(windows, weight, group, opset, per_tap=True))
