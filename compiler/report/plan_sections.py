"""What each section's template is given."""

from collections.abc import Mapping

from partc.compiler.comparison.what_if_rows import what_if_tables
from partc.compiler.report.choices.describe_mesh import describe_mesh
from partc.compiler.report.choices.describe_variables import (
    describe_variables,
    group_reasons,
    priced_as_kept,
)
from partc.compiler.report.choices.explain_choices import (
    candidates,
    describe_sensitivity,
    describe_solution,
    worked_examples,
)
from partc.compiler.report.cluster.describe_devices import describe_devices
from partc.compiler.report.cluster.describe_links import describe_links, loads_of
from partc.compiler.report.cluster.describe_servers import describe_servers
from partc.compiler.report.cluster.draw_cluster import draw_cluster
from partc.compiler.report.describe_assumptions import (
    describe_draws,
    describe_inputs,
    describe_sparsity,
    whole_ops,
)
from partc.compiler.report.describe_program import describe_listings, group_segments
from partc.compiler.report.draw_operators import draw_operators
from partc.compiler.report.methods import EXPLANATIONS
from partc.compiler.report.section import ReportSource
from partc.compiler.report.timeline.bar_events import list_longest
from partc.compiler.report.timeline.draw_timeline import draw_timeline
from partc.runtime.data.batches import fixed_sizes
from partc.runtime.plan.program import Plan

SectionValues = Mapping[str, object]


def why_section(source: ReportSource) -> SectionValues | None:
    """Explain the ways of synchronisation; None where meshes decide."""
    if source.compilation.strategy.has_meshes:
        return None
    if source.compilation.plan.asynchronous:  # other ways need a step of all workers: no price is one of them
        servers = [explanation for explanation in EXPLANATIONS if explanation.method == "servers"]
        return {"asynchronous": True, "explanations": servers, "examples": (), "candidates": ()}
    examples = worked_examples(source.compilation.costs, source.facts, source.cluster)
    own = {"asynchronous": False, "explanations": EXPLANATIONS, "examples": examples, "mesh": None}
    return {**own, **_compared(source)}


def mesh_section(source: ReportSource) -> SectionValues | None:
    """Describe the workers' mesh; None where every worker is a replica."""
    mesh = describe_mesh(source.compilation)
    return None if mesh is None else {"mesh": mesh, **_compared(source)}


def _compared(source: ReportSource) -> SectionValues:
    costs, compilation = source.compilation.costs, source.compilation
    return {
        "candidates": candidates(costs, compilation.compared, compilation.timeline.step_s),
        "sensitivity": describe_sensitivity(compilation.sensitivity),
        "solution": describe_solution(costs.solution),
    }


def operators_section(source: ReportSource) -> SectionValues | None:
    """Draw who computes what; None where all divide samples alone."""
    pictures = draw_operators(source.compilation)
    return None if pictures is None else {"operators": pictures}


def cluster_section(source: ReportSource) -> SectionValues:
    """Draw the cluster, and list what its links carry."""
    plan = source.compilation.plan
    loads = loads_of(source.traffic, source.cluster, source.compilation.timeline.step_s)
    links = describe_links(loads)
    return {
        "cluster": draw_cluster(plan, source.cluster, loads, links.anchor_of),
        "links": links,
        "assignment": source.compilation.costs.assignment,
    }


def timeline_section(source: ReportSource) -> SectionValues:
    """Draw the predicted step."""
    timeline = source.compilation.timeline
    return {
        "timeline": draw_timeline(timeline, source.compilation.plan, source.words),
        "longest": list_longest(timeline, source.words),
    }


def devices_section(source: ReportSource) -> SectionValues:
    """Tell memory and traffic of ranks."""
    compilation = source.compilation
    return {"devices": describe_devices(compilation.memory, compilation.timeline, compilation.plan)}


def servers_section(source: ReportSource) -> SectionValues | None:
    """Tell what servers own; None where they own nothing."""
    assignment = describe_servers(source.compilation.costs.assignment)
    return None if assignment is None else {"assignment": assignment}


def variables_section(source: ReportSource) -> SectionValues:
    """List all variables."""
    compilation = source.compilation
    choices = compilation.costs.choices
    rows = describe_variables(compilation.plan, choices, source.facts)
    return {
        "variables": rows,
        "has_prices": any(row.times for row in rows),
        "reasons": group_reasons(priced_as_kept(compilation.plan, choices)),
        "unpriced": _why_unpriced(compilation.plan),
    }


def _why_unpriced(plan: Plan) -> str:
    """Say how parameters are exchanged whose ways have no prices."""
    if plan.asynchronous:
        return "pulled and pushed by each worker by itself"
    return "no replicas to exchange it with" if plan.replicas == 1 else "exchanged as its mesh says"


def assumptions_section(source: ReportSource) -> SectionValues:
    """List inputs, and what is taken for granted."""
    compilation, plan = source.compilation, source.compilation.plan
    return {
        "inputs": describe_inputs(plan),
        "draws": describe_draws(plan),
        "sparsity": describe_sparsity(compilation.sparsity, compilation.facts),
        "has_sparse": any(fact.sparse for fact in compilation.facts),
        "sizes": sorted(plan.sizes.items()),
        "are_fixed": bool(fixed_sizes(plan)),
        "batch": plan.batch,
        "asynchronous": bool(plan.asynchronous),
        "departures": plan.departures,
        "whole_ops": whole_ops(compilation.lowered),
    }


def program_section(source: ReportSource) -> SectionValues:
    """List segments and instructions."""
    listings = describe_listings(source.compilation.plan, source.segments, source.words)
    return {"groups": group_segments(source.segments), "files": len(source.segments), "listings": listings}


def what_if_section(source: ReportSource) -> Mapping[str, object] | None:
    """Tell what was priced; None where nobody asked."""
    what_if = source.compilation.what_if
    return None if what_if is None else {"tables": what_if_tables(what_if)}
