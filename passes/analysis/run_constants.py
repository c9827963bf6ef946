"""Run graphs that read nothing: what a compiler may know of a step before it runs."""

import numpy as np
import onnx
import onnxruntime as ort

_STATE = ort.capi.onnxruntime_pybind11_state
# What onnxruntime raises where a graph does not fit its numbers.
REFUSALS: tuple[type[Exception], ...] = (
    _STATE.Fail,
    _STATE.InvalidArgument,
    _STATE.InvalidGraph,
    _STATE.NotImplemented,
    _STATE.RuntimeException,
)


def run_constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the outputs of a small graph without inputs, as ONNX Runtime computes them."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {}), strict=True))
