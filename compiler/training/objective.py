"""What is to be minimised: a forward model brought to one form, its loss, and its parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx

from partc.compiler.training import parameters as find
from partc.compiler.training.choose_parameters import ParameterChoice
from partc.compiler.training.differentiate import ops_without_rule
from partc.compiler.training.expand_ops import is_expandable
from partc.compiler.training.forward import OPSET, expand_ops_without_rule, normalise_forward
from partc.compiler.training.losses import Loss, add_loss
from partc.compiler.training.rebatch import Batch, rebatch
from partc.compiler.training.sizes.fold_sizes import fold_sizes
from partc.compiler.training.tensor_types import Size, Types, check_shapes, infer_types, type_of


@dataclass(frozen=True, slots=True)
class Objective:
    """A forward graph with its loss, ready to be differentiated."""

    model: onnx.ModelProto
    loss: str
    flow: find.Dataflow
    types: Types
    state: Mapping[str, str]  # variables that the forward pass renews
    results: tuple[str, ...]
    sample_axes: Mapping[str, int | None]


def state_objective(
    forward: onnx.ModelProto,
    loss: str,
    batch_size: Batch | None = None,
    ignore_index: int | None = None,
    choice: ParameterChoice = ParameterChoice(),  # noqa: B008  # frozen
) -> Objective:
    """Normalise, rebatch, add the loss, find the parameters. Raises BadUsage, BadModel, UnsupportedModel."""
    facts = find.forward_facts(forward)
    model = normalise_forward(forward)
    check_shapes(model)
    sample_axes = _sample_axes(model.graph, facts, assume_first=batch_size is not None)
    if batch_size is not None:
        fold_sizes(model, shapes=False)
        rebatch(model, batch_size, sample_axes)
    fold_sizes(model)
    types = infer_types(model)
    state = find.carried_state(model.graph, types, facts)
    carried = set(state.values())
    results = tuple(value.name for value in model.graph.output if value.name not in carried)
    untrained = {*state, *find.read_as_constants(forward.graph)}
    parameters = choice.choose(model.graph, types, facts.parameters or (), untrained)
    added = add_loss(
        model.graph,
        types,
        loss,
        results=results,
        batch=_batch(model.graph, sample_axes),
        ignore_index=ignore_index,
    )
    objective = _trace(model, added.name, parameters)
    choice.check_reached(parameters, objective.flow.parameters)
    return replace(
        objective,
        state=state,
        results=tuple(name for name in results if name not in (loss, added.name)),
        sample_axes=sample_axes | _added_axis(added),
    )


def _trace(model: onnx.ModelProto, loss: str, parameters: Collection[str]) -> Objective:
    """Follow the gradient, and expand the ops that it must pass but that have no rule."""
    types = infer_types(model)
    flow = find.trace(model.graph, types, loss, parameters)
    before: list[str] = []
    while (ops := [node.op_type for node in model.graph.node]) != before:
        expandable = {op for op in ops_without_rule(model.graph, types, flow) if is_expandable(op, OPSET)}
        if not expandable:
            break
        before, model = ops, expand_ops_without_rule(model, expandable)
        types = infer_types(model)
        flow = find.trace(model.graph, types, loss, flow.parameters)
    return Objective(model, loss, flow, types, {}, (), {})


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


def _batch(graph: onnx.GraphProto, sample_axes: Mapping[str, int | None]) -> Size:
    for value in find.data_inputs(graph):
        axis, shape = sample_axes.get(value.name), type_of(value).shape
        if axis is not None and shape:
            return shape[axis]
    return None


def _added_axis(loss: Loss) -> dict[str, int | None]:
    return {loss.added_input: loss.sample_axis} if loss.added_input else {}
