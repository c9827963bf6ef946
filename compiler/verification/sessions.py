"""Models run in plain onnxruntime, on one thread.

What verification asks of arrays of any float dtype; numpy alone does not know bfloat16.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from partc.compiler.model_files.open_model import open_model
from partc.compiler.verification.compare_bodies import with_chosen_bodies
from partc.passes.cpu_kernels.round_halves import has_halves, round_halves
from partc.passes.graph.infer_shapes import infer_shapes
from partc.runtime.execution.device import INEXACT_IN_DOUBLE

Array = np.ndarray[Any, np.dtype[Any]]


def is_float(array: Array) -> bool:
    """Tell whether the elements are floats."""
    return np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16


def eps_of(dtype: np.dtype[Any]) -> float:
    """Return the distance from 1 to the next number of a float type: 2^-23 of float32."""
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def least_of(dtype: np.dtype[Any]) -> float:
    """Return the smallest number of full precision; below it there are fewer bits."""
    return float(ml_dtypes.finfo(dtype).tiny)  # type: ignore[no-untyped-call]


def wide(array: Array) -> Array:
    """Return float32 as it is, for tables are large, and all else as float64."""
    return array if array.dtype == np.float32 else array.astype(np.float64)


def sizes(array: Array) -> Array:
    """Return |array|, float32 or float64."""
    absolute: Array = np.abs(wide(array))
    return absolute


def max_abs(array: Array) -> float:
    """Return max|array|, 0 of no elements."""
    return float(np.max(sizes(array), initial=0.0))


class Session:
    """Some outputs of a model."""

    def __init__(self, model: onnx.ModelProto, outputs: Sequence[str]) -> None:
        self._outputs = list(outputs)
        if not outputs:
            return  # onnxruntime takes no graph without nodes
        self._session = open_model(_rounding(model), disabled=INEXACT_IN_DOUBLE)
        self._reads = [info.name for info in self._session.get_inputs()]

    def run(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name."""
        if not self._outputs:
            return {}
        results = self._session.run(self._outputs, {name: tensors[name] for name in self._reads})
        return dict(zip(self._outputs, results, strict=True))


def _rounding(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose float16 values are float16, as those of ranks are."""
    if not has_halves(model):
        return model
    rounded = onnx.ModelProto()
    rounded.CopyFrom(model)
    round_halves(rounded, infer_shapes(model, data_prop=True))
    return rounded


def convolving(model: onnx.ModelProto, sharing: int | None) -> onnx.ModelProto:
    """Return a model that convolves as ranks do.

    `sharing`: ranks on CPUs that share its batch, and choose bodies for their share; None: none do.
    """
    return model if sharing is None else with_chosen_bodies(model, sharing)
