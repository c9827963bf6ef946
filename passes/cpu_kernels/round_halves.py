"""Round to float16 what a graph says is float16, as GPUs do, whatever else is in the segment.

before   Mul ── y ── Exp               after   Mul ── y/unrounded ── Unsqueeze ── Squeeze ── y ── Exp

ONNX Runtime's CPU provider (1.31.1) computes float16 in float32: it casts what a node makes to float16 and
what the next reads back, and leaves both casts out. So a value would be rounded, and overflow, only where a
segment ends or something is sent, and a loss scale would follow from the plan. Between two nodes that only
move bytes the value is float16; neither of them copies it.
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from partc.passes.cpu_kernels.segment_values import FreshNames

# What a CPU does to float16 as it is, or of which no rounding is left to be done.
_MOVING = frozenset(
    """Constant Concat Expand Flatten Gather GatherElements GatherND Identity Reshape ScatterElements Slice
    Split Squeeze Tile Transpose Unsqueeze Where""".split()
)


def has_halves(model: onnx.ModelProto) -> bool:
    """Tell whether something of a model may be float16: what it is given, or what it casts to."""
    given = (*model.graph.input, *model.graph.value_info)
    nodes = chain(model.graph.node, *(function.node for function in model.functions))
    return (
        any(tensor.data_type == TensorProto.FLOAT16 for tensor in model.graph.initializer)
        or any(value.type.tensor_type.elem_type == TensorProto.FLOAT16 for value in given)
        or any(attribute.i == TensorProto.FLOAT16 for node in nodes for attribute in node.attribute)
    )


def round_halves(model: onnx.ModelProto, typed: onnx.ModelProto) -> int:
    """Round the float16 values of a model in place; `typed`: with shapes inferred. Return how many."""
    graph, halves = model.graph, _halves_of(typed.graph)
    computed = [node for node in graph.node if node.op_type not in _MOVING or node.domain]
    rounded = {name for node in computed for name in node.output if name in halves}
    if not rounded:
        return 0
    names = FreshNames(graph)
    axis = names.fresh("rounded/axis")
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), axis))
    nodes = [new for node in graph.node for new in _rounding(node, rounded, names, axis)]
    del graph.node[:]
    graph.node.extend(nodes)
    return len(rounded)


def _halves_of(typed: onnx.GraphProto) -> set[str]:
    """Return the names of the float16 values, of a graph with shapes inferred."""
    values = (*typed.input, *typed.value_info, *typed.output)
    return {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT16}


def _rounding(
    node: onnx.NodeProto, rounded: set[str], names: FreshNames, axis: str
) -> Iterator[onnx.NodeProto]:
    """Yield a node, and what rounds the values that it makes."""
    results = [name for name in node.output if name in rounded]
    unrounded = {name: names.fresh(f"{name}/unrounded") for name in results}
    node.output[:] = [unrounded.get(name, name) for name in node.output]
    yield node
    for name in results:
        half = names.fresh(f"{name}/half")
        yield helper.make_node("Unsqueeze", [unrounded[name], axis], [half], name=half)
        yield helper.make_node("Squeeze", [half, axis], [name], name=names.fresh(f"{name}/rounded"))
