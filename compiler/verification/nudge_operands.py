"""Change the last bits of what gradients are summed from.

before   dy ── ReduceSum ── Reshape ── db        after   dy ── Mul (1 + eps x) ── ReduceSum ── Reshape ── db

A sum whose terms cancel, as a bias' gradient does where every label is as frequent as expected, is nothing
but rounding. The last bits of variables do not tell: a bias of zero has none.
"""

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper

from partc.compiler.verification.floats import eps_of

REARRANGING = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
DRAWN = (TensorProto.FLOAT, TensorProto.DOUBLE)  # what ONNX Runtime draws


def nudge_operands(model: onnx.ModelProto, gradients: Collection[str]) -> onnx.ModelProto:
    """Return a model whose gradients' operands are multiplied by 1 - eps to 1 + eps, drawn at every run."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    made_by = {name: node for node in graph.node for name in node.output if name}
    types = _element_types(model)
    last = [node for name in gradients if (node := _summing(name, made_by)) is not None]
    known = {*made_by, *types}
    nudged: dict[str, str] = {}
    for node in last:
        for index, name in enumerate(node.input):
            if types.get(name) in DRAWN:
                nudged.setdefault(name, _fresh(f"{name}.nudged", known))
                node.input[index] = nudged[name]
    given = {info.name for info in (*graph.input, *graph.initializer)}
    nodes = [new for name in nudged if name in given for new in _nudging(name, nudged[name], types[name])]
    for node in graph.node:
        nodes.append(node)
        nodes += [
            new for name in node.output if name in nudged for new in _nudging(name, nudged[name], types[name])
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def _summing(gradient: str, made_by: dict[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    """Return the node whose result, but for its order, is the gradient."""
    node = made_by.get(gradient)
    while node is not None and node.op_type in REARRANGING:
        node = made_by.get(node.input[0])
    return node


def _nudging(name: str, result: str, element: int) -> list[onnx.NodeProto]:
    eps = eps_of(np.dtype(helper.tensor_dtype_to_np_dtype(element)))
    factors = f"{result}.factors"
    drawn = helper.make_node("RandomUniformLike", [name], [factors], f"{factors}.node")
    bounds = {"low": 1 - eps, "high": 1 + eps, "seed": 1.0}
    drawn.attribute.extend(helper.make_attribute(key, value) for key, value in bounds.items())
    return [drawn, helper.make_node("Mul", [name, factors], [result], f"{result}.node")]


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    inferred = onnx.shape_inference.infer_shapes(model)
    graph = inferred.graph
    types = {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.value_info)}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _fresh(name: str, known: set[str]) -> str:
    while name in known:
        name += "_"
    known.add(name)
    return name
