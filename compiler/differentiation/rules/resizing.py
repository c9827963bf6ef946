"""The gradient rule of Resize, which is linear and works along one axis after the other.

    y = W_1 x W_2 ..        dx = W_1' dy W_2' ..        W_a  float[entries of y, entries of x] along axis a

onnxruntime itself says what W_a is: it resizes the identity matrix along one of its axes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from partc.compiler.differentiation.forward_node import ForwardNode, Gradients, Rule, of_first_output
from partc.compiler.differentiation.rules.along_axis import gather_readers, multiply_along, static_size
from partc.runtime.errors import UnsupportedModel

SHAPING = frozenset({"axes", "keep_aspect_ratio_policy", "extrapolation_value"})  # not about one axis
OPSET = 19


def _resize(at: ForwardNode, dy: str) -> Gradients:
    rank = at.rank(at.x(0))
    axes = at.attribute("axes")
    resized = [axis % rank for axis in axes] if isinstance(axes, list) else list(range(rank))
    scales, corners = at.constant_input(2), at.constant_input(1)
    if at.x(3) and at.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        scales = _common_scales(at, resized)
    for entry, axis in enumerate(resized):
        scale = float(scales[entry]) if scales is not None and scales.size else None
        same_size = at.shape(at.x(0))[axis] == at.shape(at.y())[axis]
        if (same_size if scale is None else scale == 1) and not _crops(at):
            continue
        corner = None if corners is None or not corners.size else corners.reshape(2, -1)[:, entry]
        weights = _weights(at, axis, scale, corner)
        dy = _turn_round(at, dy, weights, axis)
    return {0: dy}


def _crops(at: ForwardNode) -> bool:
    return at.attribute("coordinate_transformation_mode") == "tf_crop_and_resize"


def _common_scales(at: ForwardNode, resized: list[int]) -> np.ndarray:
    """Return the scales of a Resize that keeps the aspect ratio: one for all axes."""
    sizes = at.constant_input(3)
    assert sizes is not None
    ratios = [size / static_size(at, at.x(0), axis) for size, axis in zip(sizes, resized, strict=True)]
    keeps_within = at.attribute("keep_aspect_ratio_policy") == "not_larger"
    return np.full(len(resized), min(ratios) if keeps_within else max(ratios), np.float32)


def _turn_round(at: ForwardNode, dy: str, weights: np.ndarray, axis: int) -> str:
    picks = np.count_nonzero(weights, axis=1)
    if np.all(picks == 1) and np.all(weights.max(axis=1) == 1):
        return gather_readers(at, dy, weights.argmax(axis=1), weights.shape[1], axis)
    return multiply_along(at, dy, weights.astype(at.types[at.x(0)].dtype), axis)


def _weights(at: ForwardNode, axis: int, scale: float | None, corner: np.ndarray | None) -> np.ndarray:
    """Return W along an axis, float32[entries of y, entries of x]."""
    size, output_size = static_size(at, at.x(0), axis), static_size(at, at.y(), axis)
    inputs = {}
    if corner is not None:
        inputs["roi"] = np.array([0, corner[0], 1, corner[1]], np.float32)
    if scale is None:
        inputs["sizes"] = np.array([size, output_size], np.int64)
    else:
        inputs["scales"] = np.array([1, scale], np.float32)
    attributes = [attribute for attribute in at.node.attribute if attribute.name not in SHAPING]
    rows = _resize_identity(size, inputs, attributes)
    if rows.shape[1] == output_size:
        return np.ascontiguousarray(rows.T)
    raise UnsupportedModel(
        f"axis {axis} is resized to {output_size} entries, but its scale gives {rows.shape[1]}",
        at=at.place,
        fix="state the sizes, and no policy for the aspect ratio",
    )


def _resize_identity(
    size: int, inputs: Mapping[str, np.ndarray], attributes: Sequence[onnx.AttributeProto]
) -> np.ndarray:
    input_names = [name if name in inputs else "" for name in ("roi", "scales", "sizes")]
    node = helper.make_node("Resize", ["x", *input_names], ["y"])
    node.attribute.extend(attributes)
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size, size])]
    infos += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [size, None])
    graph = helper.make_graph([node], "resize", infos, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    resized: np.ndarray = session.run(["y"], {"x": np.eye(size, dtype=np.float32), **inputs})[0]
    return resized


RULES: Mapping[str, Rule] = {"Resize": of_first_output(_resize)}
