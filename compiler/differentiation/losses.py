"""Add a loss to a forward graph."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from partc.compiler.differentiation.forward.expand_ops import names_in
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.tensor_types import (
    Shape,
    Size,
    TensorType,
    Types,
    known_shape,
    value_info,
)
from partc.runtime.errors import BadUsage, UnsupportedModel, some_of

LOSSES = ("softmax_cross_entropy", "mse")


@dataclass(frozen=True, slots=True)
class Loss:
    """The scalar to be minimised, and the input that came with it."""

    name: str
    added_input: str | None = None
    sample_axis: int | None = 0  # of the added input


@dataclass(frozen=True, slots=True)
class Head:
    """What the loss is put on: the graph, its one result, and the size or symbol of the batch."""

    graph: onnx.GraphProto
    types: Types
    result: str
    batch: Size


def add_loss(
    graph: onnx.GraphProto,
    types: Types,
    loss: str,
    *,
    results: tuple[str, ...],
    batch: Size,
    ignore_index: int | None = None,
) -> Loss:
    """Append the loss's nodes and input to the graph. Raises BadUsage, UnsupportedModel.

    `results` are the forward graph's outputs but for carried state.
    """
    if loss in LOSSES:
        if len(results) != 1:
            raise BadUsage(
                f"the loss {loss!r} needs a graph with one output; this one has {len(results)}",
                at=f"outputs {some_of(results)}",
                fix="give the name of a scalar output as the loss, or keep only the logits as output",
            )
        if types[results[0]].shape == ():
            raise BadUsage(
                f"the loss {loss!r} of output {results[0]!r}, which is a scalar",
                at="--loss",
                fix=f"name the output as the loss: --loss {results[0]}",
            )
        head = Head(graph, types, results[0], batch)
        return _add_mse(head) if loss == "mse" else _add_cross_entropy(head, ignore_index)
    if loss not in {value.name for value in graph.output}:
        raise BadUsage(
            f"no loss and no output of the graph is called {loss!r}",
            at="--loss",
            fix=f"use one of {some_of([*LOSSES, *results])}",
        )
    return Loss(_scalar(graph, types, loss))


def _scalar(graph: onnx.GraphProto, types: Types, loss: str) -> str:
    type_ = types[loss]
    if not type_.is_float or (type_.shape and any(size != 1 for size in type_.shape)):
        raise BadUsage(
            f"output {loss!r} is no float scalar: its shape is {list(type_.shape or ())}",
            at="--loss",
            fix="reduce it to a scalar in the forward graph, or name another output",
        )
    if not type_.shape:
        return loss
    build = _builder(graph)
    scalar = build.call("Reshape", (loss, build.constant(np.zeros(0, np.int64))), (build.fresh("loss"),))[0]
    _append(graph, build)
    return scalar


# ---------------------------------------------------------------- mean squared error


def _add_mse(head: Head) -> Loss:
    type_ = _type(head, head.result)
    build = _builder(head.graph)
    targets, name = build.fresh("targets"), build.fresh("loss")
    head.graph.input.append(value_info(targets, type_))
    error = build.op("Sub", head.result, targets)
    build.call("ReduceMean", (build.op("Mul", error, error),), (name,), keepdims=0)
    _append(head.graph, build)
    return Loss(name, targets, _sample_axis(head, type_.shape or ()))


# ---------------------------------------------------------------- cross-entropy


@dataclass(frozen=True, slots=True)
class _Scores:
    """Log probabilities [labels.., classes]."""

    tensor: str
    type_: TensorType


def _add_cross_entropy(head: Head, ignore_index: int | None) -> Loss:
    """loss = - mean over labels of log softmax(logits)[label]; labels int64, logits' shape less the last."""
    build = _builder(head.graph)
    scores = _scores(head, build)
    shape = (scores.type_.shape or ())[:-1]
    labels, name = build.fresh("labels"), build.fresh("loss")
    head.graph.input.append(value_info(labels, TensorType(TensorProto.INT64, shape)))
    if ignore_index is None:
        index = build.op("Unsqueeze", labels, build.ints(-1))
        label_log_probability = build.op("GatherElements", scores.tensor, index, axis=-1)
        mean = build.op("ReduceMean", label_log_probability, keepdims=0)
    else:
        mean = _mean_over_counted(build, scores, labels, ignore_index)
    build.call("Neg", (mean,), (name,))
    _append(head.graph, build)
    return Loss(name, labels, _sample_axis(head, shape))


