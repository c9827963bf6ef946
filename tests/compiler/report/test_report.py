"""The page is read as a reader would: its text and its structure. Its looks: test_report_in_browser.py."""

import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import msgspec
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.compiler.report import units
from partc.compiler.report.choices.describe_variables import FIGURE
from partc.compiler.report.choices.explain_choices import candidates, worked_examples
from partc.compiler.report.cluster.describe_links import StepLoads, loads_of
from partc.compiler.report.cluster.draw_cluster import draw_cluster
from partc.compiler.report.measure_traffic import host_traffic, step_traffic
from partc.compiler.report.page import render_report
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Link
from partc.models.catalogue import build_model
from partc.runtime.plan.program import Plan, Run
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_reports import (
    Compiled,
    TextReader,
    compile_lm,
    plain,
)
from tests.builders.plans.compiled_steps import cluster_of, compile_step

ANCHORS: defaultdict[tuple[str, str], str] = defaultdict(str)  # of links' lines, of which none is looked at
DONE = ("compute", "all-reduce", "all-gather", "servers", "transfer")
KEPT = ("weights", "slots", "values", "activations", "buffers")
CSS = Path(__file__).parents[3] / "compiler" / "report" / "templates" / "report.css"


def test_page_is_well_formed_and_needs_no_network(compiled: Compiled) -> None:
    reader = TextReader()
    reader.feed(compiled.page)

    assert reader.open == []
    assert not [name for name, _ in reader.attributes if name in ("src", "srcset", "data")]
    links = [value or "" for name, value in reader.attributes if name in ("href", "xlink:href")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"https?://|@import|url\(|<script src|<link", compiled.page)
    assert "default-src 'none'" in compiled.page  # of its own accord no browser fetches anything for it


def test_links_within_the_page_have_targets(on_2x2: Compiled) -> None:
    targets = set(re.findall(r'href="#(\w+)"', on_2x2.page))

    assert targets <= set(re.findall(r'id="(\w+)"', on_2x2.page))


def test_rendering_twice_gives_equal_bytes(on_2x2: Compiled) -> None:
    again = render_report(on_2x2.compilation, on_2x2.cluster, on_2x2.folder)

    assert again == on_2x2.page


def test_headline_has_the_step_the_ranks_and_the_bytes_between_hosts(compiled: Compiled) -> None:
    plan = compiled.compilation.plan
    sent = sum(sent for _, sent in host_traffic(plan, compiled.cluster).values())
    text = compiled.text

    assert compiled.cluster.name in text
    assert plain(units.seconds(compiled.compilation.timeline.step_s)) in text
    assert plain(units.size(sent)) in text
    assert f"{plan.replicas} workers" in text


def test_one_host_exchanges_nothing_with_others(all_compiled: dict[str, Compiled]) -> None:
    alone = all_compiled["cluster-1x4"]

    assert host_traffic(alone.compilation.plan, alone.cluster) == {"host0": (0.0, 0.0)}


def test_every_variable_is_listed_with_its_price_by_each_way(compiled: Compiled) -> None:
    text = compiled.text

    for variable in compiled.compilation.plan.variables:
        assert variable.name in text
    for choice in compiled.compilation.costs.choices:
        for time_s in choice.seconds.values():
            assert plain(units.seconds(time_s)) in text
        assert FIGURE.sub("#", choice.reason) in FIGURE.sub(
            "#", text
        )  # told once, with the largest's figures


def test_embedding_is_explained_with_all_alternatives_and_the_chosen_one_marked(on_2x2: Compiled) -> None:
    facts = {fact.name: fact for fact in on_2x2.compilation.facts}

    sparse, dense = worked_examples(on_2x2.compilation.costs, facts, on_2x2.cluster)

    assert sparse.variable == "embedding"
    assert {alternative.method for alternative in sparse.alternatives} == {
        "all_reduce",
        "all_gather",
        "servers",
    }
    chosen = [alternative.method for alternative in sparse.alternatives if alternative.chosen]
    assert chosen == [on_2x2.compilation.strategy.parameters["embedding"].method]
    assert "20,000 rows" in sparse.background
    assert facts[dense.variable].sparse is False
    assert plain(sparse.verdict) in on_2x2.text


def test_whole_steps_are_compared_and_the_quickest_is_the_chosen_one(on_2x2: Compiled) -> None:
    compilation = on_2x2.compilation

    found = candidates(compilation.costs, compilation.compared, compilation.timeline.step_s)

    assert [candidate.chosen for candidate in found] == [True, *[False] * (len(found) - 1)]
    assert found[0].seconds == units.seconds(compilation.timeline.step_s)
    named = {name for tried in compilation.costs.tried for name in tried.names} - {"improved"}
    assert {"allreduce", "hybrid"} <= named <= set(compilation.costs.totals_s)
    assert max(candidate.share for candidate in found) == 1.0


def test_what_nobody_asked_for_is_not_said_to_be_asked_for(all_compiled: dict[str, Compiled]) -> None:
    for compiled in all_compiled.values():
        assert "was asked for" not in compiled.text


