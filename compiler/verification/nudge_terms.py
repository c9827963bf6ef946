"""Change the terms of all sums that a step's gradients are made of.

before   dy ── ReduceSum ── db        after   dy ── Mul (1 + width x) ── ReduceSum ── db        x of -1 to 1

By their last bits: what rounding can do. A sum whose terms cancel, as a bias' gradient does where every label
is as frequent as expected, is nothing but rounding, and the last bits of variables do not tell: a bias of
zero has none.

By more: terms that cancel do so no longer, and what is still zero is a sum of zeros, however it is rounded: a
row that is not read, a unit that a ReLU shut off.

What decides anything (a comparison, an index, a sign) is left as it is, and so is all that it follows from: a
ReLU that is shut off stays so.
"""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.inliner import inline_local_functions

from partc.compiler.cut_model import reads_of
from partc.compiler.model_file import subgraphs_of
from partc.compiler.verification.floats import eps_of

DRAWN = (TensorProto.FLOAT, TensorProto.DOUBLE)  # what ONNX Runtime draws
FLOATS = (*DRAWN, TensorProto.FLOAT16, TensorProto.BFLOAT16)
STEPWISE = frozenset({"Ceil", "Floor", "Round", "Sign"})  # floats that decide
OF_SHAPES = frozenset({"Shape", "Size"})
# Their results have one term: other ops are taken for sums.
OF_ONE_TERM = frozenset(
    "Cast Concat ConstantOfShape Div Expand Flatten Gather GatherElements GatherND Identity Mul Neg Pad "
    "Reciprocal Reshape Slice Split Sqrt Squeeze Tile Transpose Unsqueeze Where".split()
)


def nudge_terms(model: onnx.ModelProto, width: float | None = None) -> onnx.ModelProto:
    """Return a model whose sums' terms are multiplied by 1 - width to 1 + width, drawn at every run.

    `width` None: eps of their type.
    """
    result = inline_local_functions(model)
    graph = result.graph
    types = _element_types(result)
    deciding = _deciding(graph, types)
    known = {*types, *(name for node in graph.node for name in (*node.input, *node.output))}
    nudged: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in OF_ONE_TERM or not deciding.isdisjoint(node.output) or any(subgraphs_of(node)):
            continue
        for index, name in enumerate(node.input):
            if types.get(name) in DRAWN:
                nudged.setdefault(name, _fresh(f"{name}.nudged", known))
                node.input[index] = nudged[name]
    random = np.random.default_rng(0)
    new = {name: list(_nudging(name, nudged[name], types[name], width, random)) for name in nudged}
    given = [info.name for info in graph.input] + [tensor.name for tensor in graph.initializer]
    nodes = [node for name in dict.fromkeys(given) for node in new.get(name, ())]
    for node in graph.node:
        nodes += [node, *(made for name in node.output for made in new.get(name, ()))]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def _deciding(graph: onnx.GraphProto, types: dict[str, int]) -> set[str]:
    """Return the tensors that something follows from which is no float: a condition, an index."""
    found: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type in OF_SHAPES:
            continue
        decides = node.op_type in STEPWISE or any(subgraphs_of(node))
        if decides or any(types.get(name) not in FLOATS or name in found for name in node.output if name):
            found |= reads_of(node)
    return found


def _nudging(
    name: str, result: str, element: int, width: float | None, random: np.random.Generator
) -> Iterator[onnx.NodeProto]:
    if width is None:
        width = eps_of(np.dtype(helper.tensor_dtype_to_np_dtype(element)))
    # Seeds far apart: of near ones, ONNX Runtime's first numbers are near.
    bounds = {"low": 1 - width, "high": 1 + width, "seed": float(random.integers(1, 2**31))}
    factors = f"{result}.factors"
    drawn = helper.make_node("RandomUniformLike", [name], [factors], f"{factors}.node")
    drawn.attribute.extend(helper.make_attribute(key, value) for key, value in bounds.items())
    yield drawn
    yield helper.make_node("Mul", [name, factors], [result], f"{result}.node")


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    graph = onnx.shape_inference.infer_shapes(model).graph
    infos = (*graph.input, *graph.value_info, *graph.output)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _fresh(name: str, known: set[str]) -> str:
    while name in known:
        name += "_"
    known.add(name)
    return name
