"""The ONNX standard's own form of a training graph, joined into one flat step, and the way back.

    before   graph      (x, W) -> y                       after   (x, t, W) -> y, loss, W_next
             algorithm  (t; reads y, W) -> loss, W_next
             update_binding {W: W_next}

Source: TrainingInfoProto in onnx.proto: the training graph is the concatenation of the inference
graph and the algorithm graph; names are shared.

The way back:

    before   (x, t, W) -> y, loss, W_next     after   graph      (x, W) -> y
                                                      algorithm  (t; reads y, W) -> loss, W_next
                                                      update_binding {W: W_next}

Source: TrainingInfoProto in onnx.proto. Any viewer and any runtime opens the result as the forward
model, with the trained variables as its initializers.
"""

import onnx
from onnx import TensorProto

from partc.compiler.importing.bindings import METADATA_KEY, Bindings, read_bindings, write_bindings
from partc.compiler.model_files.cut_model import needed_for
from partc.runtime.errors import BadModel, UnsupportedModel


def has_algorithm(model: onnx.ModelProto) -> bool:
    """Tell whether the step is spread over training_info, in the standard's form."""
    return any(training.algorithm.node for training in model.training_info)


def join_training_info(model: onnx.ModelProto, bindings: Bindings) -> Bindings:
    """Append the algorithm to the graph; return the bindings with its state.

    The initializations stay in training_info: import_initials reads them.
    """
    trainings = [training for training in model.training_info if training.algorithm.node]
    if len(trainings) > 1:
        raise UnsupportedModel(
            f"{len(trainings)} training algorithms",
            at="training_info",
            fix="keep the one that should be compiled, and remove the others",
        )
    (training,) = trainings
    state = {binding.key: binding.value for binding in training.update_binding}
    graph, algorithm = model.graph, training.algorithm
    forward_outputs = tuple(info.name for info in graph.output)
    graph.node.extend(algorithm.node)
    graph.initializer.extend(algorithm.initializer)
    graph.value_info.extend(algorithm.value_info)
    _extend_by_name(graph.input, algorithm.input)
    _extend_by_name(graph.output, algorithm.output)
    training.ClearField("algorithm")
    _list_variables(graph, state)
    return Bindings(
        state=state,
        loss=bindings.loss,
        gradients=bindings.gradients,
        sample_axes=bindings.sample_axes,
        forward_outputs=bindings.forward_outputs or forward_outputs,
        initial=bindings.initial,
    )


def _extend_by_name(mine: "list[onnx.ValueInfoProto]", more: "list[onnx.ValueInfoProto]") -> None:
    names = {info.name for info in mine}
    mine.extend([info for info in more if info.name not in names])


def _list_variables(graph: onnx.GraphProto, state: dict[str, str]) -> None:
    """Make every variable a graph input, as IR version 4 no longer does."""
    inputs = {info.name for info in graph.input}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for name in state:
        if name in inputs:
            continue
        if name not in initializers:
            raise BadModel(
                f"an update of {name!r}, which is no initializer and no input",
                at="training_info update_binding",
                fix=f"add the initializer {name!r}, or correct the binding's key",
            )
        tensor = initializers[name]
        graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))


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
    needed_names = {name for node in needed_for(train.graph, results) for name in node.output if name}
    model = onnx.ModelProto()
    model.CopyFrom(train)
    forward = [node for node in train.graph.node if needed_names.intersection(node.output)]
    rest = [node for node in train.graph.node if not needed_names.intersection(node.output)]
    _keep(model.graph, forward, set(results))
    training = model.training_info[0] if model.training_info else model.training_info.add()
    _fill_algorithm(training.algorithm, train.graph, rest, model.graph)
    for variable, following in bindings.state.items():
        training.update_binding.add(key=variable, value=following)
    own_bindings = Bindings(
        loss=bindings.loss, gradients=bindings.gradients, sample_axes=bindings.sample_axes
    )
    write_bindings(model, own_bindings)
    return model


def _only_loss(bindings: Bindings) -> tuple[str, ...]:
    if bindings.loss is None:
        raise BadModel("a step without forward outputs and loss", at="bindings", fix='name the "loss"')
    return (bindings.loss,)


def _keep(graph: onnx.GraphProto, nodes: list[onnx.NodeProto], results: set[str]) -> None:
    """Leave the forward pass in the graph: its nodes, and the inputs and constants that they read."""
    read_names = {name for node in nodes for name in node.input} | results
    outputs = [info for info in graph.output if info.name in results]
    initializers = [tensor for tensor in graph.initializer if tensor.name in read_names]
    initializer_names = {tensor.name for tensor in initializers}
    inputs = [info for info in graph.input if info.name in read_names and info.name not in initializer_names]
    for target, remaining in (
        (graph.node, nodes),
        (graph.input, inputs),
        (graph.output, outputs),
        (graph.initializer, initializers),
    ):
        copies = [type(entry).FromString(entry.SerializeToString()) for entry in remaining]
        del target[:]
        target.extend(copies)


def _fill_algorithm(
    algorithm: onnx.GraphProto, flat: onnx.GraphProto, nodes: list[onnx.NodeProto], forward: onnx.GraphProto
) -> None:
    """Put everything that is not in the forward graph into the algorithm."""
    initializer_names = {tensor.name for tensor in flat.initializer}
    elsewhere = {entry.name for entry in (*forward.input, *forward.output, *forward.initializer)}
    algorithm.name = "training_step"
    algorithm.node.extend(nodes)
    algorithm.initializer.extend(_others(flat.initializer, elsewhere))
    algorithm.input.extend(
        info for info in flat.input if info.name not in elsewhere and info.name not in initializer_names
    )
    algorithm.output.extend(info for info in flat.output if info.name not in elsewhere)


def _others(tensors: "list[TensorProto]", elsewhere: set[str]) -> list[TensorProto]:
    return [tensor for tensor in tensors if tensor.name not in elsewhere]
