"""An embedding's padding row, which PyTorch reads and does not train: `torch.nn.Embedding(padding_idx=...)`.

y = Gather (table, ids)     becomes     rows = Gather (table, ids)
                                        held = Identity (rows)              which passes no gradient
                                        y = Where (ids == padding_idx, held, rows)
"""

import re
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.compiler.differentiation.operations.operation_rewriting import OperationRewriting
from partc.compiler.differentiation.parameters.exporter_facts import mark_detached, operation_of
from partc.passes.graph.operation_builder import OperationBuilder

_EMBEDDING = re.compile(r"\.embedding\.\w+\]\(args = \(%\w+, %\w+, (\d+)")


def hold_padding(graph: onnx.GraphProto) -> dict[int, OperationRewriting]:
    """Return how lookups at places leave the rows of padding as they are."""
    return {
        place: partial(_hold, padding=int(found[1]))
        for place, node in enumerate(graph.node)
        if node.op_type == "Gather" and (found := _EMBEDDING.search(operation_of(node))) is not None
    }


def _hold(node: onnx.NodeProto, names: OperationBuilder, padding: int) -> list[onnx.NodeProto]:
    result, ids = node.output[0], node.input[1]
    rows, held, wide, row, is_padding, axis, across = (
        names.fresh(f"{result}.{part}") for part in ("rows", "held", "ids", "row", "at", "axis", "across")
    )
    node.output[0] = rows

    def make(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [output], name=names.fresh(f"{node.name}.{op}"), **attributes)

    identity = make("Identity", [rows], held)
    mark_detached(identity)
    return [
        node,
        identity,
        make("Cast", [ids], wide, to=onnx.TensorProto.INT64),
        make("Constant", [], row, value=numpy_helper.from_array(np.array(padding, np.int64))),
        make("Equal", [wide, row], is_padding),
        make("Constant", [], axis, value=numpy_helper.from_array(np.array([-1], np.int64))),
        make("Unsqueeze", [is_padding, axis], across),
        make("Where", [across, held, rows], result),
    ]
