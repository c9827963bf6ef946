"""What is to be minimised: a forward model brought to one form, its loss, and its parameters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from partc.compiler.differentiation.differentiate import ops_without_rule
from partc.compiler.differentiation.forward.bring_forward import (
    OPSET,
    expand_ops_without_rule,
    normalise_forward,
)
from partc.compiler.differentiation.forward.expand_ops import is_expandable
from partc.compiler.differentiation.forward.rebatch import BatchSize, check_batch_is_free, rebatch
from partc.compiler.differentiation.forward.settle_padding import settle_padding
from partc.compiler.differentiation.forward.settle_windows import settle_windows
from partc.compiler.differentiation.forward.widen_mixed_types import widen_mixed_types
from partc.compiler.differentiation.losses import Loss, add_loss
from partc.compiler.differentiation.parameters import find_parameters as find
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice, check_kept
from partc.compiler.differentiation.parameters.decide import decide_parameters
from partc.compiler.differentiation.parameters.decision import ParameterDecision, Verdict, constant
from partc.compiler.differentiation.parameters.exporter_facts import ExporterFacts, exporter_facts
from partc.compiler.differentiation.parameters.exporter_merges import undo_merges
from partc.compiler.differentiation.sizes.fold_sizes import fold_sizes
from partc.compiler.differentiation.tensor_types import (
    Size,
    Types,
    check_shapes,
    infer_types,
    type_of,
    value_info,
)
from partc.compiler.model_files.check_tensors import refuse_empty_batch
from partc.compiler.model_files.widen_vectors import widen_vectors
from partc.runtime.errors import UnsupportedModel

STOPPED = "whose gradient the module stops"


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
    decisions: Mapping[
        str, ParameterDecision
    ]  # what is trained and what is constant, of all that moves the loss


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A forward graph with its loss, before it is chosen what is trained."""

    model: onnx.ModelProto
    types: Types
    facts: find.ForwardFacts
    loss: Loss
    state: Mapping[str, str]
    results: tuple[str, ...]
    sample_axes: Mapping[str, int | None]
    candidates: tuple[str, ...]
    decisions: Mapping[str, ParameterDecision]  # of the candidates that move the loss
    stopped: Mapping[str, ParameterDecision]  # of parameters that move it where no gradient passes
    exported: ExporterFacts


def state_objective(
    forward: onnx.ModelProto,
    loss: str,
    batch_size: BatchSize | None = None,
    ignore_index: int | None = None,
    choice: ParameterChoice = ParameterChoice(),  # noqa: B008  # frozen
    folder: Path | None = None,
) -> Objective:
    """Normalise, rebatch, add the loss, find the parameters. Raises BadUsage, BadModel, UnsupportedModel.

    `folder` is where the forward model's external data lies.
    """
    ready = _prepare(forward, loss, batch_size, ignore_index, folder)
    decisions = choice.choose(ready.decisions, ready.candidates, ready.facts.parameters or ())
    check_kept(ready.model.graph, [n for n, d in decisions.items() if d.verdict is Verdict.CONSTANT])
    parameters = [name for name, decision in decisions.items() if decision.verdict is Verdict.TRAINED]
    objective = _trace(ready, parameters)
    if batch_size is not None:
        check_batch_is_free(objective.model)
    return replace(
        objective,
        state=ready.state,
        results=tuple(name for name in ready.results if name not in (loss, ready.loss.name)),
        sample_axes={**ready.sample_axes, **_added_axis(ready.loss)},
        decisions={**decisions, **ready.stopped},
    )


def weigh_parameters(
    forward: onnx.ModelProto, loss: str, folder: Path | None = None
) -> Mapping[str, ParameterDecision]:
    """Return what the file alone tells of the float tensors that move the loss. Raises as state_objective."""
    return _prepare(undo_merges(forward, folder)[0], loss, None, None, folder).decisions


