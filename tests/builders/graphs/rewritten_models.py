"""Models before and after a rewriting of convolutions, run by ONNX Runtime on the same random inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import shape_inference

from partc.passes.cpu_kernels.segment_values import images_of

Rewrite = Callable[[onnx.ModelProto, Any], list[str]]


def rewritten(model: onnx.ModelProto, rewrite: Rewrite) -> tuple[onnx.ModelProto, list[str]]:
    """Return a checked copy, and what the rewriting says that it changed."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    changed = rewrite(result, images_of(shape_inference.infer_shapes(model, data_prop=True).graph))
    onnx.checker.check_model(result, full_check=True)
    return result, changed


def values(model: onnx.ModelProto) -> Mapping[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(result) for result in session.run(None, values(model))]


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    """Name every node by its first output."""
    for node in model.graph.node:
        node.name = node.output[0]
    return model
