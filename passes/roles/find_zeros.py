"""Find the tensors that are zero everywhere: a zero is whole, split and partial at once."""

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import SMALL, Facts

KEEPS_ZERO = frozenset(
    [
        "Identity",
        "Neg",
        "Cast",
        "CastLike",
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Expand",
        "Slice",
        "Tile",
        "Abs",
    ]
)


def find_zeros(graph: gs.Graph, facts: Facts) -> frozenset[str]:
    """Return the names of all tensors known to be zero."""
    zeros: set[str] = set()
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant) and np.prod(tensor.shape) <= SMALL and not np.any(tensor.values):
            zeros.add(tensor.name)
    for node in graph.nodes:
        if _is_zero(node, zeros, facts):
            zeros.update(output.name for output in node.outputs)
    return frozenset(zeros)


def _is_zero(node: gs.Node, zeros: set[str], facts: Facts) -> bool:
    if node.op == "ConstantOfShape":
        value = node.attrs.get("value")
        return value is None or not np.any(getattr(value, "values", value))
    if node.op in KEEPS_ZERO:
        return node.inputs[0].name in zeros
    if node.op == "Mul":
        return any(tensor.name in zeros for tensor in node.inputs)
    known = facts.fixed_value(node.outputs[0].name) if node.outputs else None
    return known is not None and known.size > 0 and not np.any(known)
