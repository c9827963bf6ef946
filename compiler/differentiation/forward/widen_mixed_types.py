"""Let nodes compute in one float type whose inputs are of several, as the standard allows.

before   x double    ── BatchNormalization ── y        after   x            ── BatchNormalization ── y
         scale float ─────────┘                                 scale ── Cast ────────┘

The widest type is taken, so that nothing is rounded before it is read; results are rounded to the types that
they had. Gradient rules then meet one type, and ONNX Runtime, which has no kernels for float beside double,
an op that it knows.
"""

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from partc.compiler.differentiation.forward.expand_ops import names_in
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.tensor_types import Types

# Ops that gradients pass, whose float inputs may be of several types: how many inputs.
MIXED_INPUTS: Mapping[str, int] = {"BatchNormalization": 5, "GridSample": 2}


def widen_mixed_types(graph: onnx.GraphProto, types: Types) -> bool:
    """Insert the casts, in place; tell whether there were any to insert."""
    build = NodeBuilder(names_in(graph))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        elements = _elements(node, types)
        nodes += [node] if len(set(elements.values())) < 2 else _widened(build, node, elements, types)
    is_changed = len(nodes) > len(graph.node)
    if is_changed:
        del graph.node[:]
        graph.node.extend(nodes)
    return is_changed


def _elements(node: onnx.NodeProto, types: Types) -> dict[str, int]:
    """Return the float types of the inputs that may differ."""
    names = node.input[: MIXED_INPUTS.get(node.op_type, 0)] if node.domain in ("", "ai.onnx") else ()
    return {name: types[name].element for name in names if name in types and types[name].is_float}


def _widened(
    build: NodeBuilder, node: onnx.NodeProto, elements: Mapping[str, int], types: Types
) -> list[onnx.NodeProto]:
    widest = _widest(set(elements.values()))
    wide = {name: build.fresh(f"{name}.wide") for name, element in elements.items() if element != widest}
    before = [_cast(name, wide[name], widest) for name in wide]
    node.input[:] = [wide.get(name, name) for name in node.input]
    after = []
    for index, name in enumerate(node.output):
        if name in types and types[name].is_float and types[name].element != widest:
            node.output[index] = build.fresh(f"{name}.wide")
            after.append(_cast(node.output[index], name, types[name].element))
    return [*before, node, *after]


def _cast(source: str, target: str, element: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{target}/Cast", to=element)


def _widest(elements: set[int]) -> int:
    """Return the narrowest type that holds all values of some."""
    if elements <= {TensorProto.FLOAT16, TensorProto.BFLOAT16}:
        return int(TensorProto.FLOAT)
    return int(TensorProto.DOUBLE if TensorProto.DOUBLE in elements else TensorProto.FLOAT)
