"""Keep 16-bit parameters as float32 variables, rounded where the forward graph reads them.

before   W float16 ── MatMul                 after   W float32 ── Cast ── MatMul
         E float16 ── Gather ── rows                 E float32 ── Gather ── Cast ── rows

The gradient passes the Cast, so it arrives in float32, and updates smaller than a 16-bit step add up. A
table that only Gathers read is rounded row by row: its gradient stays sparse.

Source: Micikevicius et al., ICLR 2018, section 3.1.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from partc.compiler.differentiation.forward.expand_ops import rename_reads
from partc.compiler.differentiation.parameters.find_parameters import tables_of_rows

_HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})


def half_parameters(elements: Mapping[str, int]) -> dict[str, int]:
    """Return those of the parameters, with their element types, that have 16 bits."""
    return {name: element for name, element in elements.items() if element in _HALVES}


def keep_masters(
    forward: onnx.ModelProto, elements: Mapping[str, int], folder: Path | None
) -> onnx.ModelProto:
    """Return the forward graph with the parameters in float32. `elements`: parameter -> its 16-bit type."""
    model = onnx.ModelProto()
    model.CopyFrom(forward)
    graph = model.graph
    tables = tables_of_rows(graph, elements)
    _widen_stored(graph, elements, folder)
    nodes = [_widen_made(node, elements) for node in graph.node]
    casts = [_cast(name, f"{name}.rounded", elements[name]) for name in elements if name not in tables]
    rounded = {name: f"{name}.rounded" for name in elements if name not in tables}
    readers: list[onnx.NodeProto] = []
    for node in nodes:
        readers += _reading(node, rounded, elements, tables)
    node_outputs = {name for node in nodes for name in node.output}
    early = [cast for cast in casts if cast.input[0] not in node_outputs]
    late = {cast.input[0]: cast for cast in casts if cast.input[0] in node_outputs}
    del graph.node[:]
    graph.node.extend(early)
    for node in readers:
        graph.node.append(node)
        graph.node.extend(late[name] for name in node.output if name in late)
    return model


def _reading(
    node: onnx.NodeProto, rounded: Mapping[str, str], elements: Mapping[str, int], tables: frozenset[str]
) -> list[onnx.NodeProto]:
    """Let a node read rounded parameters, or round the rows that it gathers."""
    if node.op_type == "Gather" and node.input[0] in tables:
        rows = node.output[0]
        node.output[0] = f"{rows}.unrounded"
        return [node, _cast(node.output[0], rows, elements[node.input[0]])]
    rename_reads(node, rounded)
    return [node]


def _cast(source: str, target: str, element: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{target}/Cast", to=element)


def _widen_stored(graph: onnx.GraphProto, elements: Mapping[str, int], folder: Path | None) -> None:
    for tensor in graph.initializer:
        if tensor.name not in elements:
            continue
        if folder is not None and external_data_helper.uses_external_data(tensor):
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
        )
    for value in (*graph.input, *graph.value_info):
        if value.name in elements:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _widen_made(node: onnx.NodeProto, elements: Mapping[str, int]) -> onnx.NodeProto:
    """Let a node that makes a parameter make it in float32."""
    if not set(node.output) & elements.keys():
        return node
    attributes = [attribute for attribute in node.attribute if attribute.name not in ("dtype", "value")]
    fill = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
    del node.attribute[:]
    node.attribute.extend(attributes)
    if fill is not None:
        wide = numpy_helper.from_array(numpy_helper.to_array(fill).astype(np.float32))
        node.attribute.append(helper.make_attribute("value", wide))
    elif node.op_type.startswith("Random"):
        node.attribute.append(helper.make_attribute("dtype", TensorProto.FLOAT))
    return node
