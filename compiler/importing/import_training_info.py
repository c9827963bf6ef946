"""The ONNX standard's own form of a training graph, joined into one flat step.

    before   graph      (x, W) -> y                       after   (x, t, W) -> y, loss, W_next
             algorithm  (t; reads y, W) -> loss, W_next
             update_binding {W: W_next}

Source: TrainingInfoProto in onnx.proto: the training graph is the concatenation of the inference
graph and the algorithm graph; names are shared.
"""

import onnx

from partc.compiler.importing.bindings import Bindings
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
    known = {info.name for info in mine}
    mine.extend([info for info in more if info.name not in known])


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
