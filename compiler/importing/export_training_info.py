"""A flat training graph in the ONNX standard's own form: the way back from import_training_info.

    before   (x, t, W) -> y, loss, W_next     after   graph      (x, W) -> y
                                                      algorithm  (t; reads y, W) -> loss, W_next
                                                      update_binding {W: W_next}

Source: TrainingInfoProto in onnx.proto. Any viewer and any runtime opens the result as the forward
model, with the trained variables as its initializers.
"""

import onnx
from onnx import TensorProto

from partc.compiler.cut_model import needed_for
from partc.compiler.importing.bindings import METADATA_KEY, Bindings, read_bindings, write_bindings
from partc.runtime.errors import BadModel


def export_training_info(train: onnx.ModelProto) -> onnx.ModelProto:
    """Return the training step with forward pass and algorithm apart. Raises BadModel.

    `train` is flat and carries its bindings (as `partc grad` writes it). Variables that are made rather
    than stored keep their initialization; in the graph they are inputs.
    """
    bindings = read_bindings(train, None)
    if not bindings.state:
        raise BadModel(
            "nothing says which outputs are the next values of which inputs",
            at=f"metadata_props {METADATA_KEY!r}",
            fix="export a model that `partc grad` wrote",
        )
    results = bindings.forward_outputs or _only_loss(bindings)
    needed = {name for node in needed_for(train.graph, results) for name in node.output if name}
    model = onnx.ModelProto()
    model.CopyFrom(train)
    forward = [node for node in train.graph.node if needed.intersection(node.output)]
    rest = [node for node in train.graph.node if not needed.intersection(node.output)]
    _keep(model.graph, forward, set(results))
    training = model.training_info[0] if model.training_info else model.training_info.add()
    _fill_algorithm(training.algorithm, train.graph, rest, model.graph)
    for variable, following in bindings.state.items():
        training.update_binding.add(key=variable, value=following)
    kept = Bindings(loss=bindings.loss, gradients=bindings.gradients, sample_axes=bindings.sample_axes)
    write_bindings(model, kept)
    return model


def _only_loss(bindings: Bindings) -> tuple[str, ...]:
    if bindings.loss is None:
        raise BadModel("a step without forward outputs and loss", at="bindings", fix='name the "loss"')
    return (bindings.loss,)


def _keep(graph: onnx.GraphProto, nodes: list[onnx.NodeProto], results: set[str]) -> None:
    """Leave the forward pass in the graph: its nodes, and the inputs and constants that they read."""
    read = {name for node in nodes for name in node.input} | results
    outputs = [info for info in graph.output if info.name in results]
    initializers = [tensor for tensor in graph.initializer if tensor.name in read]
    stored = {tensor.name for tensor in initializers}
    inputs = [info for info in graph.input if info.name in read and info.name not in stored]
    for target, kept in (
        (graph.node, nodes),
        (graph.input, inputs),
        (graph.output, outputs),
        (graph.initializer, initializers),
    ):
        copies = [type(entry).FromString(entry.SerializeToString()) for entry in kept]
        del target[:]
        target.extend(copies)


def _fill_algorithm(
    algorithm: onnx.GraphProto, flat: onnx.GraphProto, nodes: list[onnx.NodeProto], forward: onnx.GraphProto
) -> None:
    """Put everything that is not in the forward graph into the algorithm."""
    stored = {tensor.name for tensor in flat.initializer}
    elsewhere = {entry.name for entry in (*forward.input, *forward.output, *forward.initializer)}
    algorithm.name = "training_step"
    algorithm.node.extend(nodes)
    algorithm.initializer.extend(_others(flat.initializer, elsewhere))
    algorithm.input.extend(
        info for info in flat.input if info.name not in elsewhere and info.name not in stored
    )
    algorithm.output.extend(info for info in flat.output if info.name not in elsewhere)


def _others(tensors: "list[TensorProto]", elsewhere: set[str]) -> list[TensorProto]:
    return [tensor for tensor in tensors if tensor.name not in elsewhere]
