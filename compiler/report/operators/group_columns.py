"""The columns of groups, variables and segments, and the drawings."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np

from partc.compiler.compilation import Compilation
from partc.compiler.report.choices.describe_variables import priced_as_kept
from partc.compiler.report.describe_program import SegmentRow
from partc.compiler.report.methods import NAMES
from partc.compiler.report.operators.alternatives import Alternative, Alternatives
from partc.compiler.report.operators.columns import Names, flattened
from partc.compiler.report.operators.describe_split import say_dimension
from partc.compiler.report.operators.draw_graph import Drawing, draw_graph
from partc.compiler.report.operators.group_nodes import NodeGroup, NodeGroups
from partc.compiler.report.operators.node_columns import NANOSECONDS, NOWHERE
from partc.compiler.report.operators.trace_nodes import PlanTrace
from partc.compiler.report.packed_json import Interned
from partc.compiler.report.units import count, join_words

ROLES = {"parameter": "parameter", "slot": "optimizer state", "other": "other state"}

Considered = tuple[tuple[str, int, float, float, float, bool], ...]


def group_columns(groups: NodeGroups, names: Names, alternatives: Alternatives) -> dict[str, object]:
    """Return for each group its operator, its layer, what it may split, and what else it could be."""
    interned = Interned[Considered]()
    each = alternatives.of_groups or ((),) * len(groups.groups)
    considered = [
        interned(_considered(group, each[place] if group.operator is not None else ()))
        for place, group in enumerate(groups.groups)
    ]
    return {
        "head": [NOWHERE if g.operator is None else names.nodes[g.operator.node] for g in groups.groups],
        "layer": [group.layer for group in groups.groups],
        "dimensions": [_dimensions(group) for group in groups.groups],
        "considered": considered,
        "alternatives": interned.items,
        "whyNone": alternatives.why_none,
    }


def _considered(group: NodeGroup, alternatives: Iterable[Alternative]) -> Considered:
    """Return words, devices, nanoseconds of computing and updating, bytes of variables, whether taken."""
    return tuple(
        (
            _say_split(each.split, group),
            each.workers,
            each.computing_s * NANOSECONDS,
            each.updating_s * NANOSECONDS,
            each.memory_bytes,
            each.taken,
        )
        for each in alternatives
    )


def _say_split(split: Iterable[tuple[str, int]], group: NodeGroup) -> str:
    words = [f"{count(parts)} by {_say(name, group)}" for name, parts in split]
    return f"split into {join_words(words)}" if words else "whole"


def _say(dimension: str, group: NodeGroup) -> str:
    assert group.operator is not None, "what is divided is an operator"
    return say_dimension(dimension, group.operator.op, len(group.operator.shape))


def _dimensions(group: NodeGroup) -> str:
    if group.operator is None:
        return ""
    return join_words(
        [f"{_say(name, group)} into {count(most)}" for name, most in group.operator.splits.items()]
    )


def variable_columns(compilation: Compilation, names: Names) -> dict[str, object]:
    """Return for each variable what it is, how it is synchronised, and what each way would take alone."""
    variables = compilation.plan.variables
    priced = priced_as_kept(compilation.plan, compilation.costs.choices)
    choices = {choice.variable: choice for choice in priced}
    training = compilation.training.variables
    own = [choices.get(variable.name) for variable in variables]
    return {
        "name": [variable.name for variable in variables],
        "role": [ROLES[variable.role] for variable in variables],
        "of": [names.others.get(variable.parameter or "", NOWHERE) for variable in variables],
        "shape": [" × ".join(map(count, variable.shape)) or "one number" for variable in variables],
        "type": [variable.dtype for variable in variables],
        "bytes": [prod(variable.shape) * np.dtype(variable.dtype).itemsize for variable in variables],
        "method": [NAMES[variable.method] for variable in variables],
        "times": [
            [] if c is None else [[NAMES[way], time_s * NANOSECONDS] for way, time_s in c.seconds.items()]
            for c in own
        ],
        "reason": ["" if choice is None else choice.reason for choice in own],
        "next": [names.tensors.get(training[variable.name].next, NOWHERE) for variable in variables],
    }


def segment_columns(
    rows: Iterable[SegmentRow], names: Names, trace: PlanTrace, segments: Mapping[str, int]
) -> dict[str, object]:
    """Return for each segment what the page calls it, its file, what one run takes, and its nodes."""
    called = {row.path: row.name for row in rows}
    seconds = dict.fromkeys(segments, 0.0)
    for (site, path), all_s in trace.seconds.items():
        seconds[path] = max(seconds[path], all_s / trace.runs[site, path])
    return {
        "name": [called[path] for path in segments],
        "path": list(segments),
        "time": [round(seconds[path] * NANOSECONDS) for path in segments],
        "nodes": flattened([names.nodes[name] for name in trace.segments[path]] for path in segments),
    }


def drawing_columns(compilation: Compilation, groups: NodeGroups, names: Names) -> dict[str, object]:
    """Return the drawings of layers, of each layer's groups, and of each group's nodes by way."""
    nodes = compilation.training.graph.nodes
    drawn = draw_graph(nodes, groups)
    numbers = [names.nodes[node.name] for node in nodes]
    return {
        "layers": _drawing(drawn.layers),
        "ofLayers": [_drawing(own) for own in drawn.of_layers],
        "ofGroups": [[_drawing(lane, numbers) for lane in lanes] for lanes in drawn.of_groups],
    }


def _drawing(drawing: Drawing, numbers: Sequence[int] | None = None) -> list[object]:
    """Return boxes, their columns, rows and places, the width of a row, and edges one behind the other."""
    boxes = drawing.boxes if numbers is None else [numbers[box] for box in drawing.boxes]
    places = drawing.places
    edges = [end for edge in drawing.edges for end in edge]
    return [boxes, places.columns, places.rows, places.places, places.width, edges]
