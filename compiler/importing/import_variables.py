"""Inputs of a flat training graph as variables and data inputs, checked against their bindings.

Take away the data inputs that no output depends on.

    before   x, mask -> loss, W_next        after   x -> loss, W_next        nothing reads mask

Such an input has no sample axis and no data of its own: what is compiled, trained and verified does
without it.

Sparse gradients among those that a training graph names itself.

before   W: dense = ScatterND (zeros, ids, rows)      after   W: dense, ids, rows
"""

import msgspec
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from partc.compiler.importing.bindings import Bindings
from partc.compiler.model_files.check_tensors import refuse_empty_batch
from partc.compiler.model_files.cut_model import leaves_of, needed_for
from partc.passes.graph.reachability import drop_unread_nodes
from partc.passes.graph.training_graph import (
    Gradient,
    InitialValue,
    MadeTensor,
    StoredTensor,
    TrainingGraph,
    Variable,
)
from partc.passes.roles.find_indexed_slices import find_indexed_slices
from partc.runtime.errors import BadModel, UnsupportedModel
from partc.runtime.plan.variables import DataInput, TakenValues


def check_bindings(graph: onnx.GraphProto, bindings: Bindings) -> None:
    """Raise BadModel where a binding names a tensor that is not there."""
    inputs = {info.name for info in graph.input}
    outputs = {info.name for info in graph.output}
    variable_of_output: dict[str, str] = {}
    for variable, following in bindings.state.items():
        if variable not in inputs:
            raise BadModel(
                f"an update without a variable: {following!r} updates {variable!r}, which is no input",
                at="state",
                fix=f"bind {following!r} to one of the inputs {join_names(inputs)}, or drop the binding",
            )
        if following not in outputs:
            raise BadModel(
                f"a variable without an update: {variable!r} expects {following!r}, which is no output",
                at="state",
                fix=f"make {following!r} an output, or bind {variable!r} to one of {join_names(outputs)}",
            )
        if (
            other := variable_of_output.setdefault(following, variable) != variable
            and variable_of_output[following]
        ):
            raise BadModel(
                f"output {following!r} is the next value of both {other!r} and {variable!r}",
                at="state",
                fix=f"give {variable!r} an output of its own",
            )
    if bindings.loss is not None and bindings.loss not in outputs:
        fix = f"use one of {join_names(outputs)}"
        raise BadModel(f"unknown tensor {bindings.loss!r}", at="loss", fix=fix)
    data_inputs = inputs - bindings.state.keys() - {tensor.name for tensor in graph.initializer}
    for name in bindings.sample_axes:
        if name in data_inputs:
            continue
        fix = f"use one of the data inputs {join_names(data_inputs)}" if data_inputs else "leave it out"
        raise BadModel(f"{name!r} is no data input", at="sample_axes", fix=fix)
    _check_gradients(graph, bindings)


def _check_gradients(graph: onnx.GraphProto, bindings: Bindings) -> None:
    input_names = {info.name for info in (*graph.input, *graph.initializer)}
    input_names.update(name for node in graph.node for name in node.output)
    for parameter, gradient in bindings.gradients.items():
        if parameter not in bindings.state:
            raise BadModel(
                f"a gradient of {parameter!r}, which is no variable",
                at="gradients",
                fix=f"name one of {join_names(set(bindings.state))}, or drop the entry",
            )
        tensors = [name for name in (gradient.dense, gradient.ids, gradient.rows) if name is not None]
        if not tensors or (gradient.ids is None) != (gradient.rows is None):
            raise BadModel(
                "neither a dense tensor nor ids and rows", at=f"gradients: {parameter}", fix="name them"
            )
        if unknown := [name for name in tensors if name not in input_names]:
            raise BadModel(
                f"unknown tensor {unknown[0]!r}",
                at=f"gradients: {parameter}",
                fix="name a tensor of the graph",
            )


def separate_outputs(graph: onnx.GraphProto, bindings: Bindings) -> Bindings:
    """Give every output that is a variable or a constant itself a node of its own, in place.

    A next value: the variable never changes. Any other: it is the value before the update, which is made in
    place, so a copy `W/value` of it is what the step returns.
    """
    inputs = {info.name for info in graph.input}
    state = dict(bindings.state)
    for variable, following in bindings.state.items():
        if following not in inputs:
            continue
        info = next(info for info in graph.output if info.name == following)
        info.name = state[variable] = f"{following}/kept"
        graph.node.append(helper.make_node("Identity", [following], [info.name], name=info.name))
    names = {tensor.name for tensor in graph.initializer} | bindings.state.keys()
    copied: dict[str, str] = {}
    for info in graph.output:
        if info.name in names:
            variable, info.name = info.name, f"{info.name}/value"
            copied[variable] = info.name
            graph.node.append(helper.make_node("Identity", [variable], [info.name], name=info.name))
    return msgspec.structs.replace(
        bindings,
        state=state,
        loss=copied.get(bindings.loss or "", bindings.loss),
        forward_outputs=tuple(copied.get(name, name) for name in bindings.forward_outputs),
    )


def join_names(names: set[str]) -> str:
    """Return the first names, for a message."""
    first = ", ".join(sorted(names)[:8])
    return first + (", ..." if len(names) > 8 else "")


