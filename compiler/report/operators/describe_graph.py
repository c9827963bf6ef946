"""Everything that the page knows of the user's nodes and variables, as columns that its script looks into."""

from dataclasses import dataclass
from pathlib import Path

import onnx
from markupsafe import Markup

from partc.compiler.compilation import Compilation
from partc.compiler.report.device_colours import colour_devices
from partc.compiler.report.operators.describe_messages import MessageDescriber
from partc.compiler.report.operators.encode_columns import script_json
from partc.compiler.report.operators.group_columns import (
    drawing_columns,
    group_columns,
    segment_columns,
    variable_columns,
)
from partc.compiler.report.operators.group_nodes import group_nodes
from partc.compiler.report.operators.node_columns import NANOSECONDS, node_columns
from partc.compiler.report.operators.number_names import number_names
from partc.compiler.report.operators.price_alternatives import price_alternatives
from partc.compiler.report.operators.tell_ranks import tell_ranks
from partc.compiler.report.operators.trace_nodes import trace_nodes
from partc.cost.cluster.cluster import Cluster
from partc.runtime.plan.program import Plan


@dataclass(frozen=True, slots=True)
class GraphDescription:
    """What the template needs: how many there are of what, and the data of the script."""

    nodes: int
    variables: int
    layers: int
    ranks: int
    data: Markup


def describe_graph(compilation: Compilation, cluster: Cluster, folder: Path) -> GraphDescription:
    """Return the user's graph with all that was decided. `folder` holds the plan's model and segments."""
    plan = compilation.plan
    data = graph_columns(compilation, cluster, folder)
    nodes, layers = data["users"], data["layers"]
    assert isinstance(nodes, int) and isinstance(layers, list)
    return GraphDescription(nodes, len(plan.variables), len(layers), len(plan.ranks), script_json(data))


def graph_columns(compilation: Compilation, cluster: Cluster, folder: Path) -> dict[str, object]:
    """Return all columns by name. Times are in nanoseconds, of one step on one rank; bytes likewise."""
    plan = compilation.plan
    names = number_names(compilation, onnx.load(folder / plan.model, load_external_data=False))
    groups = group_nodes(compilation)
    trace = trace_nodes(compilation, cluster, folder)
    segments = {path: number for number, path in enumerate(trace.segments)}
    messages = MessageDescriber(plan, compilation.lowered, compilation.training, groups, trace.helped)
    ranks = tell_ranks(plan, names, segments, messages)
    return {
        "step": compilation.timeline.step_s * NANOSECONDS,
        "users": names.users,
        "nodes": node_columns(compilation, names, groups, trace, segments),
        "groups": group_columns(groups, names, price_alternatives(compilation)),
        "layers": list(groups.layers),
        "variables": variable_columns(compilation, names),
        "inputs": [entry.name for entry in plan.data_inputs],
        "segments": segment_columns(compilation, names, trace, segments),
        "drawings": drawing_columns(compilation, groups, names),
        "ranks": {**ranks.ranks, **_colours(plan)},
        "instructions": ranks.instructions,
        "messages": ranks.messages,
    }


def _colours(plan: Plan) -> dict[str, list[str]]:
    """Return the colour of every rank that works on a replica, and that of text on it; nothing for servers."""
    colours = iter(colour_devices([rank.host for rank in plan.ranks if rank.replica is not None]))
    found = [next(colours) if rank.replica is not None else None for rank in plan.ranks]
    return {
        "fill": ["" if colour is None else colour.fill for colour in found],
        "ink": ["" if colour is None else colour.ink for colour in found],
    }
