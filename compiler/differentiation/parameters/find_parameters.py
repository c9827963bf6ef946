"""Find the parameters of a forward graph: its float tensors that come from no input and move the loss."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec
import onnx

from partc.compiler.differentiation.forward.expand_ops import reads_of, reads_of_subgraphs
from partc.compiler.differentiation.rules.table import CONSTANT_INPUTS, FLAT_OPS, MOVED_BY_CONSTANTS
from partc.compiler.differentiation.tensor_types import Types
from partc.runtime.errors import BadModel, UnsupportedModel
from partc.runtime.plan.plan_json import NOT_DECODED

FORWARD_KEY = "partc.forward"
MAKERS = frozenset(
    {"ConstantOfShape", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


class ForwardFacts(msgspec.Struct, frozen=True):
    """What a forward model's metadata says about itself (models/graph_builder.py writes it)."""

    parameters: tuple[str, ...] | None = None
    state: dict[str, str] = {}
    sample_axes: dict[str, int | None] = {}


def forward_facts(model: onnx.ModelProto) -> ForwardFacts:
    """Read the metadata entry `partc.forward`. Raises BadModel."""
    for entry in model.metadata_props:
        if entry.key == FORWARD_KEY:
            try:
                return msgspec.json.decode(entry.value, type=ForwardFacts)
            except NOT_DECODED as error:
                raise BadModel(
                    f"not what partc expects: {error}",
                    at=f"metadata_props {FORWARD_KEY!r}",
                    fix="write the model again, or remove this entry",
                ) from error
    return ForwardFacts()


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Which tensors the loss's gradient reaches, and which parameters make them differ."""

    parameters: tuple[str, ...]  # in the order of the graph
    active: frozenset[str]  # moved by a parameter, and moving the loss


def candidate_parameters(
    graph: onnx.GraphProto, types: Types, reached: Collection[str] = frozenset()
) -> tuple[str, ...]:
    """Return the float tensors that come from no input: initializers, and tensors with axes that nodes make.

    Constant nodes are constants of the model. `reached`: what inputs made before sizes were folded, as a
    first state with the batch's size.
    """
    initializers = [t.name for t in graph.initializer if types[t.name].is_float]
    dependent = reached_by_inputs(graph).union(reached)
    makers = [node for node in graph.node if node.op_type in MAKERS]
    generated = [
        name
        for name in (node.output[0] for node in makers)
        if name not in dependent and types[name].is_float and types[name].shape != ()
    ]
    return (*initializers, *generated)


def reached_by_inputs(graph: onnx.GraphProto) -> frozenset[str]:
    """Return the tensors that data inputs, or their shapes, go into."""
    reached = {value.name for value in data_inputs(graph)}
    for node in graph.node:
        if reached & reads_of(node):
            reached.update(node.output)
    return frozenset(reached)


def read_as_constants(graph: onnx.GraphProto) -> frozenset[str]:
    """Return the tensors that are read as statistics, weights of a loss, or angles alone."""
    constants: dict[str, bool] = {}
    for node in graph.node:
        positions = CONSTANT_INPUTS.get(node.op_type, frozenset())
        for index, name in enumerate(node.input):
            constants[name] = index in positions and constants.get(name, True)
    return frozenset(name for name, is_constant in constants.items() if is_constant)


def differentiable_inputs(node: onnx.NodeProto, types: Types) -> tuple[int, ...]:
    """Return the positions of the inputs that a gradient may flow to."""
    if node.op_type in FLAT_OPS or not any(name in types and types[name].is_float for name in node.output):
        return ()
    constant = CONSTANT_INPUTS.get(node.op_type, frozenset())
    if node.op_type == "BatchNormalization" and not _is_training(node):
        constant = frozenset()  # statistics that are computed are like any other tensor
    return tuple(
        index
        for index, name in enumerate(node.input)
        if name and index not in constant and name in types and types[name].is_float
    )


def moving_the_loss(
    graph: onnx.GraphProto, types: Types, loss: str, detached: Collection[str] = ()
) -> set[str]:
    """Return the tensors that a gradient of the loss may flow to; it ends at those that are detached."""
    dependencies = {loss}
    for node in reversed(graph.node):
        if dependencies.intersection(node.output) and not set(node.output).intersection(detached):
            dependencies.update(node.input[index] for index in differentiable_inputs(node, types))
    return dependencies


