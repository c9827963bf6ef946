"""A training step that somebody else wrote, in any of its forms, as a TrainingGraph.

    flat            inputs: data and variables; outputs: loss, ... and the variables' next values
    artifacts       onnxruntime-training's folder: made flat first (ort_training/)
    training_info   the standard's form: joined into a flat one first (training_info.py)

What is large stays where it lies: initial values are references, constants of one repeated value
become ConstantOfShape.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from partc.compiler.differentiation.forward.settle_windows import settle_windows
from partc.compiler.differentiation.forward.unpack_sequences import check_no_sequences, unpack_sequences
from partc.compiler.importing.bindings import (
    Bindings,
    GradientTensors,
    annotated_source,
    read_bindings,
    write_bindings,
)
from partc.compiler.importing.constant_tensors import embed_constants
from partc.compiler.importing.draw_random_inputs import draw_random_inputs
from partc.compiler.importing.drop_unread_outputs import drop_unread_outputs
from partc.compiler.importing.expand_normalizations import expand_normalizations
from partc.compiler.importing.import_initials import read_initial_values
from partc.compiler.importing.import_variables import (
    check_bindings,
    drop_unread_inputs,
    find_recorded_slices,
    read_data_input,
    read_variable,
    separate_outputs,
)
from partc.compiler.importing.lower_gradient_ops import lower_gradient_ops
from partc.compiler.importing.lower_optimizer_ops import PREVIEW_DOMAIN, lower_optimizer_ops
from partc.compiler.importing.merge_opsets import merge_opsets
from partc.compiler.importing.name_nodes import name_nodes, name_outputs
from partc.compiler.importing.ort_training.import_artifacts import is_artifacts, read_artifacts
from partc.compiler.importing.ort_training.lower_nodes import (
    KNOWN_OPS,
    MICROSOFT,
    convert_standard_ops,
    has_own_ops,
    lower_training_nodes,
    move_misplaced,
)
from partc.compiler.importing.outline_bodies import declare_loop_outputs, outline_bodies
from partc.compiler.importing.propose_state import propose_state
from partc.compiler.importing.shard_inputs import declare_shards, read_shard_inputs
from partc.compiler.importing.training_info import has_algorithm, join_training_info
from partc.compiler.model_files.check_element_types import check_element_types
from partc.compiler.model_files.check_operand_shapes import check_operand_shapes
from partc.compiler.model_files.convert_opset import convert_opset
from partc.compiler.model_files.make_dense import make_dense
from partc.compiler.model_files.model_file import check_model, onnx_transforming, read_model
from partc.compiler.model_files.widen_vectors import inline_products, widen_vectors
from partc.compiler.options import GraphOptions
from partc.compiler.planning.stopwatch import paused_collection
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.infer_shapes import infer_shapes
from partc.passes.graph.inline_functions import inline_local_functions
from partc.passes.graph.simplify import expand_casts, simplify
from partc.passes.graph.training_graph import IR_VERSION, Gradient, InitialValue, TrainingGraph
from partc.passes.roles.find_gradients import find_gradients
from partc.passes.roles.find_input_ranges import find_input_ranges
from partc.passes.roles.find_sample_axes import find_drawn_splits, find_sample_axes
from partc.passes.roles.find_taken_values import find_taken_values
from partc.runtime.errors import BadModel
from partc.runtime.plan.plan_folder import outside
from partc.runtime.plan.variables import Constant, DrawnInput

OPSET = 21  # what partc's own graphs are written in
G_LOGGER.severity = G_LOGGER.ERROR  # it warns of every element type that numpy has from elsewhere
NOTHING_SAID = GraphOptions()
ASSUMED_SIZE = 8  # of a symbolic size, to follow it through the graph


@paused_collection()
def import_training_graph(
    source: str | Path | onnx.ModelProto,
    options: GraphOptions = NOTHING_SAID,
    *,
    needs_initial: bool = True,
) -> TrainingGraph:
    """Read a training step and find its gradients. Raises BadModel, UnsupportedModel, BadUsage.

    Without `needs_initial`, variables that have no first values are zero: whoever makes segments needs none.
    """
    if not isinstance(source, onnx.ModelProto) and is_artifacts(Path(source)):
        training = read_training_graph(read_artifacts(Path(source)), options, needs_initial=needs_initial)
        find_recorded_slices(training)
    else:
        training = read_training_graph(source, options, needs_initial=needs_initial)
        find_gradients(training)
    simplify(training)
    training.source = annotated_source(training)
    return training


def read_training_graph(
    source: str | Path | onnx.ModelProto, options: GraphOptions = NOTHING_SAID, *, needs_initial: bool = True
) -> TrainingGraph:
    """Read a training step as far as it describes itself. Raises BadModel, UnsupportedModel."""
    model, path = _read(source)
    folder = path.parent if path is not None else Path()
    bindings = _bindings(model, path, options)
    has_own = has_own_ops(model)
    if has_own:
        model = _set_own_ops_apart(model)
    check_model(model, folder, KNOWN_OPS if has_own else frozenset())
    if has_algorithm(model):
        bindings = join_training_info(model, bindings)
        check_model(model, lowered=KNOWN_OPS if has_own else frozenset())
    bindings = declare_shards(model.graph, bindings)
    check_bindings(model.graph, bindings)
    bindings = separate_outputs(model.graph, bindings)
    file = _initial_file(bindings, folder, options)
    initials = read_initial_values(model, folder, file, frozenset(bindings.state))
    if not needs_initial:
        initials = dict.fromkeys(bindings.state, Constant(0.0)) | initials
    _drop_initials(model, bindings)
    embed_constants(model, folder)
    name_nodes(model.graph)
    drop_unread_outputs(model, bindings.tensors)
    if has_own:
        model, bindings = _lower_own_ops(model, bindings)
    model, bindings = _lower_training_ops(model, bindings)
    model = expand_normalizations(model, OPSET, _upgrade)
    unread, bindings = drop_unread_inputs(model.graph, bindings)
    source_bytes = _source_bytes(model, bindings)
    model, drawn = draw_random_inputs(model)
    declare_loop_outputs(model.graph)
    name_outputs(model.graph)
    model = _upgrade(model)
    widen_vectors(model.graph)
    outline_bodies(model)
    name_nodes(model.graph)  # the converter's nodes have none
    graph = _graph_of(model)
    training = _training_graph(graph, bindings, initials, drawn)
    training.functions, training.source = list(model.functions), source_bytes
    training.unread_inputs = unread
    _find_sample_axes(training, bindings.sample_axes)
    return training


# ---------------------------------------------------------------- the file


def _read(source: str | Path | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
        merge_opsets(model)
        return make_dense(model), None
    return read_model(source), Path(source)


def _bindings(model: onnx.ModelProto, path: Path | None, options: GraphOptions) -> Bindings:
    file_bindings = read_bindings(model, path)
    bindings = msgspec.structs.replace(
        file_bindings,
        state=dict(options.state or file_bindings.state),
        loss=options.loss or file_bindings.loss,
        sample_axes={**file_bindings.sample_axes, **(options.sample_axes or {})},
    )
    if not bindings.state and not has_algorithm(model):
        raise _unbound(model.graph, str(path or model.graph.name))
    return bindings


def _unbound(graph: onnx.GraphProto, at: str) -> BadModel:
    """Return the error that asks for bindings, those that names suggest ready to paste."""
    what = "nothing says which outputs are the next values of which inputs"
    proposed = propose_state(graph)
    if not proposed:
        fix = "give --state input=output,..., or a sidecar .onnx.json file, or start from partc grad"
        return BadModel(what, at=at or "the graph", fix=fix)
    option = ",".join(f"{name}={following}" for name, following in proposed.items())
    unbound = [info.name for info in graph.output if info.name not in proposed.values()]
    others = (
        f"; by their names no next values: {', '.join(unbound[:8])}{', ...' * (len(unbound) > 8)}"
        * bool(unbound)
    )
    return BadModel(what, at=at or "the graph", fix=f"if the names mean it, add --state '{option}'{others}")


def _initial_file(bindings: Bindings, folder: Path, options: GraphOptions) -> Path | None:
    if options.initial is not None:
        return Path(options.initial)
    if not bindings.initial:
        return None
    if why := outside(folder, bindings.initial):
        raise BadModel(
            f"initial values {bindings.initial!r}: the name {why}",
            at="initial",
            fix="put the file beside the model, or name it with --initial",
        )
    return folder / bindings.initial


def _drop_initials(model: onnx.ModelProto, bindings: Bindings) -> None:
    """Leave variables without initializers, and initializers without inputs (IR version 3)."""
    graph = model.graph
    initializers = [tensor for tensor in graph.initializer if tensor.name not in bindings.state]
    constants = {tensor.name for tensor in initializers}
    inputs = [info for info in graph.input if info.name not in constants]
    model.ir_version = max(model.ir_version, 4)  # IR version 3 lists initializers as inputs
    del graph.initializer[:], graph.input[:], model.training_info[:]
    graph.initializer.extend(initializers)
    graph.input.extend(inputs)


def _set_own_ops_apart(model: onnx.ModelProto) -> onnx.ModelProto:
    """Bring onnxruntime's own ops into the graph itself, and into onnxruntime's domain."""
    if model.functions:
        model = inline_local_functions(model)
    move_misplaced(model)
    return model


def _lower_own_ops(model: onnx.ModelProto, bindings: Bindings) -> tuple[onnx.ModelProto, Bindings]:
    """Write out onnxruntime's own ops, gradients among them, as an artifact folder's are."""
    model = convert_standard_ops(model, OPSET, at="opset_import")
    renamed = lower_training_nodes(model, _standard_version(model), bindings.state)
    opsets = [opset for opset in model.opset_import if opset.domain != MICROSOFT]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    gradients = {
        name: GradientTensors(*(renamed.get(t, t) if t else t for t in (entry.dense, entry.ids, entry.rows)))
        for name, entry in bindings.gradients.items()
    }
    return model, msgspec.structs.replace(bindings, gradients=gradients)


def _standard_version(model: onnx.ModelProto) -> int:
    return int(next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")))


def _lower_training_ops(model: onnx.ModelProto, bindings: Bindings) -> tuple[onnx.ModelProto, Bindings]:
    """Write out the standard's Gradient and optimizer ops: onnxruntime has none of them."""
    if not any(node.domain == PREVIEW_DOMAIN for node in model.graph.node):
        return model, bindings
    model = _upgrade(model)
    gradient_tensors = lower_gradient_ops(model, OPSET)
    lower_optimizer_ops(model.graph)
    gradients = {name: tensors for name, tensors in gradient_tensors.items() if name in bindings.state}
    opsets = [opset for opset in model.opset_import if opset.domain != PREVIEW_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    return model, msgspec.structs.replace(bindings, gradients=gradients | bindings.gradients)


def _source_bytes(model: onnx.ModelProto, bindings: Bindings) -> bytes:
    write_bindings(model, bindings)
    return bytes(model.SerializeToString(deterministic=True))


def _upgrade(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert the standard ops to OPSET where they are older, count windows, and infer shapes."""
    version = _standard_version(model)
    if version < OPSET:
        with onnx_transforming(
            model,
            f"opset {version} cannot be converted to {OPSET}",
            fix=f"export the model with opset {OPSET}",
        ):
            if model.functions:
                model = inline_local_functions(model)
            model = convert_opset(model, version, OPSET)
    model = inline_products(model)
    model.ir_version = max(IR_VERSION, min(model.ir_version, IR_VERSION))
    unpack_sequences(model)
    check_no_sequences(model.graph)
    settle_windows(model)
    model = infer_shapes(model, strict_mode=True, data_prop=True)
    check_element_types(model)
    check_operand_shapes(model)
    return model


def _graph_of(model: onnx.ModelProto) -> gs.Graph:
    _drop_restated_types(model.graph)
    graph = gs.import_onnx(model)
    _name_element_types(graph)
    _lift_constants(graph)
    return graph


def _drop_restated_types(graph: onnx.GraphProto) -> None:
    """Let inputs and initializers have the types that they declare; nobody checks what value_info says."""
    declared = {entry.name for entry in (*graph.input, *graph.initializer)}
    remaining = [value for value in graph.value_info if value.name not in declared]
    if len(remaining) < len(graph.value_info):
        del graph.value_info[:]
        graph.value_info.extend(remaining)


def _name_element_types(graph: gs.Graph) -> None:
    """Give numpy's names to element types that numpy has from elsewhere, such as bfloat16."""
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and isinstance(tensor.dtype, int):
            tensor.dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.dtype)


def _lift_constants(graph: gs.Graph) -> None:
    """Turn Constant nodes into constants."""
    output_names = {tensor.name for tensor in graph.outputs}
    for node in [node for node in graph.nodes if node.op == "Constant"]:
        (kind, value), (result,) = next(iter(node.attrs.items())), node.outputs
        if result.name in output_names or not kind.startswith("value"):
            continue
        node.outputs.clear()
        if isinstance(value, gs.Constant):
            result.to_constant(value._values, value.data_location)
        elif "string" not in kind:
            result.to_constant(np.array(value, dtype=np.float32 if "float" in kind else np.int64))
    graph.nodes = [node for node in graph.nodes if node.op != "Constant" or node.outputs]


def _training_graph(
    graph: gs.Graph,
    bindings: Bindings,
    initials: dict[str, InitialValue],
    drawn: tuple[DrawnInput, ...],
) -> TrainingGraph:
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    outputs = {tensor.name: tensor for tensor in graph.outputs}
    variables = {
        name: read_variable(inputs[name], outputs[following], initials)
        for name, following in bindings.state.items()
    }
    for variable in variables.values():
        inputs[variable.name].shape = list(variable.shape)  # as its initial value tells, where it was a name
    following = set(bindings.state.values())
    results = tuple(name for name in outputs if name not in following)
    training = TrainingGraph(
        graph=graph,
        variables=variables,
        data_inputs={},
        outputs=results,
        loss=bindings.loss or _loss(outputs, results),
        gradients={
            name: Gradient(name, t.dense, t.ids, t.rows)
            for name, t in bindings.gradients.items()
            if not bindings.found
        },
        forward_outputs=bindings.forward_outputs,
        opset=graph.opset,
        shard_inputs=read_shard_inputs(graph, bindings),
        drawn_inputs={entry.name: entry for entry in drawn},
    )
    bound_inputs = variables.keys() | training.shard_inputs.keys() | training.drawn_inputs.keys()
    data = [tensor for tensor in graph.inputs if tensor.name not in bound_inputs]
    ranges, one_values = find_input_ranges(graph), find_taken_values(graph)
    for tensor in data:
        name, axis = tensor.name, bindings.sample_axes.get(tensor.name)
        training.data_inputs[name] = read_data_input(tensor, axis, ranges.get(name), one_values.get(name))
    return training


def _find_sample_axes(training: TrainingGraph, declared: Mapping[str, int | None]) -> None:
    if training.data_inputs.keys() <= declared.keys() and not training.drawn_inputs:
        return
    size_names = {
        size for data in training.data_inputs.values() for size in data.shape if isinstance(size, str)
    }
    facts = infer_facts(training, dict.fromkeys(sorted(size_names), ASSUMED_SIZE))
    expand_casts(training, facts)
    for name, axis in find_sample_axes(training, declared, facts).items():
        data = training.data_inputs[name]
        training.data_inputs[name] = msgspec.structs.replace(data, sample_axis=axis)
    for name, split in find_drawn_splits(training, facts).items():
        entry = training.drawn_inputs[name]
        split_entry = msgspec.structs.replace(entry, sample_axis=split.axis, outer=split.outer)
        training.drawn_inputs[name] = split_entry


def _loss(outputs: dict[str, gs.Tensor], results: tuple[str, ...]) -> str | None:
    """Return the first output that is one floating-point number."""
    for name in results:
        tensor = outputs[name]
        is_scalar = tensor.shape is not None and all(size == 1 for size in tensor.shape)
        if is_scalar and np.issubdtype(tensor.dtype, np.floating):
            return name
    return None
