"""report.html: the whole plan on one page that needs no network, for someone who has never seen one."""

from functools import cache
from pathlib import Path

import jinja2
import onnx

from partc.compiler.compilation import Compilation
from partc.compiler.report.describe_assumptions import (
    describe_draws,
    describe_inputs,
    describe_sparsity,
    whole_ops,
)
from partc.compiler.report.describe_devices import describe_devices
from partc.compiler.report.describe_headline import describe_headline
from partc.compiler.report.describe_mesh import describe_mesh
from partc.compiler.report.describe_program import describe_listings, describe_segments, segment_names
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
from partc.compiler.report.operators.describe_graph import describe_graph
from partc.cost.cluster.cluster import Cluster

TEMPLATES = Path(__file__).parent / "templates"


def render_report(compilation: Compilation, cluster: Cluster, folder: Path) -> str:
    """Return the page. `folder` holds the plan's model and segments; equal plans give equal pages."""
    plan, costs = compilation.plan, compilation.costs
    facts = {fact.name: fact for fact in compilation.facts}
    segments = describe_segments(plan, folder)
    names = segment_names(plan)
    return (
        _environment()
        .get_template("report.html")
        .render(
            headline=describe_headline(compilation, cluster, _model_name(folder / plan.model)),
            mesh=describe_mesh(compilation),
            operators=draw_operators(compilation),
            graph=describe_graph(compilation, cluster, folder),
            explanations=EXPLANATIONS,
            keys=MESH_KEYS if compilation.strategy.has_meshes else KEYS,
            examples=worked_examples(costs, facts, cluster),
            candidates=candidates(costs, compilation.compared, compilation.timeline.step_s),
            sensitivity=describe_sensitivity(compilation.sensitivity),
            solution=describe_solution(costs.solution),
            cluster=draw_cluster(plan, cluster),
            devices=describe_devices(compilation.memory, compilation.timeline, plan),
            timelines=draw_timelines(compilation.timeline, plan, names),
            longest=list_longest(compilation.timeline, names),
            variables=describe_variables(plan, costs.choices, facts),
            assignment=describe_servers(costs.assignment),
            inputs=describe_inputs(plan),
            draws=describe_draws(plan),
            sparsity=describe_sparsity(compilation.sparsity, compilation.facts),
            sizes=sorted(plan.sizes.items()),
            batch=plan.batch,
            departures=plan.departures,
            whole_ops=whole_ops(compilation.lowered),
            segments=segments,
            listings=describe_listings(plan, segments),
        )
    )


@cache  # with the templates that it has compiled
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _model_name(path: Path) -> str:
    """Return the graph's name, or the file's where it has none."""
    try:
        return onnx.load(path, load_external_data=False).graph.name or path.stem
    except OSError:
        return path.stem