def trace(
    graph: onnx.GraphProto,
    types: Types,
    loss: str,
    candidates: Iterable[str],
    detached: Collection[str] = (),
) -> Dataflow:
    """Follow the gradient's possible ways. Raises UnsupportedModel if it reaches no parameter."""
    candidates = tuple(candidates)
    dependents = set(candidates)
    for node in graph.node:
        if any(node.input[index] in dependents for index in differentiable_inputs(node, types)):
            dependents.update(name for name in node.output if name in types and types[name].is_float)
            dependents.difference_update(set(node.output).intersection(detached))
    loss_dependencies = moving_the_loss(graph, types, loss, detached)
    parameters = tuple(name for name in candidates if name in loss_dependencies)
    if not parameters:
        raise UnsupportedModel(
            f"the loss {loss!r} depends on no parameter",
            at="parameters: float initializers with axes, and outputs of nodes that read no input",
            fix="keep weights as initializers rather than Constant nodes, or choose another loss",
        )
    _check_constant_inputs(graph, dependents, loss_dependencies)
    return Dataflow(parameters, frozenset(dependents & loss_dependencies))


def _check_constant_inputs(graph: onnx.GraphProto, dependents: set[str], loss_dependencies: set[str]) -> None:
    """Refuse a bound, weight or angle that parameters move: its gradient would be left out."""
    for node in graph.node:
        if node.op_type not in MOVED_BY_CONSTANTS or not loss_dependencies.intersection(node.output):
            continue
        for index in sorted(CONSTANT_INPUTS[node.op_type]):
            if index < len(node.input) and node.input[index] in dependents:
                raise UnsupportedModel(
                    f"input {index} ({node.input[index]!r}) depends on a parameter; its gradient has no rule",
                    at=f"node {node.name!r} ({node.op_type})",
                    fix="write the op as others, such as Min and Max for Clip, or --freeze the parameter",
                )


def path_from_parameter(
    graph: onnx.GraphProto, types: Types, parameters: Iterable[str], node: onnx.NodeProto
) -> str:
    """Spell the shortest way from a parameter to a node, for an error message."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for reader in graph.node:
        for index in differentiable_inputs(reader, types):
            readers.setdefault(reader.input[index], []).append(reader)
    way: dict[str, str] = {name: repr(name) for name in parameters}
    queue = deque(way)
    while queue:
        tensor = queue.popleft()
        for reader in readers.get(tensor, []):
            if reader.name == node.name:
                return f"{way[tensor]} -> {reader.name}"
            for output in reader.output:
                if output not in way:
                    way[output] = f"{way[tensor]} -> {reader.name}"
                    queue.append(output)
    return repr(node.name)


def tables_of_rows(graph: onnx.GraphProto, parameters: Iterable[str]) -> frozenset[str]:
    """Return the parameters that are read by Gathers along axis 0 alone: their gradients are sparse."""
    tables = set(parameters)
    for node in graph.node:
        tables -= reads_of_subgraphs(node)
        for index, name in enumerate(node.input):
            if name in tables and not (index == 0 and _gathers_rows(node)):
                tables.remove(name)
    return frozenset(tables - {value.name for value in graph.output})


def _gathers_rows(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gather" and all(a.i == 0 for a in node.attribute if a.name == "axis")


def carried_state(graph: onnx.GraphProto, types: Types, facts: ForwardFacts) -> dict[str, str]:
    """Return variables that the forward pass renews: as declared, and running statistics of batches."""
    candidates = set(candidate_parameters(graph, types))
    state = dict(facts.state)
    for node in graph.node:
        if node.op_type != "BatchNormalization" or not _is_training(node):
            continue
        for output, source in zip(node.output[1:3], node.input[3:5], strict=False):
            if output and source in candidates:
                state.setdefault(source, output)
    return state


def _is_training(node: onnx.NodeProto) -> bool:
    return any(a.name == "training_mode" and a.i for a in node.attribute)


def data_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the graph's inputs that have no initializer."""
    initializers = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in initializers]
