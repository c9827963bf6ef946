"""Run graphs that read nothing: what a compiler may know of a step before it runs."""

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from partc.runtime.errors import BadModel, UnsupportedModel


def run_constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the outputs of a small graph without inputs, as ONNX Runtime computes them.

    Raises UnsupportedModel for an op and element type that it has no kernel for, BadModel where constants do
    not fit the nodes that read them.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, {}), strict=True))
    except NoKernel as error:
        raise UnsupportedModel(
            f"ONNX Runtime {ort.__version__} cannot compute a constant: {error}",
            at="constants of the graph",
            fix="store what that node makes as an initializer, or export the model in float32",
        ) from error
    except Exception as error:  # onnxruntime's errors share no narrower class
        raise BadModel(
            f"constants that cannot be computed: {error}",
            at=", ".join(f"node {node.name!r} ({node.op_type})" for node in model.graph.node[:3]),
            fix="mend the node that is named, or the constants that it reads",
        ) from error