def test_solver_and_servers_are_reported(tmp_path: Path) -> None:
    served = compile_lm("cluster-2x2", tmp_path / "out", "ps")
    assignment = served.compilation.costs.assignment
    assert assignment is not None
    text = served.text

    for amount in (assignment.objective_bytes, assignment.bound_bytes, *assignment.bytes_per_server.values()):
        assert plain(units.size(amount)) in text
    assert assignment.status.lower() in text
    assert "was asked for" in text


def test_memory_and_traffic_of_every_rank_are_reported(compiled: Compiled) -> None:
    text = compiled.text
    timeline = compiled.compilation.timeline

    for needs in compiled.compilation.memory:
        assert plain(units.size(needs.needed_bytes)) in text
        assert plain(units.size(timeline.sent_bytes[needs.rank])) in text
        assert plain(units.size(timeline.received_bytes[needs.rank])) in text


def test_inputs_segments_and_instructions_are_listed(on_2x2: Compiled) -> None:
    plan = on_2x2.compilation.plan
    text = on_2x2.text

    for item in plan.data_inputs:
        assert item.name in text
    for run in (i for i in plan.instructions if isinstance(i, Run)):
        assert Path(run.segment).name in text
    assert "none: all replicas read the same values" in text
    assert "instructions" in text


def test_hosts_beyond_the_eighth_are_counted_and_long_names_cut(all_compiled: dict[str, Compiled]) -> None:
    ten = all_compiled["ten hosts"]

    picture = draw_cluster(
        ten.compilation.plan, ten.cluster, loads(ten.compilation.plan, ten.cluster), ANCHORS
    )

    assert len(picture.boxes) == 8
    assert picture.left_out == 2
    assert all(box.name.startswith("…") for box in picture.boxes)
    assert len(picture.cables) == 8


def test_switches_inside_hosts_are_counted_and_those_between_hosts_drawn(tmp_path: Path) -> None:
    """Two hosts of two GPUs on a PCIe switch, which hangs on another, and a network between the hosts."""
    cluster = cluster_of("2x2s")
    within = [f"{host.name}/{name}" for host in cluster.hosts for name in ("near", "far")]
    links = [
        Link(ends, 1e9)
        for host in cluster.hosts
        for ends in (
            *((device.name, f"{host.name}/near") for device in host.devices),
            (f"{host.name}/near", f"{host.name}/far"),
            (f"{host.name}/far", host.name),
        )
    ]
    cluster = msgspec.structs.replace(
        cluster, switches=(*within, *cluster.switches), links=(*links, *cluster.links)
    )
    training = import_training_graph(onnx.ModelProto.FromString(training_model("mlp, sgd")))
    plan = compile_graph(training, cluster, tmp_path / "out", Options(batch="per-replica")).plan

    picture = draw_cluster(plan, cluster, loads(plan, cluster), ANCHORS)

    assert [bar.name for bar in picture.bars] == ["switch"]
    assert len(picture.cables) == 2
    assert [box.inner_link for box in picture.boxes] == ["2 × titan-xp, switches inside: 2"] * 2


def test_names_from_the_user_are_escaped(on_2x2: Compiled) -> None:
    cluster = msgspec.structs.replace(on_2x2.cluster, name="<b>&")

    page = render_report(on_2x2.compilation, cluster, on_2x2.folder)

    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_their_backgrounds_and_each_has_one_meaning(scheme: str) -> None:
    colours = scheme_of(scheme)

    for text in ("ink", "faint", "link", "alarm"):
        assert contrast(colours[text], colours["page"]) >= 4.5
        assert contrast(colours[text], colours["panel"]) >= 4.5
    assert contrast(colours["ink"], colours["servers-tint"]) >= 4.5
    for area in DONE:
        assert contrast(colours[area], colours["on-colour"]) >= 4.5
    for area in (*DONE, *KEPT, "moved"):
        assert contrast(colours[area], colours["empty"]) >= 3.0
    for one, other in combinations((*DONE, *KEPT, "moved"), 2):
        assert sum(abs(a - b) for a, b in zip(rgb(colours[one]), rgb(colours[other]), strict=True)) > 0.2


def scheme_of(scheme: str) -> dict[str, str]:
    blocks = re.findall(r":root\s*{([^}]*--page[^}]*)}", CSS.read_text())
    return dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme == "dark"]))


def rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def loads(plan: Plan, cluster: Cluster) -> StepLoads:
    return loads_of(step_traffic(plan, cluster, {}), cluster, 1.0)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.2, section 1.4.3)."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_plan_without_servers_names_none_and_says_why_a_mesh_has_none(tmp_path: Path) -> None:
    step = build_training_graph(
        build_model("mlp", sizes=(8, 8, 4), batch=8), loss="softmax_cross_entropy", optimizer=SGD(0.1)
    )
    compile_step(import_training_graph(step), tmp_path / "out", "2x2", "data=2,tensor=2", "global")
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")

    assert "2 replicas on 4 workers, no server" in plain(text)
    assert "worker + server" not in text and "worker and server" not in text
    assert "Replicas of a mesh have no servers" in text and "--strategy allreduce says so" not in text
