"""Find the gradients of a training graph that records none, from its structure alone.

    x, W ── MatMul ── ... ── loss                                  forward: ancestors of the loss
             └─ ... ── MatMul ── dW ── Mul ── Sub ── W_next        update: keeps W's size, element by element
                       (stop)    T

From a variable's next value the walk goes back through ops that work element by element and through
mere views, as long as tensors have the variable's number of elements. Where it has to stop, the
samples have just been summed: a *stop*. The gradient T is the first tensor, shaped like the
variable, that all stops pass through on their way to the next value, and behind which nothing
depends on the data but through stops (a clip's norm does, a label count does not).

A variable has a gradient if the loss depends on it, its next value keeps it as a term, and a stop
is no ancestor of the loss: a state carried from step to step and a moving average of data have none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.reachability import ancestors, descendants, drop_unread_nodes
from partc.passes.graph.training_graph import Gradient, TrainingGraph, Variable
from partc.passes.roles.find_indexed_slices import find_indexed_slices
from partc.passes.rules.sharding_rules import NONLINEAR
from partc.runtime.errors import UnsupportedModel

REARRANGING = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
LINEAR_OPS = REARRANGING | {"Cast", "CastLike", "Add", "Sub", "Neg", "Sum", "Mul", "Div"}
# Ops of which an element is made from one element of each operand of the result's size.
ONE_TO_ONE = LINEAR_OPS | NONLINEAR | {"Clip", "Max", "Mean", "Min", "Where"}


class _NoGradientError(Exception):
    """Why a parameter's gradient is not found."""


@dataclass
class _Walk:
    """What lies between a variable's next value and the stops."""

    variable: Variable
    nodes: list[gs.Node] = field(default_factory=list)  # of the update, next value first
    stops: dict[str, gs.Tensor] = field(default_factory=dict)
    keeps_itself: bool = False


@dataclass(frozen=True)
class _Facts:
    forward: frozenset[str]  # ancestors of the loss
    sampled: frozenset[str]  # what depends on the samples
    order: dict[str, int]  # position of each node


def find_gradients(training: TrainingGraph) -> dict[str, Gradient]:
    """Find every parameter's gradient, record them in `training`, and return them.

    Scatters of rows into zeros are rewritten to one ScatterND of ids int64[n] and rows [n, ...].
    Does nothing where gradients are recorded. Why one cannot be found is recorded too: where a batch is
    divided none is needed. Raises UnsupportedModel where the loss is not known.
    """
    if training.gradients:
        return training.gradients
    facts = _facts(training)
    tensors = training.graph.tensors()
    walks = [_walk(variable, tensors, facts) for variable in training.variables.values()]
    parameters = [walk for walk in walks if _is_parameter(walk, facts)]
    stops = frozenset(name for walk in parameters for name in walk.stops)
    reached = descendants(training.graph, _samples(training), cut=stops)
    dirty = reached - stops
    for walk in parameters:
        walk.stops = _first_stops(walk, reached, training)
    for walk in parameters:
        try:
            dense = _past_views(_gradient_of(walk, dirty, facts))
        except _NoGradientError as error:
            training.unfound_gradients[walk.variable.name] = str(error)
            continue
        slices = find_indexed_slices(training.graph, dense, walk.variable)
        ids, rows = slices or (None, None)
        training.gradients[walk.variable.name] = Gradient(walk.variable.name, dense.name, ids, rows)
    training.are_gradients_found = True
    training.graph.toposort()
    drop_unread_nodes(training.graph)
    return training.gradients


def _facts(training: TrainingGraph) -> _Facts:
    if training.loss is None:
        raise UnsupportedModel(
            "gradients can be found only where the loss is known",
            at="loss",
            fix='name it with "loss" in the sidecar JSON, or record the gradients there',
        )
    return _Facts(
        frozenset(ancestors(training.graph, [training.loss])),
        frozenset(descendants(training.graph, _samples(training))),
        {node.name: index for index, node in enumerate(training.graph.nodes)},
    )


def _samples(training: TrainingGraph) -> list[str]:
    """Return the inputs that differ between replicas, or all data inputs if none does."""
    return training.varying_inputs() or list(training.data_inputs)


# ---------------------------------------------------------------- the walk


