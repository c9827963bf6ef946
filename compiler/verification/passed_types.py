"""Which float types the change of a variable passes through on its way: the narrowest rounds it most.

    W float32 ── Cast ── W16 ── MatMul ── ... ── dW16 ── Cast ── dW float32 ── Sub ── W' float32

W is stored in float32, and its change is a float16 number: summed in another order, it is another one. What
counts is what nodes compute from samples: all else is the same on both sides, bit by bit. A way ends where
something is no float, for what is decided (whether a gradient overflowed) is not rounded.
"""

from collections.abc import Collection, Iterable

import numpy as np
import onnx
from onnx import helper
from onnx.inliner import inline_local_functions

from partc.compiler.model_files.cut_model import reached_from, reads_of
from partc.compiler.verification.nudge_terms import FLOATS, element_types
from partc.compiler.verification.sessions import eps_of

# Ops that hand elements on as they are.
MOVING = frozenset(
    "Concat Expand Flatten Gather GatherElements GatherND Identity Pad Reshape Slice Split Squeeze Tile "
    "Transpose Unsqueeze Where".split()
)


def passed_types(
    model: onnx.ModelProto, results: Iterable[str], samples: Collection[str]
) -> dict[str, np.dtype[np.generic]]:
    """Return the narrowest float type on the way from `samples` to each result; no entry: no float is."""
    inlined = inline_local_functions(model)
    graph, types = inlined.graph, element_types(inlined)
    of_samples = reached_from(graph, samples, ())
    rounding: dict[str, np.dtype[np.generic]] = {}  # tensor -> the narrowest type so far, its own included
    for node in graph.node:
        before = [rounding[name] for name in reads_of(node) if name in rounding]
        for name in node.output:
            element = types.get(name)
            if not name or name not in of_samples or (element is not None and element not in FLOATS):
                continue
            own = [] if element is None or node.op_type in MOVING else [_dtype(element)]
            if before or own:
                rounding[name] = max([*before, *own], key=eps_of)
    return {name: rounding[name] for name in results if name in rounding}


def _dtype(element: int) -> np.dtype[np.generic]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(element))