def _mean_over_counted(build: NodeBuilder, scores: _Scores, labels: str, ignore_index: int) -> str:
    """Return the mean of the labels' log probabilities, without ignored labels; 0 if all are."""
    ignored = build.op("Equal", labels, build.constant(np.array(ignore_index, np.int64)))
    safe = build.op("Where", ignored, build.constant(np.array(0, np.int64)), labels)
    index = build.op("Unsqueeze", safe, build.ints(-1))
    label_scores = build.op(
        "Squeeze", build.op("GatherElements", scores.tensor, index, axis=-1), build.ints(-1)
    )
    weights = build.op("Cast", build.op("Not", ignored), to=scores.type_.element)
    total = build.op("ReduceSum", build.op("Mul", label_scores, weights), keepdims=0)
    one = build.constant(np.array(1, scores.type_.dtype))
    return build.op("Div", total, build.op("Max", build.op("ReduceSum", weights, keepdims=0), one))


def _scores(head: Head, build: NodeBuilder) -> _Scores:
    """A graph that ends in a Softmax is trained through what that Softmax reads."""
    maker = _final_softmax(head)
    if maker is None:
        return _image_scores(head, build) or _of_logits(head, build, head.result)
    rank = len(_shape(head, maker.output[0]))
    axis = next((attribute.i for attribute in maker.attribute if attribute.name == "axis"), -1)
    if axis % rank != rank - 1:
        raise UnsupportedModel(
            f"the classes of {head.result!r} lie along axis {axis}, not along the last",
            at=f"node {maker.name!r} ({maker.op_type})",
            fix="transpose the logits so that the class axis is the last",
        )
    if maker.op_type == "Softmax":
        return _of_logits(head, build, maker.input[0])
    return _Scores(maker.output[0], _type(head, maker.output[0]))


def _of_logits(head: Head, build: NodeBuilder, logits: str) -> _Scores:
    return _Scores(build.op("LogSoftmax", logits, axis=-1), _type(head, logits))


def _final_softmax(head: Head) -> onnx.NodeProto | None:
    """Return the Softmax or LogSoftmax that makes the result, up to a change of its shape."""
    makers = {name: node for node in head.graph.node for name in node.output}
    node = makers.get(head.result)
    while node is not None and node.op_type in ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"):
        node = makers.get(node.input[0])
    return node if node is not None and node.op_type in ("Softmax", "LogSoftmax") else None


def _image_scores(head: Head, build: NodeBuilder) -> _Scores | None:
    """Logits [n, classes, 1, ..] of an image classifier lose their trailing axes."""
    type_ = _type(head, head.result)
    shape = type_.shape or ()
    if len(shape) < 3 or any(size != 1 for size in shape[2:]) or shape[1] == 1:
        return None
    logits = build.op("Squeeze", head.result, build.ints(*range(2, len(shape))))
    return _Scores(build.op("LogSoftmax", logits, axis=-1), TensorType(type_.element, shape[:2]))


# ---------------------------------------------------------------- shared


def _type(head: Head, tensor: str) -> TensorType:
    return TensorType(head.types[tensor].element, _shape(head, tensor))


def _shape(head: Head, tensor: str) -> Shape:
    """Return the shape that an input beside this tensor has: unknown sizes get symbols of their own."""
    shape = known_shape(head.types, tensor, needed_by=f"the loss, on output {head.result!r}")
    unknown = (size is None for size in shape)
    if sum(unknown) == 1 and isinstance(head.batch, str) and head.batch not in shape:
        return tuple(head.batch if size is None else size for size in shape)
    return tuple(f"{tensor}_axis{axis}" if size is None else size for axis, size in enumerate(shape))


def _sample_axis(head: Head, shape: Shape) -> int | None:
    if isinstance(head.batch, str) and head.batch in shape:
        return shape.index(head.batch)
    return 0 if shape else None


def _builder(graph: onnx.GraphProto) -> NodeBuilder:
    build = NodeBuilder(names_in(graph))
    build.scope = "loss/"
    return build


def _append(graph: onnx.GraphProto, build: NodeBuilder) -> None:
    graph.node.extend(build.nodes)
    graph.initializer.extend(build.constants)