def _walk(variable: Variable, tensors: dict[str, gs.Tensor], facts: _Facts) -> _Walk:
    walk = _Walk(variable)
    elements = int(np.prod(variable.shape, dtype=np.int64))
    waiting, seen = [tensors[variable.next]], {variable.next}
    while waiting:
        tensor = waiting.pop()
        walk.keeps_itself |= tensor.name == variable.name
        if not tensor.inputs:
            continue
        is_sampled = tensor.name in facts.sampled
        if is_sampled and tensor.name in facts.forward:
            continue
        node = tensor.inputs[0]
        carriers = [read for read in node.inputs if _elements(read) == elements]
        if node.op in ONE_TO_ONE and carriers:
            walk.nodes.append(node)
            waiting += [read for read in carriers if read.name not in seen]
            seen.update(read.name for read in carriers)
        elif is_sampled:
            walk.stops[tensor.name] = tensor
    return walk


def _elements(tensor: gs.Tensor) -> int | None:
    if tensor.shape is None or not all(isinstance(size, int) for size in tensor.shape):
        return None
    return int(np.prod(tensor.shape, dtype=np.int64))


def _is_parameter(walk: _Walk, facts: _Facts) -> bool:
    return walk.keeps_itself and bool(walk.stops) and walk.variable.name in facts.forward


def _first_stops(walk: _Walk, reached: set[str], training: TrainingGraph) -> dict[str, gs.Tensor]:
    """Return the stops without those that depend on the samples through the others: no sums over samples.

    Such is Adafactor's second moment, the product of its rows and columns. `reached`: from the samples, not
    looking beyond any parameter's stops.
    """
    first = walk.stops.keys() & reached
    if len(first) == len(walk.stops):
        return walk.stops
    behind = descendants(training.graph, first)
    return {name: tensor for name, tensor in walk.stops.items() if name in first or name not in behind}


# ---------------------------------------------------------------- the gradient


def _gradient_of(walk: _Walk, dirty: set[str], facts: _Facts) -> gs.Tensor:
    """Return the first tensor, shaped like the variable, that all sums over samples pass through."""
    nodes = sorted(walk.nodes, key=lambda node: facts.order[node.name])
    candidates = [*walk.stops.values(), *(node.outputs[0] for node in nodes)]
    for tensor in candidates:
        if _is_like(tensor, walk.variable) and _separates(tensor, nodes, walk, dirty):
            _check_linear(tensor, nodes, walk)
            return tensor
    raise _NoGradientError("its next value depends on the samples in more than one way")


def _is_like(tensor: gs.Tensor, variable: Variable) -> bool:
    return tuple(tensor.shape or ()) == variable.shape and tensor.dtype == variable.dtype


def _past_views(gradient: gs.Tensor) -> gs.Tensor:
    """Return the gradient behind the views that lead back to its shape: a transpose and another.

    The update is then left without them, and works row by row.
    """
    tensor = latest = gradient
    while len(tensor.outputs) == 1 and tensor.outputs[0].op in REARRANGING:
        tensor = tensor.outputs[0].outputs[0]
        if tensor.shape is not None and list(tensor.shape) == list(gradient.shape):
            latest = tensor
    return latest


def _separates(tensor: gs.Tensor, nodes: list[gs.Node], walk: _Walk, dirty: set[str]) -> bool:
    """Tell whether the next value depends on the samples through `tensor` and clean tensors only."""
    produced = {node.outputs[0].name for node in nodes}
    reached = set(walk.stops) - {tensor.name}
    for node in nodes:
        result = node.outputs[0].name
        if result == tensor.name:
            continue
        spoiled = any(read.name in dirty and read.name not in produced for read in node.inputs)
        if spoiled or any(read.name in reached for read in node.inputs):
            reached.add(result)
    return walk.variable.next not in reached


def _check_linear(tensor: gs.Tensor, nodes: list[gs.Node], walk: _Walk) -> None:
    """Raise if what lies between the stops and the gradient would not commute with a sum."""
    before = set(walk.stops)
    for node in nodes:
        if tensor.name in before:
            return
        carried = [read for read in node.inputs if read.name in before]
        if not carried:
            continue
        product = node.op in ("Mul", "Div") and len(carried) > 1
        if node.op not in LINEAR_OPS or product or (node.op == "Div" and node.inputs[1].name in before):
            raise _NoGradientError(f"node {node.name!r} ({node.op}) is not linear in it")
        before.add(node.outputs[0].name)


def refuse_unfound(training: TrainingGraph, of: Iterable[str]) -> None:
    """Refuse the first of these parameters whose gradient was not found. Raises UnsupportedModel."""
    for name in of:
        if name not in training.unfound_gradients:
            continue
        raise UnsupportedModel(
            f"the gradient of {name!r} cannot be found: {training.unfound_gradients[name]}",
            at=f"next value {training.variables[name].next!r}",
            fix="give --batch global, which needs none (not with asynchronous training), or record it in the "
            f'sidecar JSON: "gradients": {{"{name}": {{"dense": TENSOR}}}}',
        )
