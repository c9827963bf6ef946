"""Models run in plain onnxruntime, on one thread."""

from collections.abc import Mapping, Sequence

import onnx
import onnxruntime as ort

from partc.compiler.verification.compare_bodies import with_chosen_bodies
from partc.compiler.verification.floats import Array
from partc.runtime.device import INEXACT_IN_DOUBLE


class Session:
    """Some outputs of a model, on one thread: ScatterND with duplicate indices races on two."""

    def __init__(self, model: onnx.ModelProto, outputs: Sequence[str]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._outputs = list(outputs)
        if not outputs:
            return  # onnxruntime takes no graph without nodes
        self._session = ort.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(INEXACT_IN_DOUBLE),
        )
        self._reads = [info.name for info in self._session.get_inputs()]

    def run(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name."""
        if not self._outputs:
            return {}
        results = self._session.run(self._outputs, {name: tensors[name] for name in self._reads})
        return dict(zip(self._outputs, results, strict=True))


def convolving(model: onnx.ModelProto, sharing: int | None) -> onnx.ModelProto:
    """Return a model that convolves as ranks do.

    `sharing`: ranks on CPUs that share its batch, and choose bodies for their share; None: none do.
    """
    return model if sharing is None else with_chosen_bodies(model, sharing)
