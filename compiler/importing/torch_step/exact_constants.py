"""Keep Python numbers of a float64 step exact on their way through PyTorch's exporter.

before   0.999 float ── Cast ── 0.99900001287 double        after   0.999 double

The exporter writes a number as float32 where nothing else says its type, and casts it behind that. Of Adam's
1 - 0.999 ** t that is 1.3e-5 in the first step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnxscript.ir as ir
from torch.onnx._internal.exporter import _building


@contextmanager
def numbers_in_float64() -> Iterator[None]:
    """Let the exporter write numbers of no other type in float64."""
    determine = _building._determine_input_dtype

    def determine_widely(
        parameter: Any,  # of the operator; Any: the exporter's own types, here and below
        value: Any,
        types: Mapping[Any, Any],
    ) -> ir.DataType:
        constraint = parameter.type_constraint
        is_free = isinstance(value, float) and constraint not in types and len(constraint.allowed_types) > 1
        return ir.DataType.DOUBLE if is_free else determine(parameter, value, types)

    _building._determine_input_dtype = determine_widely
    try:
        yield
    finally:
        _building._determine_input_dtype = determine
