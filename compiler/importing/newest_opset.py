"""What the installed onnxruntime reads, found by asking it: its package does not say."""

from functools import cache

import onnx
import onnxruntime
from onnx import TensorProto, helper


@cache
def newest_opset() -> int:
    """Return the newest version of ONNX's operator set that the installed onnxruntime reads."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y])
    for version in range(onnx.defs.onnx_opset_version(), 1, -1):
        opset = helper.make_opsetid("", version)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception:  # onnxruntime's own error classes are private
            continue
        return version
    raise AssertionError("onnxruntime reads no opset")
