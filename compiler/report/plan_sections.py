"""What each section's template is given."""

from collections.abc import Mapping

from partc.compiler.report.describe_assumptions import (
    describe_draws,
    describe_inputs,
    describe_sparsity,
    whole_ops,
)
from partc.compiler.report.describe_devices import describe_devices
from partc.compiler.report.describe_mesh import describe_mesh
from partc.compiler.report.describe_program import describe_listings, describe_segments
from partc.compiler.report.describe_servers import describe_servers
from partc.compiler.report.describe_variables import describe_variables
from partc.compiler.report.draw_cluster import draw_cluster
from partc.compiler.report.draw_operators import draw_operators
from partc.compiler.report.draw_timeline import draw_timelines, list_longest
from partc.compiler.report.explain_choices import (
    candidates,
    describe_sensitivity,
    describe_solution,
    worked_examples,
)
from partc.compiler.report.methods import EXPLANATIONS, KEYS, MESH_KEYS
from partc.compiler.report.section import ReportSource

Values = Mapping[str, object]


def why_section(source: ReportSource) -> Values | None:
    """Explain the ways of synchronisation; None where meshes decide."""
    if source.compilation.strategy.has_meshes:
        return None
    examples = worked_examples(source.compilation.costs, source.facts, source.cluster)
    return {"explanations": EXPLANATIONS, "examples": examples, "mesh": None, **_compared(source)}


def mesh_section(source: ReportSource) -> Values | None:
    """Describe the workers' mesh; None where every worker is a replica."""
    mesh = describe_mesh(source.compilation)
    return None if mesh is None else {"mesh": mesh, **_compared(source)}


def _compared(source: ReportSource) -> Values:
    costs, compilation = source.compilation.costs, source.compilation
    return {
        "candidates": candidates(costs, compilation.compared, compilation.timeline.step_s),
        "sensitivity": describe_sensitivity(compilation.sensitivity),
        "solution": describe_solution(costs.solution),
    }


def operators_section(source: ReportSource) -> Values | None:
    """Draw who computes what; None where all divide samples alone."""
    pictures = draw_operators(source.compilation)
    return None if pictures is None else {"operators": pictures}


def cluster_section(source: ReportSource) -> Values:
    """Draw the cluster."""
    return {
        "cluster": draw_cluster(source.compilation.plan, source.cluster),
        "assignment": source.compilation.costs.assignment,
    }


def timeline_section(source: ReportSource) -> Values:
    """Draw the predicted step."""
    compilation, names = source.compilation, dict(source.segment_names)
    return {
        "timelines": draw_timelines(compilation.timeline, compilation.plan, names),
        "longest": list_longest(compilation.timeline, names),
        "keys": MESH_KEYS if compilation.strategy.has_meshes else KEYS,
    }


def devices_section(source: ReportSource) -> Values:
    """Tell memory and traffic of ranks."""
    compilation = source.compilation
    return {"devices": describe_devices(compilation.memory, compilation.timeline, compilation.plan)}


def servers_section(source: ReportSource) -> Values:
    """Tell what servers own."""
    return {"assignment": describe_servers(source.compilation.costs.assignment)}


def variables_section(source: ReportSource) -> Values:
    """List all variables."""
    compilation = source.compilation
    return {"variables": describe_variables(compilation.plan, compilation.costs.choices, source.facts)}


def assumptions_section(source: ReportSource) -> Values:
    """List inputs, and what is taken for granted."""
    compilation, plan = source.compilation, source.compilation.plan
    return {
        "inputs": describe_inputs(plan),
        "draws": describe_draws(plan),
        "sparsity": describe_sparsity(compilation.sparsity, compilation.facts),
        "has_sparse": any(fact.sparse for fact in compilation.facts),
        "sizes": sorted(plan.sizes.items()),
        "batch": plan.batch,
        "departures": plan.departures,
        "whole_ops": whole_ops(compilation.lowered),
    }


def program_section(source: ReportSource) -> Values:
    """List segments and instructions."""
    plan = source.compilation.plan
    segments = describe_segments(plan, source.folder)
    return {"segments": segments, "listings": describe_listings(plan, segments)}
