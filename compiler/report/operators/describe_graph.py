"""Everything that the page knows of the user's nodes and variables, as columns that its script looks into."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from markupsafe import Markup

from partc.compiler.report.device_colours import colour_devices
from partc.compiler.report.operators.alternatives import Alternatives
from partc.compiler.report.operators.columns import number_names, shortened
from partc.compiler.report.operators.find_alternatives import find_alternatives
from partc.compiler.report.operators.find_subjects import SubjectFinder
from partc.compiler.report.operators.group_columns import (
    drawing_columns,
    group_columns,
    segment_columns,
    variable_columns,
)
from partc.compiler.report.operators.group_nodes import group_nodes
from partc.compiler.report.operators.node_columns import NANOSECONDS, node_columns
from partc.compiler.report.operators.tell_ranks import tell_ranks
from partc.compiler.report.operators.trace_nodes import trace_nodes
from partc.compiler.report.packed_json import script_json
from partc.compiler.report.section import ReportSource
from partc.runtime.plan.program import Plan


@dataclass(frozen=True, slots=True)
class GraphDescription:
    """What the template needs: how many there are of what, and the data of the script.

    why_no_prices   of what else operators could be; empty where they are priced
    """

    nodes: int
    variables: int
    layers: int
    why_no_prices: str
    data: Markup


def graph_section(source: ReportSource) -> Mapping[str, object]:
    """Return the user's graph with all that was decided."""
    plan = source.compilation.plan
    alternatives = find_alternatives(source.compilation)
    data = graph_columns(source, alternatives)
    nodes, layers = data["users"], data["layers"]
    assert isinstance(nodes, int) and isinstance(layers, list)
    return {
        "graph": GraphDescription(
            nodes,
            len(plan.variables),
            len(layers),
            alternatives.why_none,
            script_json(shortened(data)),
        )
    }


def graph_columns(source: ReportSource, alternatives: Alternatives) -> dict[str, object]:
    """Return all columns by name. Times are in nanoseconds, of one step on one rank; bytes likewise."""
    compilation, folder = source.compilation, source.folder
    plan = compilation.plan
    names = number_names(compilation, onnx.load(folder / plan.model, load_external_data=False))
    groups = group_nodes(compilation)
    trace = trace_nodes(compilation, source.cluster, folder)
    segments = {path: number for number, path in enumerate(trace.segments)}
    subjects = SubjectFinder(plan, compilation.lowered, compilation.training, trace.helped)
    ranks = tell_ranks(plan, names, segments, subjects, source.words)
    return {
        "step": compilation.timeline.step_s * NANOSECONDS,
        "users": names.users,
        "nodes": node_columns(compilation, names, groups, trace, segments),
        "groups": group_columns(groups, names, alternatives),
        "layers": list(groups.layers),
        "variables": variable_columns(compilation, names),
        "inputs": [entry.name for entry in plan.data_inputs],
        "segments": segment_columns(source.segments, names, trace, segments),
        "drawings": drawing_columns(compilation, groups, names),
        "ranks": {**ranks.ranks, **_colours(plan)},
        "instructions": ranks.instructions,
        "messages": ranks.messages,
    }


def _colours(plan: Plan) -> dict[str, list[str]]:
    """Return the colour of every rank that works on a replica, and that of text on it; none for servers."""
    colours = iter(colour_devices([rank.host for rank in plan.ranks if rank.replica is not None]))
    of_rank = [next(colours) if rank.replica is not None else None for rank in plan.ranks]
    return {
        "fill": ["" if colour is None else colour.fill for colour in of_rank],
        "ink": ["" if colour is None else colour.ink for colour in of_rank],
    }
