"""Search, cards, drawing and ranks in a browser: at 1400 and 400 px, light and dark, without a complaint."""

from itertools import product

import pytest

from tests.checks.browser import Browser
from tests.checks.browser import Page as Tab
from tests.checks.page_audit import NOTHING_WRONG, audit
from tests.compiler.report.operators.conftest import Page

TRAIL = "document.querySelector('.trail').textContent"
BOXES = "[...document.querySelectorAll('.world .box')].map(box => box.textContent)"
SCALE = "new DOMMatrix(getComputedStyle(document.querySelector('.world')).transform).a"
FOCUSED = "document.activeElement.textContent"
FOCUS = "document.querySelector('.world .box[tabindex=\"0\"]').focus()"


@pytest.mark.parametrize(("width", "dark"), list(product((1400, 400), (False, True))))
def test_search_and_click_at_every_width_and_scheme(
    browser: Browser, mesh_page: Page, width: int, dark: bool
) -> None:
    with browser.open(mesh_page.report, width, dark=dark) as page:
        assert page.evaluate(BOXES) == ["layer0MatMul", "layer1MatMul", "layer2MatMul"]

        page.click("#graph-search")
        page.write("matmul_8")
        assert page.evaluate("document.querySelectorAll('#graph-results [role=option]').length") == 5
        page.press("ArrowDown")
        assert page.evaluate("document.activeElement.getAttribute('aria-activedescendant')")
        page.press("Enter")
        assert page.text(".facts-card h3") == "MatMul:MatMul_8"
        assert "split into 2 by samples and 2 by what it sums, on host0/cpu0" in page.text(".facts-card")
        assert page.evaluate("location.hash") == "#op=MatMul%3AMatMul_8"
        assert page.evaluate(TRAIL) == "All layers › layer1"

        page.click("#graph .trail button")
        page.click(".world .box:nth-of-type(3)")
        assert page.text(".facts-card h3") == "layer2"
        page.click(".world .box:nth-of-type(3)")
        assert page.evaluate(TRAIL) == "All layers › layer2"
        assert len(page.evaluate(BOXES)) > 10
        assert audit(page, unfold=False) == NOTHING_WRONG
        assert page.errors == []


@pytest.mark.parametrize("width", [1400, 400])
def test_every_part_of_a_group_is_in_its_first_view_or_a_click_away(
    browser: Browser, mesh_page: Page, width: int
) -> None:
    where = "['.drawing', '.lane:last-of-type'].map(s => document.querySelector(s).getBoundingClientRect())"
    sides = "own.left >= all.left && own.right <= all.right && own.top >= all.top && own.bottom <= all.bottom"
    within = f"(([all, own]) => {sides})({where})"
    parts = "[...document.querySelectorAll('.lanes button')].map(button => button.textContent.split(',')[0])"
    with browser.open(mesh_page.report, width) as page:
        assert page.evaluate("document.querySelector('.lanes').hidden")
        page.evaluate("location.hash = '#op=MatMul%3AMatMul_8'")
        wait_for(page, "document.querySelector('.lane') !== null")

        assert page.evaluate(parts) == ["Forward", "Gradient", "Update"]
        if width == 1400:
            assert page.evaluate(within)
        page.click(".lanes button:last-child")
        assert page.evaluate(within)
        assert audit(page, unfold=False) == NOTHING_WRONG
        assert page.errors == []


def test_zooming_far_in_leads_into_a_box_and_far_out_up_again(browser: Browser, mesh_page: Page) -> None:
    with browser.open(mesh_page.report) as page:
        x, y = page.centre(".world .box")
        before = page.evaluate(SCALE)
        settle(page)
        page.wheel(x, y, -120, ctrl=True)
        wait_for(page, f"{SCALE} > {before}")
        assert page.evaluate(TRAIL) == "All layers"
        page.wheel(x, y, -600, ctrl=True)
        wait_for(page, f"{TRAIL} === 'All layers › layer0'")
        settle(page)
        page.wheel(x, y, 2000, ctrl=True)
        wait_for(page, f"{TRAIL} === 'All layers'")
        assert page.errors == []


