"""Dropouts of a module in training that the exporter writes as ones in evaluation, or leaves out.

    of attention weights            Dropout (x, ratio)         becomes Dropout (x, ratio, true)
    between layers of LSTM and GRU  y = LSTM (x, ...)          becomes Dropout (x, ratio, true), then y

A Dropout of a file by PyTorch is one in training: in evaluation it writes none.
"""

import re
from functools import partial

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.compiler.differentiation.operations.operation_rewriting import (
    UNOPTIMISED,
    OperationRewriting,
    nodes_by_operation,
)
from partc.passes.graph.operation_builder import OperationBuilder
from partc.runtime.errors import UnsupportedModel

_TELLS_TRAINING = 12  # the first opset whose Dropout is told whether it is in training
_ATTENTION = re.compile(r"\.scaled_dot_product_attention\.\w+\]\(args = \((.*)\), kwargs = \{(.*)\}\)")
_RATIO = 4  # which of its arguments
# Whether there are biases, how many layers, the ratio, whether it is in training, and both ways.
_RECURRENCE = re.compile(r"\.(?:lstm|gru)\.\w+\]\(args = \(.*\], \w+, (\d+), ([\d.e-]+), True, \w+")
_RECURRENT_OPS = ("LSTM", "GRU")


def draw_dropouts(model: onnx.ModelProto) -> dict[int, OperationRewriting]:
    """Return how nodes at places become ones that drop. Raises UnsupportedModel for what is not there."""
    graph, rewritings = model.graph, dict[int, OperationRewriting]()
    version = max(
        (opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), default=0
    )
    if model.producer_name == "pytorch" and version >= _TELLS_TRAINING:
        rewritings |= {place: _train for place, node in enumerate(graph.node) if _is_untrained(node)}
    for operation, places in nodes_by_operation(graph).items():
        rewritings |= _between_layers(graph, operation, places)
        if _ratio_of(operation) and not any(graph.node[place].op_type == "Dropout" for place in places):
            raise UnsupportedModel(
                f"the exporter left out the dropout of attention weights, of {_ratio_of(operation):g}",
                at=f"node {graph.node[places[-1]].name!r} ({graph.node[places[-1]].op_type})",
                fix=f"{UNOPTIMISED}, or the module after eval() if nothing is to be dropped",
            )
    return rewritings


def _is_untrained(node: onnx.NodeProto) -> bool:
    return node.op_type == "Dropout" and (len(node.input) < 3 or not node.input[2])


def _train(node: onnx.NodeProto, names: OperationBuilder) -> list[onnx.NodeProto]:
    training = _constant(names.fresh(f"{node.output[0]}.training"), np.array(True))
    inputs = [*node.input, ""][:2]
    del node.input[:]
    node.input.extend((*inputs, training.output[0]))
    return [training, node]


def _ratio_of(operation: str) -> float:
    found = _ATTENTION.search(operation)
    if found is None:
        return 0.0
    arguments, named = found[1].split(", "), re.search(r"dropout_p: ([^,]+)", found[2])
    return float(named[1] if named else arguments[_RATIO] if len(arguments) > _RATIO else 0)


def _between_layers(
    graph: onnx.GraphProto, operation: str, places: list[int]
) -> dict[int, OperationRewriting]:
    """Return how layers but the first drop of what they read."""
    found = _RECURRENCE.search(operation)
    if found is None or int(found[1]) < 2 or not float(found[2]):
        return {}
    layers = [place for place in places if graph.node[place].op_type in _RECURRENT_OPS]
    if len(layers) != int(found[1]):
        raise UnsupportedModel(
            f"the exporter left out the dropout between {found[1]} layers, of {found[2]}",
            at=f"node {graph.node[places[-1]].name!r} ({graph.node[places[-1]].op_type})",
            fix="write a layer each, with torch.nn.Dropout between them",
        )
    return {place: partial(_drop_before, ratio=float(found[2])) for place in layers[1:]}


def _drop_before(node: onnx.NodeProto, names: OperationBuilder, ratio: float) -> list[onnx.NodeProto]:
    read, dropped = node.input[0], names.fresh(f"{node.input[0]}.dropped")
    share = _constant(names.fresh(f"{dropped}.ratio"), np.array(ratio, np.float32))
    training = _constant(names.fresh(f"{dropped}.training"), np.array(True))
    inputs = [read, share.output[0], training.output[0]]
    dropout = helper.make_node("Dropout", inputs, [dropped], name=names.fresh(f"{node.name}.dropout"))
    node.input[0] = dropped
    return [share, training, dropout, node]


def _constant(name: str, value: "np.ndarray[tuple[()], np.dtype[np.generic]]") -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], name=f"{name}.node", value=numpy_helper.from_array(value))
