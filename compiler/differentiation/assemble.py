"""Put a training graph together: inputs, initial values, live nodes, outputs, and what is known of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, external_data_helper, helper

from partc.compiler.differentiation.forward.bring_forward import OPSET
from partc.compiler.differentiation.forward.expand_ops import reads_of
from partc.compiler.differentiation.forward.initial_values import InitialValue, initial_values, initialization
from partc.compiler.differentiation.forward.reinit import fresh_values, statistics
from partc.compiler.differentiation.objective import Objective
from partc.compiler.differentiation.parameters import find_parameters as find
from partc.compiler.differentiation.tensor_types import TensorType, static_shape, value_info
from partc.compiler.differentiation.updates.update_builder import LEARNING_RATE, Updates, learning_rate_input
from partc.passes.graph.training_graph import IR_VERSION, Gradient
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN
from partc.runtime.plan.variables import Constant

TRAINING_KEY = "partc.training"


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One training step: what the forward graph gave, and what was built onto it."""

    objective: Objective
    updates: Updates
    gradients: Sequence[Gradient]
    initial: Mapping[str, InitialValue]  # of every variable
    constants: Mapping[str, TensorProto]

    @property
    def types(self) -> dict[str, TensorType]:
        """Return the known types: the forward graph's, the variables' and those of function calls."""
        types = {**self.objective.types, **self.updates.build.declared}
        types |= {slot.name: slot.type_ for slot in self.updates.slots}
        return types | {following: types[name] for name, following in self.updates.next_values.items()}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the loss, the forward outputs and the variables' next values."""
        return (self.objective.loss, *self.objective.results, *self.updates.next_values.values())


def finish_step(
    objective: Objective, updates: Updates, gradients: Sequence[Gradient], reinit: int | None
) -> TrainingStep:
    """Settle the initial values: the forward graph's, or fresh ones whose seeds count from `reinit`."""
    graph, types = objective.model.graph, objective.types
    names = tuple(dict.fromkeys((*objective.flow.parameters, *objective.state)))
    initial = initial_values(graph, types, names)
    constants = {tensor.name: tensor for tensor in (*graph.initializer, *updates.build.constants)}
    if reinit is not None:
        random = {*objective.flow.parameters, *statistics(graph)}
        # A scale without axes starts where the model says: there is no spread to draw it from.
        randomized = [name for name in names if name in random and types[name].shape != ()]
        initial |= fresh_values(graph, types, randomized, reinit)
        constants |= _fresh_statistics(objective, names, reinit)
    initial |= {slot.name: slot.initial_value for slot in updates.slots}
    return TrainingStep(objective, updates, gradients, initial, constants)


def _fresh_statistics(objective: Objective, variables: Sequence[str], seed: int) -> dict[str, TensorProto]:
    """Return new constants for running statistics that nothing trains."""
    graph, types = objective.model.graph, objective.types
    names = [name for name in statistics(graph) if name not in variables]
    tensors = {}
    for name, value in fresh_values(graph, types, names, seed).items():
        assert isinstance(value, Constant)
        (count,) = static_shape(types, name, needed_by=f"drawing {name!r} anew")
        tensors[name] = helper.make_tensor(name, types[name].element, [count], [value.value] * count)
    return tensors


# ---------------------------------------------------------------- the model


def assemble(step: TrainingStep, folder: Path | None) -> onnx.ModelProto:
    """Return the flat training graph. External data of `folder` is read into it."""
    nodes = _live_nodes(step)
    called = {node.op_type for node in nodes if node.domain == FUNCTION_DOMAIN}
    functions = [step.updates.build.functions[name] for name in sorted(called)]
    opsets = [helper.make_opsetid("", OPSET)] + (
        [helper.make_opsetid(FUNCTION_DOMAIN, 1)] if functions else []
    )
    model = helper.make_model(
        _graph(step, nodes, folder),
        opset_imports=opsets,
        functions=functions,
        ir_version=IR_VERSION,
        producer_name="partc",
    )
    training = initialization(step.initial, step.types)
    if training.initialization_binding:
        model.training_info.append(training)
    helper.set_model_props(model, {TRAINING_KEY: json.dumps(_facts(step))})
    return model


def _graph(step: TrainingStep, nodes: Sequence[onnx.NodeProto], folder: Path | None) -> onnx.GraphProto:
    types, forward = step.types, step.objective.model.graph
    inputs = find.data_inputs(forward)
    if step.updates.feeds_learning_rate:
        inputs.append(learning_rate_input())
    inputs += [value_info(name, types[name]) for name in step.initial]
    node_outputs = {name for node in nodes for name in node.output} & types.keys() - {*step.outputs}
    return helper.make_graph(
        nodes,
        f"{forward.name or 'model'}_step",
        inputs,
        [value_info(name, types[name]) for name in step.outputs],
        _initializers(step, nodes, folder),
        value_info=[
            value_info(name, types[name]) for name in sorted(node_outputs) if types[name].shape is not None
        ],
    )


def _live_nodes(step: TrainingStep) -> list[onnx.NodeProto]:
    """Drop nodes that no output needs, and those whose output is now a variable or a constant."""
    replaced = {*step.initial, *step.constants}
    needed = set(step.outputs)
    live = []
    for node in reversed(step.updates.build.nodes):
        if needed.intersection(node.output) and not replaced.intersection(node.output):
            live.append(node)
            needed |= reads_of(node)
    return live[::-1]


def _initializers(
    step: TrainingStep, nodes: Sequence[onnx.NodeProto], folder: Path | None
) -> list[TensorProto]:
    """Return the stored initial values, and the constants that somebody reads."""
    reads = set(step.outputs).union(*map(reads_of, nodes))
    tensors = [value for value in step.initial.values() if isinstance(value, TensorProto)]
    tensors += [t for name, t in step.constants.items() if name in reads and name not in step.initial]
    for tensor in tensors:
        if folder is not None and external_data_helper.uses_external_data(tensor):
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    return tensors


def _facts(step: TrainingStep) -> dict[str, object]:
    """Return the metadata entry `partc.training`."""
    sample_axes = dict(step.objective.sample_axes)
    if step.updates.feeds_learning_rate:
        sample_axes[LEARNING_RATE] = None
    return {
        "state": step.updates.next_values,
        "loss": step.objective.loss,
        "gradients": {gradient.parameter: _gradient_facts(gradient) for gradient in step.gradients},
        "sample_axes": sample_axes,
        "forward_outputs": step.objective.results,
    }


def _gradient_facts(gradient: Gradient) -> dict[str, str | None]:
    if gradient.is_sparse:
        return {"ids": gradient.ids, "rows": gradient.rows}
    return {"dense": gradient.dense}
