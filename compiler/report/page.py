"""report.html: the whole plan on one page that needs no network, for someone who has never seen one.

To add a section: its entry in SECTIONS, and its template.
"""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path

import jinja2
import onnx
from markupsafe import Markup

from partc.compiler.compilation import Compilation
from partc.compiler.planning.ahead import Ahead, is_worthwhile
from partc.compiler.report.describe_headline import describe_headline
from partc.compiler.report.describe_program import (
    describe_segments,
    instruction_words,
)
from partc.compiler.report.operators.describe_graph import graph_section
from partc.compiler.report.packed_json import script_json
from partc.compiler.report.plan_sections import (
    assumptions_section,
    cluster_section,
    devices_section,
    mesh_section,
    operators_section,
    program_section,
    servers_section,
    timeline_section,
    variables_section,
    what_if_section,
    why_section,
)
from partc.compiler.report.section import ReportSource, Section
from partc.cost.cluster.cluster import Cluster

TEMPLATES = Path(__file__).parent / "templates"

SECTIONS: tuple[Section, ...] = (
    Section("why", "Why", "why.html", why_section),
    Section("why", "Why", "mesh.html", mesh_section),
    Section(
        "graph",
        "Every operator",
        "graph/graph.html",
        graph_section,
        styles=("graph/graph.css",),
        scripts=("unpack.js", "graph/graph.js"),
    ),
    Section("operators", "Operators", "operators.html", operators_section),
    Section("cluster", "Cluster", "cluster.html", cluster_section),
    Section("timeline", "Timeline", "timeline.html", timeline_section, scripts=("unpack.js", "timeline.js")),
    Section(
        "what-if",
        "What if",
        "what_if.html",
        what_if_section,
        styles=("what_if.css",),
        scripts=("what_if.js",),
    ),
    Section("devices", "Devices", "devices.html", devices_section),
    Section("servers", "Servers", "servers.html", servers_section),
    Section("variables", "Variables", "variables.html", variables_section),
    Section("inputs", "Inputs and assumptions", "assumptions.html", assumptions_section),
    Section("program", "Program", "program.html", program_section),
)


def render_report(compilation: Compilation, cluster: Cluster, folder: Path) -> str:
    """Return the page. `folder` holds the plan's model and segments; equal plans give equal pages."""
    segments = describe_segments(compilation.plan, folder)
    words = instruction_words(compilation, segments)
    source = ReportSource(compilation, cluster, folder, segments, words)
    model = _model_name(folder / compilation.plan.model)
    present = [(section, text) for section, text in _texts(source) if text]
    return (
        _environment()
        .get_template("report.html")
        .render(
            headline=describe_headline(compilation, cluster, model, source.traffic),
            sections=[section for section, _ in present],
            bodies=[Markup(text) for _, text in present],
            styles=dict.fromkeys(name for section, _ in present for name in section.styles),
            scripts=dict.fromkeys(name for section, _ in present for name in section.scripts),
        )
    )


def _texts(source: ReportSource) -> list[tuple[Section, str]]:
    """Return the text of every section, nothing where the plan has nothing of the kind.

    That of the graph takes as long as all others, so that a second core does it, where there is one.
    """
    alone = next(section for section in SECTIONS if section.describe is graph_section)
    if not is_worthwhile(len(source.compilation.training.graph.nodes)):
        return [(section, _text(section, source)) for section in SECTIONS]
    with Ahead(partial(_text, alone, source), str) as ahead:
        texts = {section.template: _text(section, source) for section in SECTIONS if section is not alone}
        texts[alone.template] = ahead.result()
    return [(section, texts[section.template]) for section in SECTIONS]


def _text(section: Section, source: ReportSource) -> str:
    values = section.describe(source)
    return "" if values is None else str(render_part(section.template, values))


def render_part(template: str, values: Mapping[str, object]) -> Markup:
    """Return a section's text."""
    return Markup(_environment().get_template(template).render(values))


def has_scripts(page: str, names: Iterable[str]) -> bool:
    """Tell whether a page has scripts of templates/ as they are now."""
    return all((TEMPLATES / name).read_text(encoding="utf-8").strip() in page for name in names)


@cache  # with the templates that it has compiled
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["packed"] = script_json
    environment.globals["parts"] = environment.get_template("parts.html").module
    return environment


def _model_name(path: Path) -> str:
    """Return the graph's name, or the file's where it has none."""
    try:
        return onnx.load(path, load_external_data=False).graph.name or path.stem
    except OSError:
        return path.stem
