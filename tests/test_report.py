"""The page is read as a reader would: its text, its structure, and in a browser its looks."""

import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from partc.compiler.driver import Compilation, CompileOptions, compile_graph
from partc.compiler.import_training import import_training_graph
from partc.compiler.report import render_report
from partc.compiler.reporting import units
from partc.compiler.reporting.explain_choices import candidates, worked_examples
from partc.compiler.reporting.measure_traffic import host_traffic
from partc.compiler.training.build import build_training_graph
from partc.compiler.training.optimizers import Adagrad
from partc.cost.cluster import Cluster, read_cluster
from partc.models.catalogue import build_model
from partc.runtime.program import Run

EXAMPLES = Path(__file__).parent.parent / "examples"
CSS = Path(__file__).parent.parent / "compiler" / "reporting" / "report.css"
CLUSTERS = ("cluster-1x4", "cluster-2x2", "cluster-8x6-titanxp")
VOID = frozenset({"meta"})
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIETLY = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PROBE = """
<script>
const page = document.documentElement;
const spills = [...document.querySelectorAll("svg text")].filter(text => {
  const own = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
  return own.width && (own.left < svg.left - 1 || own.right > svg.right + 1);
}).map(text => text.textContent);
const wide = [...document.querySelectorAll("svg .host")].flatMap(host => {
  const box = host.getBoundingClientRect();
  return [...host.parentNode.querySelectorAll("text")]
    .filter(text => text.getBoundingClientRect().right > box.right).map(text => text.textContent);
});
const small = [...document.querySelectorAll("svg text")]
  .filter(text => text.getBoundingClientRect().height < 8).length;
page.dataset.probe = JSON.stringify({overflow: page.scrollWidth - page.clientWidth, spills, wide, small});
</script>
"""


@dataclass(frozen=True)
class Compiled:
    """A compilation with the page that went into its folder."""

    compilation: Compilation
    cluster: Cluster
    folder: Path

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text(encoding="utf-8")

    @property
    def text(self) -> str:
        """What a reader sees, all space between words made single and plain."""
        return TextReader.read(self.page)


class TextReader(HTMLParser):
    """Collects what a reader sees, and checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @classmethod
    def read(cls, page: str) -> str:
        reader = cls()
        reader.feed(page)
        assert reader.open == []
        return re.sub(r"\s+", " ", " ".join(reader.words))


def compile_lm(cluster: str, out: Path) -> Compiled:
    """Compile a small language model, whose tables are large next to what a step touches."""
    options = {"vocab": 20_000, "embedding": 32, "cells": 32, "projection": 32, "steps": 3, "samples": 64}
    forward = build_model("lm", **options, batch=8)
    step = build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1), clip_global_norm=10.0)
    hosts = read_cluster(EXAMPLES / f"{cluster}.json")
    compilation = compile_graph(import_training_graph(step), hosts, out, CompileOptions())
    return Compiled(compilation, hosts, out)


@pytest.fixture(scope="module")
def all_compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    folder = tmp_path_factory.mktemp("reports")
    return {cluster: compile_lm(cluster, folder / cluster) for cluster in CLUSTERS}


@pytest.fixture(params=CLUSTERS)
def compiled(request: pytest.FixtureRequest, all_compiled: dict[str, Compiled]) -> Compiled:
    return all_compiled[request.param]


@pytest.fixture
def on_2x2(all_compiled: dict[str, Compiled]) -> Compiled:
    return all_compiled["cluster-2x2"]


def test_page_is_well_formed_and_needs_no_network(compiled: Compiled) -> None:
    reader = TextReader()
    reader.feed(compiled.page)

    assert reader.open == []
    assert not [name for name, _ in reader.attributes if name in ("src", "srcset", "data")]
    links = [value or "" for name, value in reader.attributes if name in ("href", "xlink:href")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"https?://|@import|url\(|<script|<link", compiled.page)


def test_links_within_the_page_have_targets(on_2x2: Compiled) -> None:
    targets = set(re.findall(r'href="#(\w+)"', on_2x2.page))

    assert targets <= set(re.findall(r'id="(\w+)"', on_2x2.page))


def test_rendering_twice_gives_equal_bytes_and_the_plan_holds_their_hash(on_2x2: Compiled) -> None:
    again = render_report(on_2x2.compilation, on_2x2.cluster, on_2x2.folder)

    assert again == on_2x2.page
    assert "report.html" in (on_2x2.folder / "plan.json").read_text()


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
        assert choice.reason in text


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


def test_cheapest_candidate_is_the_chosen_one(on_2x2: Compiled) -> None:
    costs = on_2x2.compilation.costs

    found = candidates(costs)

    assert [candidate.name for candidate in found if candidate.chosen] == ["auto"]
    assert {candidate.name for candidate in found} == set(costs.totals_s)
    assert max(candidate.share for candidate in found) == 1.0


def test_solver_and_servers_are_reported(on_2x2: Compiled) -> None:
    assignment = on_2x2.compilation.costs.assignment
    assert assignment is not None
    text = on_2x2.text

    for amount in (assignment.objective_bytes, assignment.bound_bytes, *assignment.bytes_per_server.values()):
        assert plain(units.size(amount)) in text
    assert assignment.status.lower() in text


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


def test_names_from_the_user_are_escaped(on_2x2: Compiled) -> None:
    cluster = msgspec.structs.replace(on_2x2.cluster, name="<b>&")

    page = render_report(on_2x2.compilation, cluster, on_2x2.folder)

    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_their_backgrounds(scheme: str) -> None:
    blocks = re.findall(r":root\s*{([^}]*)}", CSS.read_text())
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme == "dark"]))

    for text in ("ink", "faint", "link", "alarm"):
        assert contrast(colours[text], colours["page"]) >= 4.5
        assert contrast(colours[text], colours["panel"]) >= 4.5
    assert contrast(colours["ink"], colours["servers-tint"]) >= 4.5
    for area in ("all-reduce", "all-gather", "servers", "compute"):
        assert contrast(colours[area], colours["on-colour"]) >= 4.5
    for area in ("variables", "buffers", "activations", "sent", "received"):
        assert contrast(colours[area], colours["empty"]) >= 3.0


@pytest.fixture(scope="module")
def chromium() -> str:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return CHROMIUM


@pytest.mark.parametrize("width", [1280, 800])
def test_browser_shows_the_page_without_overflow(
    compiled: Compiled, chromium: str, width: int, tmp_path: Path
) -> None:
    probed = tmp_path / "probed.html"
    opened = compiled.page.replace("<details>", "<details open>")
    probed.write_text(opened.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")

    dom = browse(chromium, probed, tmp_path, width, "--dump-dom")

    found = re.search(r'data-probe="([^"]*)"', dom)
    assert found is not None, dom[:400]
    assert found[1].replace("&quot;", '"') == '{"overflow":0,"spills":[],"wide":[],"small":0}'


def test_browser_takes_a_picture_of_the_page(on_2x2: Compiled, chromium: str, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"

    browse(chromium, on_2x2.folder / "report.html", tmp_path, 1280, f"--screenshot={picture}")

    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1280, 1600)
    assert len(data) > 50_000  # an empty page compresses to a tenth of that


def browse(chromium: str, page: Path, folder: Path, width: int, action: str) -> str:
    """Open a page in a browser that keeps to itself; return what it prints."""
    command = [
        chromium,
        *QUIETLY,
        f"--user-data-dir={folder / 'browser'}",
        f"--window-size={width},1600",
        action,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def plain(text: str) -> str:
    """Return the text as `Compiled.text` has it."""
    return text.replace(units.NO_BREAK, " ")


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.2, section 1.4.3)."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