def test_the_keyboard_goes_from_box_to_box_in_and_up(browser: Browser, mesh_page: Page) -> None:
    with browser.open(mesh_page.report) as page:
        page.evaluate(FOCUS)
        page.press("ArrowDown")
        assert page.evaluate(FOCUSED) == "layer1MatMul"
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label == "layer layer1, MatMul, on ranks 0–3"
        page.press("Enter")
        assert page.text(".facts-card h3") == "layer1"
        page.press("Enter")
        assert page.evaluate(TRAIL) == "All layers › layer1"
        page.evaluate(FOCUS)
        page.press("Backspace")
        assert page.evaluate(TRAIL) == "All layers"
        assert page.evaluate(FOCUSED) == "layer1MatMul"


def test_dragging_moves_the_drawing_and_chooses_nothing(browser: Browser, mesh_page: Page) -> None:
    left = "document.querySelector('.world .box').getBoundingClientRect().left"
    with browser.open(mesh_page.report) as page:
        x, y = page.centre(".world .box")
        shown, before = page.text(".facts-card h3"), page.evaluate(left)

        page.drag((x, y), (x - 60, y))

        assert page.evaluate(left) == pytest.approx(before - 60, abs=1)
        assert page.text(".facts-card h3") == shown


def test_printing_leaves_the_drawing_where_it_was(browser: Browser, mesh_page: Page) -> None:
    left = "document.querySelector('.world .box').getBoundingClientRect().left"
    with browser.open(mesh_page.report) as page:
        before = page.evaluate(left)

        page.emulate(media="print")
        page.evaluate("dispatchEvent(new Event('resize'))")
        page.emulate()

        assert page.evaluate(left) == before


def test_two_fingers_zoom(browser: Browser, mesh_page: Page) -> None:
    with browser.open(mesh_page.report, 400, touch=True) as page:
        x, y = page.centre(".world .box")
        before = page.evaluate(SCALE)
        settle(page)
        page.touch([((x - 20, y), (x - 35, y)), ((x + 20, y), (x + 35, y))])
        wait_for(page, f"{SCALE} > {before}")
        assert page.errors == []


def test_links_lead_to_operators_variables_and_ranks(browser: Browser, mesh_page: Page) -> None:
    with browser.open(mesh_page.report) as page:
        follow(page, "#op=layer1.weight", "layer1.weight")
        assert "part [0:64, 0:128]" in page.text(".facts-card")
        assert "✓ taken" not in page.text(".facts-card")  # prices are of wholes

        follow(page, "#rank=3", mesh_page.plan.ranks[3].device)
        assert page.evaluate("document.getElementById('graph-rank').value") == "3"
        page.click(".facts-card .steps details summary")
        wait_for(page, "document.querySelector('.facts-card .steps details .listed') !== null")
        assert "MatMul:MatMul_3" in page.text(".facts-card .steps")
        assert page.errors == []


def follow(page: Tab, link: str, title: str) -> None:
    """Go to a link within the page, and wait until its card is there."""
    page.evaluate(f"location.hash = '{link}'")
    wait_for(page, f"document.querySelector('.facts-card h3').textContent === '{title}'")


def settle(page: Tab) -> None:
    """Wait until the drawing zooms again, a moment after it was entered."""
    page.evaluate("new Promise(done => setTimeout(done, 400))")


def wait_for(page: Tab, condition: str) -> None:
    """Wait until a condition holds; fail where it does not in ten seconds."""
    look = f"({condition}) ? done(true) : performance.now() > end ? done(false) : setTimeout(look, 20)"
    within = f"const end = performance.now() + 10000; const look = () => {look}; look();"
    assert page.evaluate(f"new Promise(done => {{ {within} }})"), condition
