"""Let the bodies of If, Loop and Scan read nothing that their node does not name.

    before   y = If (c) < .. { u = Mul (x, W) } .. >          after   y = partc.bodies.If_3 (c, x, W)

A body may read any tensor around it. Passes then have to look into it for readers, and a tensor that is
renamed or split would have to be so inside too. As an input of a model-local function it is an operand like
others, asked for whole; the function holds the node as it was. Small constants go into the function, where
inference sees them.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.compiler.differentiation.tensor_types import small_constants
from partc.passes.graph.bodies import subgraphs_of

BODY_DOMAIN = "partc.bodies"


def outline_bodies(model: onnx.ModelProto) -> int:
    """Make functions of the nodes whose bodies read tensors around them, in place; return how many."""
    constants = small_constants(model.graph)
    functions: list[onnx.FunctionProto] = []
    for node in model.graph.node:
        captured = list(dict.fromkeys(name for body in subgraphs_of(node) for name in _free_names(body)))
        if captured:
            functions.append(_outline(node, captured, constants, model, len(functions)))
    if functions:
        model.functions.extend(functions)
        model.opset_import.append(helper.make_opsetid(BODY_DOMAIN, 1))
    return len(functions)


def declare_loop_outputs(graph: onnx.GraphProto) -> None:
    """Give what Loops carry the shapes that their bodies declare: inference leaves them open.

    It may not rely on them where they change from one iteration to the next; a declared shape does not.
    Bodies are told how many axes they begin with, where they do not say.
    """
    known = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input, *graph.output)}
    ranks = {name: len(of.shape.dim) for name, of in known.items() if of.HasField("shape")}
    ranks |= {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    declared = {value.name for value in (*graph.value_info, *graph.output)}
    for node in graph.node:
        if node.op_type != "Loop" or node.domain not in ("", "ai.onnx"):
            continue
        (body,) = subgraphs_of(node)
        for name, carried in zip(node.input[2:], body.input[2:], strict=False):
            if name in ranks and not carried.type.tensor_type.HasField("shape"):
                carried.type.tensor_type.shape.dim.extend(
                    onnx.TensorShapeProto.Dimension() for _ in range(ranks[name])
                )
        for name, value in zip(node.output, body.output[1 : len(node.input) - 1], strict=False):
            if name and name not in declared and value.type.tensor_type.HasField("shape"):
                graph.value_info.add(name=name, type=value.type)


def _outline(
    node: onnx.NodeProto,
    captured: Iterable[str],
    constants: Mapping[str, np.ndarray],
    model: onnx.ModelProto,
    number: int,
) -> onnx.FunctionProto:
    """Turn a node into the call of a function that holds it."""
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inputs = list(dict.fromkeys(filter(None, node.input)))
    constant_names = [name for name in captured if name in constants and name not in inputs]
    operands = inputs + [name for name in captured if name not in inputs and name not in constant_names]
    values = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(constants[name]))
        for name in constant_names
    ]
    results = [name for name in node.output if name]
    name = f"{node.op_type}_{number}"
    function = helper.make_function(
        BODY_DOMAIN, name, operands, results, [*values, inner], model.opset_import
    )
    call = helper.make_node(name, operands, results, name=node.name, domain=BODY_DOMAIN)
    node.CopyFrom(call)
    return function


def _free_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield what a body reads of the graphs around it."""
    bound_names = {value.name for value in (*graph.input, *graph.initializer)}
    bound_names.update(name for node in graph.node for name in node.output)
    for node in graph.node:
        yield from (name for name in node.input if name and name not in bound_names)
        for body in subgraphs_of(node):
            yield from (name for name in _free_names(body) if name not in bound_names)
    yield from (value.name for value in graph.output if value.name not in bound_names)
