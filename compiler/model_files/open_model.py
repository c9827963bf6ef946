"""A model in plain ONNX Runtime, for the few runs that prove something of it."""

from collections.abc import Collection

import onnx
import onnxruntime as ort

from partc.runtime.execution.device import EXACT, UNSOUND, WRONG_OF_VECTORS

ERROR, FATAL = 3, 4  # severities of ONNX Runtime's log


def open_model(
    model: onnx.ModelProto, *, disabled: Collection[str] = (), severity: int = ERROR
) -> ort.InferenceSession:
    """Open a model on one thread of a CPU. Raises onnxruntime's errors.

    One thread, for ScatterND with equal indices races on two. No value is given the memory of another, which
    large graphs would wait for (see REUSING_NODES in runtime/execution/device.py).

    disabled  names of ONNX Runtime's rewritings, besides those that are wrong of some graph
    severity  what is logged at least: FATAL where errors are caught
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = severity
    options.enable_mem_reuse = False
    options.add_session_config_entry(*EXACT)
    return ort.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=[*UNSOUND, *WRONG_OF_VECTORS, *disabled],
    )
