"""Run forward models together with the parameters that they draw."""

import json
import math

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from partc.models.graph_builder import METADATA_KEY


def parameters_of(model: onnx.ModelProto) -> list[str]:
    """List the parameters that the model declares."""
    properties = {entry.key: entry.value for entry in model.metadata_props}
    names: list[str] = json.loads(properties[METADATA_KEY])["parameters"]
    return names


def parameter_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Return each parameter's element count, without drawing any."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    shapes = {
        value.name: [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
        for value in inferred.graph.value_info
    }
    return {name: math.prod(shapes[name]) for name in parameters_of(model)}


def run_with_parameters(
    model: onnx.ModelProto, output: str, feeds: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Run once; return `output`, and the parameters that this run drew."""
    onnx.checker.check_model(model, full_check=True)
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    names = parameters_of(model)
    opened.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    session = onnxruntime.InferenceSession(opened.SerializeToString(), providers=["CPUExecutionProvider"])
    values = session.run([output, *names], feeds)
    return values[0], dict(zip(names, values[1:], strict=True))
