"""Run graphs that read nothing: what a compiler may know of a step before it runs."""

import numpy as np
import onnx
import onnxruntime as ort

from partc.runtime.errors import BadModel


def run_constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the outputs of a small graph without inputs, as ONNX Runtime computes them.

    Raises BadModel where constants do not fit the nodes that read them.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, {}), strict=True))
    except Exception as error:  # onnxruntime's errors share no narrower class
        raise BadModel(
            f"constants that cannot be computed: {error}",
            at=", ".join(f"node {node.name!r} ({node.op_type})" for node in model.graph.node[:3]),
            fix="mend the node that is named, or the constants that it reads",
        ) from error
