"""Build the training graph of a forward model: loss, gradients, clipping, updates.

forward.onnx ─ normalise ─ rebatch ─ add loss ─ differentiate ─ clip ─ update ─> train.onnx
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto, helper

from partc.compiler.training import parameters as find
from partc.compiler.training.clipping import clip_by_global_norm
from partc.compiler.training.differentiate import differentiate, ops_without_rule
from partc.compiler.training.forward import IR_VERSION, OPSET, expand_ops_without_rule, normalise_forward
from partc.compiler.training.initial_values import InitialValue, initial_values, initialization_graph
from partc.compiler.training.losses import Loss, add_loss
from partc.compiler.training.node_builder import NodeBuilder
from partc.compiler.training.optimizers import (
    LEARNING_RATE,
    Optimizer,
    ReadyGradient,
    Updates,
    learning_rate_input,
)
from partc.compiler.training.rebatch import Batch, rebatch
from partc.compiler.training.reinit import fresh_values, statistics
from partc.compiler.training.tensor_types import TensorType, Types, infer_types, type_of, value_info
from partc.passes.indexed_slices import DOMAIN, sum_rows_function, sum_rows_node
from partc.passes.training_graph import Gradient
from partc.runtime.errors import BadUsage
from partc.runtime.program import Constant

TRAINING_KEY = "partc.training"


@dataclass(frozen=True, slots=True)
class _Objective:
    """A forward graph with its loss, ready to be differentiated."""

    model: onnx.ModelProto
    loss: str
    flow: find.Dataflow
    types: Types
    state: Mapping[str, str]  # variables that the forward pass renews
    results: tuple[str, ...]
    sample_axes: Mapping[str, int | None]


def build_training_graph(
    forward: onnx.ModelProto,
    *,
    loss: str,
    optimizer: Optimizer,
    batch_size: Batch | None = None,
    reinit: int | None = None,
    clip_global_norm: float | None = None,
    ignore_index: int | None = None,
) -> onnx.ModelProto:
    """Return the flat training graph of a forward model.

    `reinit` is the first seed of fresh random parameters. Labels equal to `ignore_index` do not count.
    Raises BadUsage, BadModel, UnsupportedModel.
    """
    _check_options(batch_size, clip_global_norm, reinit)
    objective = _state_objective(forward, loss, batch_size, ignore_index)
    graph = objective.model.graph
    build = NodeBuilder(_names(graph))
    gradients = differentiate(build, graph, objective.types, objective.flow, loss=objective.loss, opset=OPSET)
    updates = Updates(build, objective.types, dict(objective.state))
    _update(updates, gradients, optimizer, clip_global_norm)
    return _assemble(objective, updates, gradients, _initial_values(objective, updates, reinit), reinit)


def _check_options(batch_size: Batch | None, clip: float | None, reinit: int | None) -> None:
    wrong = [
        ("--batch-size", batch_size, isinstance(batch_size, int) and batch_size < 1, "a size of at least 1"),
        ("--clip-global-norm", clip, clip is not None and not 0 < clip < float("inf"), "a positive number"),
        ("--reinit", reinit, reinit is not None and not 0 <= reinit < 2**24, "a seed from 0 to 16777215"),
    ]
    for option, value, is_wrong, wanted in wrong:
        if is_wrong:
            raise BadUsage(f"{value!r} is not {wanted}", at=option, fix=f"give {wanted}")


# ---------------------------------------------------------------- forward and loss


def _state_objective(
    forward: onnx.ModelProto, loss: str, batch_size: Batch | None, ignore_index: int | None
) -> _Objective:
    facts = find.forward_facts(forward)
    model = normalise_forward(forward)
    sample_axes = _sample_axes(model.graph, facts, assume_first=batch_size is not None)
    if batch_size is not None:
        rebatch(model, batch_size, sample_axes)
    types = infer_types(model)
    state = find.carried_state(model.graph, types, facts)
    results = tuple(value.name for value in model.graph.output if value.name not in state.values())
    added = add_loss(
        model.graph,
        types,
        loss,
        results=results,
        batch=_batch(model.graph, sample_axes),
        ignore_index=ignore_index,
    )
    objective = _trace(model, added.name, facts, state)
    return replace(
        objective,
        state=state,
        results=tuple(name for name in results if name not in (loss, added.name)),
        sample_axes=sample_axes | _added_axis(added),
    )


def _trace(
    model: onnx.ModelProto, loss: str, facts: find.ForwardFacts, state: Mapping[str, str]
) -> _Objective:
    """Find the parameters, and expand the ops that the gradient must pass but that have no rule."""
    types = infer_types(model)
    candidates = facts.parameters or find.candidate_parameters(model.graph, types)
    candidates = tuple(name for name in candidates if name in types and name not in state)
    flow = find.trace(model.graph, types, loss, candidates)
    if without_rule := ops_without_rule(model.graph, types, flow):
        model = expand_ops_without_rule(model, without_rule)
        types = infer_types(model)
        flow = find.trace(model.graph, types, loss, candidates)
    return _Objective(model, loss, flow, types, state, (), {})


def _sample_axes(
    graph: onnx.GraphProto, facts: find.ForwardFacts, *, assume_first: bool
) -> dict[str, int | None]:
    """Return what is declared, else the one symbolic axis; else, where it must be known, the first."""
    axes: dict[str, int | None] = {}
    for value in find.data_inputs(graph):
        shape = type_of(value).shape or ()
        symbolic = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
        if value.name in facts.sample_axes:
            axes[value.name] = facts.sample_axes[value.name]
        elif len(symbolic) == 1:
            axes[value.name] = symbolic[0]
        elif assume_first:
            axes[value.name] = 0 if shape else None
    return axes


def _batch(graph: onnx.GraphProto, sample_axes: Mapping[str, int | None]) -> int | str | None:
    for value in find.data_inputs(graph):
        axis, shape = sample_axes.get(value.name), type_of(value).shape
        if axis is not None and shape:
            return shape[axis]
    return None


def _added_axis(loss: Loss) -> dict[str, int | None]:
    return {loss.added_input: loss.sample_axis} if loss.added_input else {}


# ---------------------------------------------------------------- updates


def _update(
    updates: Updates, gradients: Sequence[Gradient], optimizer: Optimizer, clip: float | None
) -> None:
    ready = [_summed(updates.build, gradient) for gradient in gradients]
    if clip is not None:
        ready = clip_by_global_norm(updates.build, updates.types, ready, clip)
    for gradient in ready:
        updates.build.scope = f"{gradient.parameter}/update/"
        optimizer.step(updates, gradient)
    updates.build.scope = ""


def _summed(build: NodeBuilder, gradient: Gradient) -> ReadyGradient:
    if gradient.ids is None or gradient.rows is None:
        return ReadyGradient(gradient.parameter, dense=gradient.dense)
    unique_ids = build.fresh(f"{gradient.parameter}/unique_ids")
    sums = build.fresh(f"{gradient.parameter}/summed_rows")
    name = build.fresh(f"{gradient.parameter}/SumRows")
    build.nodes.append(sum_rows_node(gradient.ids, gradient.rows, unique_ids, sums, name))
    function = sum_rows_function(OPSET)
    build.functions.setdefault(function.name, function)
    return ReadyGradient(gradient.parameter, unique_ids=unique_ids, sums=sums)


# ---------------------------------------------------------------- the model


def _initial_values(objective: _Objective, updates: Updates, reinit: int | None) -> dict[str, InitialValue]:
    graph, types = objective.model.graph, objective.types
    names = tuple(dict.fromkeys((*objective.flow.parameters, *objective.state)))
    values = initial_values(graph, types, names)
    if reinit is not None:
        values |= fresh_values(graph, types, names, reinit)
    return values | {slot.name: Constant(slot.initial) for slot in updates.slots}


def _assemble(
    objective: _Objective,
    updates: Updates,
    gradients: Sequence[Gradient],
    initial: Mapping[str, InitialValue],
    reinit: int | None,
) -> onnx.ModelProto:
    build, forward = updates.build, objective.model.graph
    types = dict(objective.types) | {slot.name: slot.type_ for slot in updates.slots}
    constants = {tensor.name: tensor for tensor in (*forward.initializer, *build.constants)}
    if reinit is not None:
        constants |= _fresh_statistics(objective, initial, reinit)
    outputs = [objective.loss, *objective.results, *updates.next_values.values()]
    nodes = _live_nodes(build.nodes, outputs, made={*initial, *constants})
    inputs = [*find.data_inputs(forward)] + ([learning_rate_input()] if updates.feeds_learning_rate else [])
    inputs += [value_info(name, types[name]) for name in initial]
    read = {name for node in nodes for name in node.input} | set(outputs)
    stored = [value for value in initial.values() if isinstance(value, TensorProto)]
    stored += [t for name, t in constants.items() if name in read and name not in initial]
    next_types = {following: types[name] for name, following in updates.next_values.items()}
    graph = helper.make_graph(
        nodes,
        f"{forward.name or 'model'}_step",
        inputs,
        [value_info(name, next_types.get(name) or types[name]) for name in outputs],
        stored,
        value_info=_value_info(nodes, types, build, {*outputs}),
    )
    functions = [
        build.functions[name] for name in sorted({n.op_type for n in nodes} & build.functions.keys())
    ]
    return _finish(objective, updates, gradients, graph, functions, initialization_graph(initial, types))


def _fresh_statistics(
    objective: _Objective, initial: Mapping[str, InitialValue], seed: int
) -> dict[str, TensorProto]:
    """Return new constants for running statistics that nothing trains."""
    graph, types = objective.model.graph, objective.types
    names = [name for name in statistics(graph) if name not in initial]
    tensors = {}
    for name, value in fresh_values(graph, types, names, seed).items():
        assert isinstance(value, Constant)
        shape = [size for size in types[name].shape or () if isinstance(size, int)]
        count = shape[0] if shape else 1
        tensors[name] = helper.make_tensor(name, types[name].element, shape, [value.value] * count)
    return tensors


def _live_nodes(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], made: set[str]
) -> list[onnx.NodeProto]:
    """Drop nodes that no output needs, and those whose output is now a variable or a constant."""
    needed = set(outputs)
    live = []
    for node in reversed(nodes):
        if needed.intersection(node.output) and not made.intersection(node.output):
            live.append(node)
            needed.update(node.input)
    return live[::-1]


def _value_info(
    nodes: Sequence[onnx.NodeProto], types: Types, build: NodeBuilder, outputs: set[str]
) -> list[onnx.ValueInfoProto]:
    known: dict[str, TensorType] = dict(types) | build.declared
    made = [name for node in nodes for name in node.output if name in known and name not in outputs]
    return [value_info(name, known[name]) for name in made if known[name].shape is not None]


def _finish(
    objective: _Objective,
    updates: Updates,
    gradients: Sequence[Gradient],
    graph: onnx.GraphProto,
    functions: Sequence[onnx.FunctionProto],
    training: onnx.TrainingInfoProto,
) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET)]
    if functions:
        opsets.append(helper.make_opsetid(DOMAIN, 1))
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=IR_VERSION)
    model.producer_name = "partc"
    if training.initialization_binding:
        model.training_info.append(training)
    sample_axes = dict(objective.sample_axes)
    if updates.feeds_learning_rate:
        sample_axes[LEARNING_RATE] = None
    facts = {
        "state": updates.next_values,
        "loss": objective.loss,
        "gradients": {gradient.parameter: _spelled(gradient) for gradient in gradients},
        "sample_axes": sample_axes,
        "forward_outputs": objective.results,
    }
    helper.set_model_props(model, {TRAINING_KEY: json.dumps(facts)})
    return model


def _spelled(gradient: Gradient) -> dict[str, str | None]:
    if gradient.is_sparse:
        return {"ids": gradient.ids, "rows": gradient.rows}
    return {"dense": gradient.dense}


def _names(graph: onnx.GraphProto) -> set[str]:
    values = (*graph.input, *graph.output, *graph.initializer)
    names = {value.name for value in values}
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
    return names | {LEARNING_RATE}