def _prepare(
    forward: onnx.ModelProto,
    loss: str,
    batch_size: BatchSize | None,
    ignore_index: int | None,
    folder: Path | None,
) -> _Prepared:
    facts, exported = find.forward_facts(forward), exporter_facts(forward)
    model, sample_axes, reached = _normalised(forward, facts, batch_size)
    types, state = _settle_types(model, facts, exported)
    next_values = set(state.values())
    results = tuple(value.name for value in model.graph.output if value.name not in next_values)
    candidates = find.candidate_parameters(model.graph, types, reached)
    loss_output = add_loss(
        model.graph,
        types,
        loss,
        results=results,
        batch=_batch(model.graph, sample_axes),
        ignore_index=ignore_index,
    )
    types = infer_types(model)
    loss_dependencies = find.moving_the_loss(model.graph, types, loss_output.name, exported.detached)
    constants = {*state, *find.read_as_constants(forward.graph)}
    movable = [name for name in candidates if name in loss_dependencies and name not in constants]
    decisions = decide_parameters(forward, model.graph, types, movable, folder)
    behind = find.moving_the_loss(model.graph, types, loss_output.name) - loss_dependencies
    stopped = {name: constant(STOPPED) for name in exported.parameters_in(behind.intersection(candidates))}
    return _Prepared(
        model,
        types,
        facts,
        loss_output,
        state,
        results,
        sample_axes,
        candidates,
        decisions,
        stopped,
        exported,
    )


def _normalised(
    forward: onnx.ModelProto, facts: find.ForwardFacts, batch_size: BatchSize | None
) -> tuple[onnx.ModelProto, dict[str, int | None], frozenset[str]]:
    """Return the model in one form, of that batch size, its sample axes, and what inputs lead to."""
    model = normalise_forward(forward)
    reached = find.reached_by_inputs(forward.graph) | find.reached_by_inputs(model.graph)
    settle_windows(model)
    check_shapes(model)
    sample_axes = _sample_axes(model.graph, facts, assume_first=batch_size is not None)
    if batch_size is not None:
        fold_sizes(model, shapes=False)
        rebatch(model, batch_size, sample_axes)
    for value in find.data_inputs(model.graph):
        refuse_empty_batch(value.name, type_of(value).shape or (), sample_axes.get(value.name) or 0)
    fold_sizes(model)
    return model, sample_axes, reached


def _settle_types(
    model: onnx.ModelProto, facts: find.ForwardFacts, exported: ExporterFacts
) -> tuple[Types, dict[str, str]]:
    """Rewrite what types decide; return them, and the state that the model renews."""
    types = infer_types(model)
    settle_padding(model.graph, types)
    if widen_vectors(model.graph, {name: value_info(name, known).type for name, known in types.items()}):
        types = infer_types(model)
    state = {**exported.renewed, **find.carried_state(model.graph, types, facts)}
    if widen_mixed_types(model.graph, types):
        types = infer_types(model)
    return types, state


def _trace(ready: _Prepared, parameters: Collection[str]) -> Objective:
    """Follow the gradient, and expand the ops that it must pass but that have no rule."""
    model, types, detached = ready.model, ready.types, ready.exported.detached
    flow = find.trace(model.graph, types, ready.loss.name, parameters, detached)
    _check_detached(ready, flow)
    before: list[str] = []
    while (ops := [node.op_type for node in model.graph.node]) != before:
        expandable = {op for op in ops_without_rule(model.graph, types, flow) if is_expandable(op, OPSET)}
        if not expandable:
            break
        before, model = ops, expand_ops_without_rule(model, expandable)
        types = infer_types(model)
        flow = find.trace(model.graph, types, ready.loss.name, flow.parameters, detached)
    return Objective(model, ready.loss.name, flow, types, {}, (), {}, {})


def _check_detached(ready: _Prepared, flow: find.Dataflow) -> None:
    """Raise UnsupportedModel where a gradient would pass what PyTorch detaches, and the graph forgot it."""
    makers = {name: node for node in ready.model.graph.node for name in node.output}
    for name, readers in ready.exported.lost_detached.items():
        for reader in readers:
            if reader in makers and flow.active.intersection(makers[reader].input):
                raise UnsupportedModel(
                    f"the module stops the gradient at {name!r}, which the exporter's optimiser removed",
                    at=f"node {makers[reader].name!r} ({makers[reader].op_type})",
                    fix="export with optimize=False: detached tensors then stay, and stop gradients",
                )


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