def read_variable(tensor: gs.Tensor, following: gs.Tensor, initials: dict[str, InitialValue]) -> Variable:
    """Return the variable that an input holds. Raises BadModel."""
    name = tensor.name
    if name not in initials:
        raise BadModel(
            f"variable {name!r} has no initial value",
            at=f"input {name!r}",
            fix=f"add an initializer {name!r}, or give --initial FILE.npz (or .safetensors) that has it",
        )
    initial = initials[name]
    shape = _static_shape(tensor, initial)
    variable = Variable(name, following.name, np.dtype(tensor.dtype), shape, initial)
    _check_like("its initial value", _initial_dtype(initial), _initial_shape(initial), variable)
    next_dtype = None if following.dtype is None else np.dtype(following.dtype)
    _check_like(f"its next value {following.name!r}", next_dtype, following.shape, variable)
    return variable


def _static_shape(tensor: gs.Tensor, initial: InitialValue) -> tuple[int, ...]:
    shape = tensor.shape
    if shape is None or not all(isinstance(size, int) for size in shape):
        shape = _initial_shape(initial)
    if shape is None:
        raise BadModel(
            f"variable {tensor.name!r} has shape {tensor.shape}",
            at=f"input {tensor.name!r}",
            fix="give it a shape of whole numbers: a variable's size must be known",
        )
    return tuple(int(size) for size in shape)


def _initial_shape(initial: InitialValue) -> tuple[int | str, ...] | None:
    if isinstance(initial, StoredTensor):
        return tuple(initial.proto.dims)
    if isinstance(initial, MadeTensor) and initial.model.graph.output[0].type.tensor_type.HasField("shape"):
        dims = initial.model.graph.output[0].type.tensor_type.shape.dim
        return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims)
    return None


def _initial_dtype(initial: InitialValue) -> np.dtype | None:
    if isinstance(initial, StoredTensor):
        return np.dtype(helper.tensor_dtype_to_np_dtype(initial.proto.data_type))
    return None


def _check_like(
    what: str, dtype: np.dtype | None, shape: tuple[int | str, ...] | None, variable: Variable
) -> None:
    at = f"variable {variable.name!r}"
    if dtype is not None and dtype != variable.dtype:
        raise BadModel(
            f"{what} is {dtype}, but the variable is {variable.dtype}",
            at=at,
            fix=f"cast it to {variable.dtype}",
        )
    if shape is None:
        return
    same = [not isinstance(a, int) or a == b for a, b in zip(shape, variable.shape, strict=False)]
    if len(shape) != len(variable.shape) or not all(same):
        raise BadModel(
            f"{what} has shape {tuple(shape)}, but the variable has {variable.shape}",
            at=at,
            fix=f"reshape it to {variable.shape}, or correct the binding",
        )


def read_data_input(
    tensor: gs.Tensor, axis: int | None, high: int | None, taken_values: TakenValues | None = None
) -> DataInput:
    """Return the facts of an input that the user feeds. Raises BadModel, UnsupportedModel."""
    if np.dtype(tensor.dtype).kind in "OSU":
        raise UnsupportedModel(
            f"data input {tensor.name!r} holds text",
            at=f"input {tensor.name!r}",
            fix="turn text into ids before the training step, and feed the ids",
        )
    if tensor.shape is None:
        raise BadModel(
            f"data input {tensor.name!r} has no shape",
            at=f"input {tensor.name!r}",
            fix="declare its shape; sizes that vary may be names",
        )
    rank = len(tensor.shape)
    refuse_empty_batch(tensor.name, tensor.shape, axis or 0)
    if axis is not None and not -rank <= axis < rank:
        raise BadModel(
            f"sample axis {axis} of an input with {rank} axes",
            at=f"input {tensor.name!r}",
            fix=f"use an axis from 0 to {rank - 1}, or none (in JSON null) where all replicas read the same",
        )
    shape = tuple(
        size if isinstance(size, int) else size or f"{tensor.name}_{index}"
        for index, size in enumerate(tensor.shape)
    )
    dtype = np.dtype(tensor.dtype).name
    return DataInput(tensor.name, dtype, shape, axis % rank if axis is not None else None, high, taken_values)


def drop_unread_inputs(graph: onnx.GraphProto, bindings: Bindings) -> tuple[tuple[str, ...], Bindings]:
    """Drop unread data inputs in place, and the nodes that read them; return their names."""
    outputs = [info.name for info in graph.output]
    used_inputs = leaves_of(graph, outputs, ()) | bindings.state.keys() | bindings.shards.keys()
    unread = tuple(info.name for info in graph.input if info.name not in used_inputs)
    if not unread:
        return (), bindings
    live_nodes = needed_for(graph, outputs)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in live_nodes]
    inputs = [info for info in graph.input if info.name in used_inputs]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend(inputs)
    axes = {name: axis for name, axis in bindings.sample_axes.items() if name not in unread}
    return unread, msgspec.structs.replace(bindings, sample_axes=axes)


def find_recorded_slices(training: TrainingGraph) -> None:
    """Let every recorded gradient that is rows scattered into zeros be indexed slices too."""
    tensors = training.graph.tensors()
    for name, gradient in training.gradients.items():
        assert gradient.dense is not None
        slices = find_indexed_slices(training.graph, tensors[gradient.dense], training.variables[name])
        ids, rows = slices or (None, None)
        training.gradients[name] = Gradient(name, gradient.dense, ids, rows)
    training.graph.toposort()
    drop_unread_nodes(training.graph)
