"""The folder that onnxruntime-training's generate_artifacts writes, as one flat step in standard ops.

    training_model.onnx    x, W, W_grad.accumulation.buffer -> loss, W_grad.accumulation.out
    optimizer_model.onnx   learning_rate, step, params, gradients, moments -> (in place)
    checkpoint             W

    joined                 x, learning_rate, W, moments -> loss, W_next, moments_next

One step is one batch: nothing is accumulated over steps. The learning rate (float[1]) is fed.
"""

from collections.abc import Collection
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
from partc.compiler.importing.ort_training.lower_nodes import (
    convert_standard_ops,
    lower_training_nodes,
    move_misplaced,
)
from partc.compiler.importing.ort_training.optimizer_model import (
    LEARNING_RATE,
    OptimizerStep,
    ZeroSlot,
    add_optimizer,
)
from partc.compiler.importing.ort_training.read_checkpoint import Checkpoint, read_checkpoint
from partc.compiler.model_files.check_tensors import check_tensors
from partc.compiler.model_files.model_file import read_model
from partc.runtime.errors import BadModel, naming

TRAINING_MODEL, OPTIMIZER_MODEL, CHECKPOINT = "training_model.onnx", "optimizer_model.onnx", "checkpoint"
OPSET = 21
_ACCUMULATOR, _RESET = "InPlaceAccumulatorV2", "lazy_reset_grad"


def is_artifacts(path: Path) -> bool:
    """Tell whether a path is a folder of onnxruntime-training's artifacts."""
    return (path / TRAINING_MODEL).is_file()


def read_artifacts(folder: Path) -> onnx.ModelProto:
    """Return the flat step, its bindings in the metadata. Raises BadModel, UnsupportedModel."""
    model, optimizer = read_model(folder / TRAINING_MODEL), read_model(folder / OPTIMIZER_MODEL)
    for name, artifact in ((TRAINING_MODEL, model), (OPTIMIZER_MODEL, optimizer)):
        with naming(folder / name, BadModel):
            check_tensors(artifact, folder)
    checkpoint = read_checkpoint(folder / CHECKPOINT)
    gradients, statistics = _take_gradients(model.graph, checkpoint), _running_statistics(model.graph)
    move_misplaced(model)
    opsets = [opset for opset in model.opset_import if opset.domain in ("", "com.microsoft")]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    model = convert_standard_ops(model, OPSET, at=TRAINING_MODEL)
    _add_parameters(model.graph, checkpoint, statistics)
    renamed = lower_training_nodes(model, OPSET)
    gradients = {parameter: renamed.get(gradient, gradient) for parameter, gradient in gradients.items()}
    step = OptimizerStep(NodeBuilder(_names(model.graph)), dict(gradients), statistics)
    add_optimizer(optimizer, step)
    _join(model, step)
    recorded = {parameter: GradientTensors(dense=gradient) for parameter, gradient in gradients.items()}
    loss = model.graph.output[0].name
    bindings = Bindings(
        state=step.next_values, loss=loss, gradients=recorded, sample_axes={LEARNING_RATE: None}
    )
    write_bindings(model, bindings)
    return model


def _take_gradients(graph: onnx.GraphProto, checkpoint: Checkpoint) -> dict[str, str]:
    """Remove the accumulation of gradients; return each trained parameter's gradient."""
    suffix = "_grad.accumulation.buffer"
    gradients, buffers, dropped = {}, set(), {_RESET}
    nodes = []
    for node in graph.node:
        if node.op_type != _ACCUMULATOR:
            nodes.append(node)
            continue
        gradients[node.input[0].removesuffix(suffix)] = node.input[1]
        buffers.add(node.input[0])
        dropped.update(node.output)
    if missing := gradients.keys() - checkpoint.trained.keys():
        raise BadModel(
            f"a gradient for {min(missing)!r}, which the checkpoint does not hold as trained",
            at=CHECKPOINT,
            fix="give the checkpoint that was generated with this training model",
        )
    left_out = buffers | dropped
    inputs = [info for info in graph.input if info.name not in left_out]
    outputs = [info for info in graph.output if info.name not in dropped]
    for target, remaining in ((graph.node, nodes), (graph.input, inputs), (graph.output, outputs)):
        copies = [type(entry).FromString(entry.SerializeToString()) for entry in remaining]
        del target[:]
        target.extend(copies)
    return gradients


def _running_statistics(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the next values of batch normalisations' running means and variances.

    They are frozen parameters, which onnxruntime overwrites in place.
    """
    return {
        node.input[index + 2]: node.output[index]
        for node in graph.node
        if node.op_type == "BatchNormInternal"
        for index in (1, 2)
        if len(node.output) > index and node.output[index]
    }


def _add_parameters(graph: onnx.GraphProto, checkpoint: Checkpoint, variables: Collection[str]) -> None:
    """Give variables their initial values; make constants of the other parameters."""
    constants = checkpoint.frozen.keys() - set(variables)
    inputs = [info for info in graph.input if info.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)
    initializer_names = {tensor.name for tensor in graph.initializer}
    tensors = [*checkpoint.trained.values(), *checkpoint.frozen.values()]
    graph.initializer.extend(tensor for tensor in tensors if tensor.name not in initializer_names)


def _join(model: onnx.ModelProto, step: OptimizerStep) -> None:
    """Append the updates, their inputs and outputs, and the slots' first values."""
    graph = model.graph
    graph.node.extend(step.build.nodes)
    graph.initializer.extend(step.build.constants)
    graph.input.append(helper.make_tensor_value_info(LEARNING_RATE, TensorProto.FLOAT, [1]))
    types = {info.name: info.type.tensor_type for info in graph.input}
    for slot in step.slots:
        _add_slot(model, slot, types)
    infos = {info.name: info for info in graph.input}
    for variable, following in step.next_values.items():
        output = onnx.ValueInfoProto()
        output.CopyFrom(infos[variable])
        output.name = following
        graph.output.append(output)
    opsets = [opset for opset in model.opset_import if opset.domain != "com.microsoft"]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    model.ir_version = 10


def _add_slot(model: onnx.ModelProto, slot: ZeroSlot, types: "dict[str, onnx.TypeProto.Tensor]") -> None:
    element, shape = int(TensorProto.INT64), [1]
    if slot.like is not None:
        element = types[slot.like].elem_type
        shape = [dim.dim_value for dim in types[slot.like].shape.dim]
    model.graph.input.append(helper.make_tensor_value_info(slot.name, element, shape))
    if not model.training_info:
        model.training_info.add().initialization.name = "initialization"
    training, output = model.training_info[0], f"{slot.name}.initial"
    sizes = helper.make_node("Constant", [], [f"{output}.shape"], f"{output}.shape", value_ints=shape)
    zero = helper.make_tensor("value", element, [1], [0])
    fill = helper.make_node("ConstantOfShape", [f"{output}.shape"], [output], output, value=zero)
    training.initialization.node.extend([sizes, fill])
    training.initialization.output.append(helper.make_tensor_value_info(output, element, shape))
    training.initialization_binding.add(key=slot.name, value=output)


def _names(graph: onnx.GraphProto) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
    return names | {LEARNING_RATE}
