"""Search, cards, drawing and ranks in a real browser: at 1400 and 400 px, light and dark, without a complaint."""

from collections.abc import Iterator
from itertools import product

import pytest

from tests.builders.browser import CHROMIUM, Browser
from tests.compiler.report.operators.conftest import Page

WIDTHS, SCHEMES = (1400, 400), (False, True)
SMALL_TEXT = """
[...document.querySelectorAll('#graph .explorer *')].filter(e => e.childElementCount === 0 && e.textContent.trim()
  && e.getClientRects().length && parseFloat(getComputedStyle(e).fontSize)
     * (e.closest('.world') ? new DOMMatrix(getComputedStyle(e.closest('.world')).transform).a : 1) < 11)
  .map(e => e.textContent)
"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
TITLE = "document.querySelector('.facts-card h3').textContent"
CARD = "document.querySelector('.facts-card').textContent"
TRAIL = "document.querySelector('.trail').textContent"
BOXES = "[...document.querySelectorAll('.world .box')].map(box => box.textContent)"
SCALE = "new DOMMatrix(getComputedStyle(document.querySelector('.world')).transform).a"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with Browser() as browser:
        yield browser


def test_search_click_and_zoom_at_every_width_and_scheme(browser: Browser, mesh_page: Page) -> None:
    for width, dark in product(WIDTHS, SCHEMES):
        browser.open(mesh_page.report, width, 900, dark)
        assert browser.run(BOXES) == ["layer0MatMul", "layer1MatMul", "layer2MatMul"]

        browser.click("#graph-search")
        browser.type("matmul_8")
        assert browser.run("document.querySelectorAll('#graph-results [role=option]').length") == 5
        browser.key("ArrowDown", 40)
        assert browser.run("document.querySelector('#graph-search').getAttribute('aria-activedescendant')")
        browser.key("Enter", 13)
        assert browser.run(TITLE) == "MatMul:MatMul_8"
        assert "split into 2 by samples and 2 by what it sums, on host0/cpu0" in browser.run(CARD)
        assert browser.run("location.hash") == "#op=MatMul%3AMatMul_8"
        assert browser.run(TRAIL) == "All layers › layer1"

        browser.click("#graph .trail button")
        browser.click(".world .box:nth-of-type(3)")
        assert browser.run(TITLE) == "layer2"
        browser.click(".world .box:nth-of-type(3)")
        assert browser.run(TRAIL) == "All layers › layer2"
        assert browser.run("document.querySelectorAll('.world .box').length") > 10
        assert (browser.run(OVERFLOW), browser.run(SMALL_TEXT), browser.troubles) == (0, [], [])


def test_zooming_far_in_leads_into_a_box_and_far_out_up_again(browser: Browser, mesh_page: Page) -> None:
    browser.open(mesh_page.report)
    x, y = browser.middle(".world .box")
    before = browser.run(SCALE)
    settle(browser)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120, modifiers=2)
    wait_for(browser, f"{SCALE} > {before}")
    assert browser.run(TRAIL) == "All layers"
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600, modifiers=2)
    wait_for(browser, f"{TRAIL} === 'All layers › layer0'")
    settle(browser)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=2000, modifiers=2)
    wait_for(browser, f"{TRAIL} === 'All layers'")
    assert browser.troubles == []


def test_the_keyboard_goes_from_box_to_box_in_and_up(browser: Browser, mesh_page: Page) -> None:
    browser.open(mesh_page.report)
    browser.run("document.querySelector('.world .box[tabindex=\"0\"]').focus()")

    browser.key("ArrowDown", 40)
    assert browser.run("document.activeElement.textContent") == "layer1MatMul"
    assert browser.run("document.activeElement.getAttribute('aria-label')").startswith(
        "layer layer1, MatMul, on ranks"
    )
    browser.key("Enter", 13)
    assert browser.run(TITLE) == "layer1"
    browser.key("Enter", 13)
    assert browser.run(TRAIL) == "All layers › layer1"
    browser.run("document.querySelector('.world .box[tabindex=\"0\"]').focus()")
    browser.key("Backspace", 8)
    assert browser.run(TRAIL) == "All layers"
    assert browser.run("document.activeElement.textContent") == "layer1MatMul"
    assert browser.troubles == []


def test_dragging_moves_the_drawing_and_chooses_nothing(browser: Browser, mesh_page: Page) -> None:
    browser.open(mesh_page.report)
    left = "document.querySelector('.world .box').getBoundingClientRect().left"
    x, y = browser.middle(".world .box")
    shown, before = browser.run(TITLE), browser.run(left)

    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseMoved", x - 30, y)
    browser.mouse("mouseMoved", x - 60, y)
    browser.mouse("mouseReleased", x - 60, y)

    assert browser.run(left) == pytest.approx(before - 60, abs=1)
    assert browser.run(TITLE) == shown


def test_links_lead_to_operators_variables_and_ranks(browser: Browser, mesh_page: Page) -> None:
    browser.open(mesh_page.report, at="#op=layer1.weight")
    assert browser.run(TITLE) == "layer1.weight"
    assert "part [0:64, 0:128]" in browser.run(CARD)
    assert "✓ taken" in browser.run(CARD)

    browser.open(mesh_page.report, at="#rank=3")
    assert browser.run(TITLE) == mesh_page.plan.ranks[3].device
    assert "Begin to sum the result of MatMul:MatMul_8, so that each has the sum" in browser.run(CARD)
    browser.click(".facts-card .steps details summary")
    wait_for(browser, "document.querySelector('.facts-card .steps details .listed') !== null")
    assert "MatMul:MatMul_3" in browser.run("document.querySelector('.facts-card .steps').textContent")
    assert browser.troubles == []


def settle(browser: Browser) -> None:
    """Wait until the drawing zooms again, a moment after it was entered."""
    browser.run("new Promise(done => setTimeout(done, 400))")


def wait_for(browser: Browser, condition: str) -> None:
    """Wait until a condition holds; fail where it does not in ten seconds."""
    within = (
        "new Promise(done => { const end = performance.now() + 10000; const look = () => "
        f"({condition}) ? done(true) : performance.now() > end ? done(false) : setTimeout(look, 20); look(); }})"
    )
    assert browser.run(within), condition
