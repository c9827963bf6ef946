"""The page in a real browser: nothing overflows, nothing is too small or too pale, no script fails."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.models.catalogue import build_model
from tests.builders.graphs.soap_models import MODELS, OPTIMIZED, soap_model
from tests.builders.plans.compiled_reports import Compiled
from tests.builders.plans.compiled_steps import compile_as_allowed, compile_step
from tests.builders.plans.random_soap import random_soap, samples_of
from tests.checks.browser import Browser
from tests.checks.float64_windows import open_in_float64
from tests.checks.page_audit import NOTHING_WRONG, audit

LOOKS = [(1400, False), (400, True)]


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_nothing_is_wrong_with_the_page(compiled: Compiled, browser: Browser, width: int, dark: bool) -> None:
    with browser.open(compiled.folder / "report.html", width, dark=dark) as page:
        assert audit(page) == NOTHING_WRONG
        assert page.errors == []


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (400, False)])
def test_nothing_is_wrong_with_the_other_looks(
    on_2x2: Compiled, browser: Browser, width: int, dark: bool
) -> None:
    with browser.open(on_2x2.folder / "report.html", width, dark=dark) as page:
        assert audit(page, unfold=False) == NOTHING_WRONG
        assert audit(page) == NOTHING_WRONG
        assert page.errors == []


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_nothing_is_wrong_with_operators_on_many_devices(
    browser: Browser, width: int, dark: bool, tmp_path: Path
) -> None:
    forward = build_model("mlp", sizes=(16, 32, 32), batch=16)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    devices = tuple(f"host{host}/cpu{cpu}" for host in range(4) for cpu in range(4))
    layers = [node.name for node in forward.graph.node if node.op_type == "MatMul"]
    splits = {"batch": 2, "out:1": 8}, {"batch": 8, "out:1": 2}
    ops = tuple(OpConfig(*entry, devices=devices) for entry in zip(layers, splits, strict=True))
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "4x4", strategy, "global")

    with browser.open(compiled.folder.path / "report.html", width, dark=dark) as page:
        assert page.evaluate("!!document.querySelector('section#operators')")
        assert audit(page) == NOTHING_WRONG
        assert page.errors == []


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 3 else pytest.mark.long) for seed in range(34)]
)
def test_nothing_is_wrong_with_any_degrees_on_any_devices(
    seed: int, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_in_float64(monkeypatch)
    models = (*MODELS, *OPTIMIZED)
    model = models[seed % len(models)]
    step, batch = onnx.ModelProto.FromString(soap_model(model)), ("global", "per-replica")[seed // 2 % 2]
    training = import_training_graph(step)
    samples = samples_of(training)
    cluster, strategy = random_soap(training, batch, samples, 9000 + seed, are_equal=seed % 3 != 2)
    compiled = compile_as_allowed(step, tmp_path / "out", cluster, strategy, batch)

    for width, dark in LOOKS:
        with browser.open(compiled.folder.path / "report.html", width, dark=dark) as page:
            assert audit(page) == NOTHING_WRONG
            assert page.errors == []


def test_scrolling_areas_say_so_and_have_a_name_and_the_focus(on_2x2: Compiled, browser: Browser) -> None:
    hidden = "[...document.querySelectorAll('.scroll-hint')].filter(e => e.checkVisibility()).length"
    wide = "document.querySelectorAll('.scroll[tabindex=\"0\"][role=region][aria-label]').length"
    with browser.open(on_2x2.folder / "report.html", 400) as page:
        assert page.evaluate(hidden) == page.evaluate(wide) > 3
        page.resize(1400)
        page.evaluate("new Promise(done => setTimeout(done, 100))")
        assert page.evaluate(hidden) == page.evaluate(wide) == 0


def test_print_is_light_and_unfolded_and_folds_again(
    on_2x2: Compiled, browser: Browser, tmp_path: Path
) -> None:
    folded = "document.querySelectorAll('details:not([open])').length"
    with browser.open(on_2x2.folder / "report.html", dark=True) as page:
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        closed = page.evaluate(folded)
        page.emulate(dark=True, media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")

        assert page.evaluate(folded) == 0 < closed
        assert (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)" != dark
        )
        assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"

        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(folded) == closed
        assert page.pdf(tmp_path / "report.pdf").read_bytes().count(b"/Type /Page\n") >= 3


def test_the_page_is_read_without_scripts(on_2x2: Compiled, browser: Browser) -> None:
    with browser.open(on_2x2.folder / "report.html") as page:
        page.call("Emulation.setScriptExecutionDisabled", {"value": True})
        page.reload()
        bars, tools = page.evaluate(
            "[document.querySelectorAll('.timeline path').length,"
            " document.querySelector('.timeline-tools').checkVisibility()]"
        )

        assert bars > 4
        assert tools is False


def test_links_of_the_navigation_lead_to_sections(on_2x2: Compiled, browser: Browser) -> None:
    with browser.open(on_2x2.folder / "report.html") as page:
        page.click("nav a[href='#devices']")
        assert page.evaluate("location.hash") == "#devices"
        assert -1 <= page.evaluate("document.querySelector('#devices').getBoundingClientRect().top") < 300


@pytest.mark.parametrize("width", [1400, 400])
def test_a_click_on_a_link_tells_what_it_carries(on_2x2: Compiled, browser: Browser, width: int) -> None:
    with browser.open(on_2x2.folder / "report.html", width) as page:
        page.evaluate("document.querySelector('svg a[href^=\"#link-\"]').focus()")
        page.press("Enter")
        page.evaluate("new Promise(done => setTimeout(done, 50))")

        assert page.evaluate("location.hash").startswith("#link-between-")
        line = page.evaluate(
            "[...document.querySelectorAll('tr:target, tr:target + tr.beneath')]"
            ".map(row => row.innerText).join(' ')"
        )
        assert "host0 → host1" in line
        assert "of embedding’s touched rows" in line
        assert page.errors == []
