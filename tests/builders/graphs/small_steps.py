"""Small graphs, taken through the passes one by one."""

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import Synchronisation
from partc.passes.analysis import find_stored
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.aggregate_partials import aggregate_partials
from partc.passes.layouts.configuration import Configuration, data_parallel
from partc.passes.layouts.laid_out_graph import LaidOutGraph, Synchronised
from partc.passes.layouts.propagate_layouts import propagate_layouts
from partc.passes.lowering.lower import lower
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.roles.find_roles import find_roles
from partc.passes.roles.find_zeros import find_zeros
from tests.builders.graphs.foreign_steps import parse, with_zeros


def training_of(
    text: str, split: Mapping[str, int | None], gradients: Mapping[str, GradientTensors] | None = None
) -> TrainingGraph:
    """Import a step whose variables are the inputs X that have an output X_next.

    `split`: data input -> its sample axis.
    """
    model = parse(text)
    outputs = {info.name for info in model.graph.output}
    state = {i.name: f"{i.name}_next" for i in model.graph.input if f"{i.name}_next" in outputs}
    recorded = dict(gradients or {name: GradientTensors(dense=f"d{name}") for name in state})
    write_bindings(model, Bindings(state=state, gradients=recorded, sample_axes=dict(split)))
    return import_training_graph(with_zeros(model, *state))


def lay_out(
    text: str,
    split: Mapping[str, int | None],
    ranks: int = 2,
    methods: Mapping[str, str] | None = None,
    gradients: Mapping[str, GradientTensors] | None = None,
    configuration: Configuration | None = None,
) -> LaidOutGraph:
    """Give every tensor of a step a layout, under the global reading."""
    training = training_of(text, split, gradients)
    facts = infer_facts(training, {}, ranks)
    chosen = dict.fromkeys(training.gradients, "all_reduce") | dict(methods or {})
    synchronisations = {name: Synchronisation(method) for name, method in chosen.items()}  # type: ignore[arg-type]
    owner = {name: name for name, method in chosen.items() if method == "servers"}
    graph = LaidOutGraph(
        training,
        facts,
        find_zeros(training.graph, facts),
        configuration or data_parallel(ranks),
        Synchronised(synchronisations, owner),
        find_roles(training).main,
        find_stored(training),
    )
    propagate_layouts(graph, per_replica=False)
    return graph


def lowered_of(
    text: str, split: Mapping[str, int | None], ranks: int = 2, methods: Mapping[str, str] | None = None
) -> LoweredGraph:
    """Distribute a step: layouts, aggregation, lowering."""
    graph = lay_out(text, split, ranks, methods)
    aggregate_partials(graph)
    return lower(graph)


def lines(graph: LoweredGraph) -> list[str]:
    """Write a lowered graph down, one node a line."""
    return [line_of(node) for node in graph.nodes]


def line_of(node: gs.Node) -> str:
    """Write a node down as ONNX text does, attributes left out."""
    results = ", ".join(tensor.name for tensor in node.outputs)
    operands = ", ".join(tensor.name for tensor in node.inputs)
    return f"{results} = {node.op} ({operands})"
