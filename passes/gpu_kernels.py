"""What segments for GPUs are rewritten to before they are written.

ONNX Runtime computes what it reads of a tensor's sizes on the CPU, and what depends on it as far as it likes
(its GetCpuPreferredNodes): a mean's gradient went to the CPU and back, and a segment with a node there cannot
be replayed as a CUDA graph.
"""

from math import prod

import numpy as np
import onnx
from onnx import helper, numpy_helper


def fix_sizes(model: onnx.ModelProto, inferred: onnx.ModelProto) -> None:
    """Put constants in place of the sizes of tensors whose shapes are known. Changes `model`.

    `inferred`: the same model with the shapes of its values.
    """
    graph = model.graph
    described = (*graph.input, *graph.initializer, *inferred.graph.value_info, *inferred.graph.output)
    shapes = {value.name: _shape_of(value) for value in described}
    outputs = {output.name for output in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        shape = shapes.get(node.input[0]) if node.op_type in ("Shape", "Size") and not node.domain else None
        if shape is None or node.output[0] in outputs:
            kept.append(node)
            continue
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        sizes = shape[attributes.get("start", 0) : attributes.get("end")]
        value = np.array(sizes if node.op_type == "Shape" else prod(shape), np.int64)
        graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    del graph.node[:]
    graph.node.extend(kept)


def _shape_of(value: onnx.ValueInfoProto | onnx.TensorProto) -> tuple[int, ...] | None:
    if isinstance(value, onnx.TensorProto):
        return tuple(value.dims)
    kind = value.type.tensor_type
    if not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return None
    return tuple(dim.dim_value for dim in kind.shape.dim)
