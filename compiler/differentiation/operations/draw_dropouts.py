"""Dropouts of a module in training that the exporter writes as ones in evaluation, or leaves out.

    of attention weights    Dropout (x, ratio)    becomes    Dropout (x, ratio, true)

A Dropout of a file by PyTorch is one in training: in evaluation it writes none.
"""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.compiler.differentiation.operations.operation_rewriting import (
    OperationRewriting,
    nodes_by_operation,
    number_given,
)
from partc.compiler.differentiation.parameters.exporter_facts import UNOPTIMISED
from partc.passes.graph.operation_builder import OperationBuilder
from partc.runtime.errors import UnsupportedModel

_TELLS_TRAINING = 12  # the first opset whose Dropout is told whether it is in training


def draw_dropouts(model: onnx.ModelProto) -> dict[int, OperationRewriting]:
    """Return how nodes at places become ones that drop. Raises UnsupportedModel for what is not there."""
    graph, rewritings = model.graph, dict[int, OperationRewriting]()
    version = max(
        (opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), default=0
    )
    if model.producer_name == "pytorch" and version >= _TELLS_TRAINING:
        rewritings |= {place: _train for place, node in enumerate(graph.node) if _is_untrained(node)}
    for operation, places in nodes_by_operation(graph).items():
        ratio = number_given(operation, "scaled_dot_product_attention", 4, "dropout_p")
        if ratio and not any(graph.node[place].op_type == "Dropout" for place in places):
            raise UnsupportedModel(
                f"the exporter left out the dropout of attention weights, of {ratio:g}",
                at=f"node {graph.node[places[-1]].name!r} ({graph.node[places[-1]].op_type})",
                fix=f"{UNOPTIMISED}, or the module after eval() if nothing is to be dropped",
            )
    return rewritings


def _is_untrained(node: onnx.NodeProto) -> bool:
    return node.op_type == "Dropout" and (len(node.input) < 3 or not node.input[2])


def _train(node: onnx.NodeProto, names: OperationBuilder) -> list[onnx.NodeProto]:
    name = names.fresh(f"{node.output[0]}.training")
    inputs = [*node.input, ""][:2]
    del node.input[:]
    node.input.extend((*inputs, name))
    is_training = numpy_helper.from_array(np.array(True))
    return [helper.make_node("Constant", [], [name], name=f"{name}.node", value=is_training), node]
