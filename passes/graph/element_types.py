"""Element types at the border to ONNX: passes speak of numpy's dtypes, attributes hold ONNX's numbers."""

import numpy as np
from onnx import helper


def onnx_number(dtype: np.dtype) -> int:
    """Return the number that ONNX has for an element type, as the attribute `to` of Cast holds it."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
