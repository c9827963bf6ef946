"""The timeline under a mouse, fingers and a keyboard."""

import re
from collections.abc import Iterator

import pytest

from tests.builders.plans.compiled_reports import Compiled
from tests.checks.browser import Browser, Page
from tests.checks.page_audit import NOTHING_WRONG, audit

FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
VIEW = "document.querySelector('.timeline-plot svg').getAttribute('viewBox').split(' ').map(Number)"
WHOLE = (0.0, 1e6)


@pytest.fixture(params=[1400, 400])
def page(request: pytest.FixtureRequest, on_2x2: Compiled, browser: Browser) -> Iterator[Page]:
    with browser.open(on_2x2.folder / "report.html", request.param, touch=request.param == 400) as page:
        yield page
        assert page.errors == []


def view(page: Page) -> tuple[float, float]:
    """Return what is in view: from where, and how much."""
    page.evaluate(FRAME)
    start, _, length, _ = page.evaluate(VIEW)
    return start, length


def told(page: Page) -> str:
    return page.text(".timeline-told")


def test_wheel_zooms_with_ctrl_alone_and_drags_move(page: Page) -> None:
    x, y = page.centre(".timeline-plot")
    width = page.evaluate("document.querySelector('.timeline-plot').clientWidth")

    page.wheel(x, y, -200)
    assert view(page) == WHOLE
    x, y = page.centre(".timeline-plot")
    page.wheel(x, y, -200, ctrl=True)
    start, length = view(page)
    assert length == pytest.approx(1e6 / 2.718, rel=0.01)
    assert start + length / 2 == pytest.approx(5e5, rel=0.02)  # around the pointer

    page.drag((x, y), (x - width / 4, y))
    moved, same = view(page)
    assert same == pytest.approx(length)
    assert moved - start == pytest.approx(length / 4, rel=0.1)

    page.wheel(x, y, 2000, ctrl=True)
    assert view(page) == WHOLE


def test_buttons_zoom_and_say_what_is_in_view(page: Page) -> None:
    assert page.text(".timeline-view").startswith("the whole step")

    page.click("[data-view=in]")
    assert view(page)[1] == pytest.approx(5e5)
    assert re.match(r"[\d.]+ .?s to [\d.]+ .?s of [\d.]+ ms", page.text(".timeline-view"))
    page.click("[data-view=right]")
    assert view(page)[0] == pytest.approx(5e5 * (0.5 + 1 / 3), rel=0.01)
    page.click("[data-view=whole]")
    assert view(page) == WHOLE


def test_pointing_tells_a_bar_in_words_and_a_double_click_enlarges_it(page: Page) -> None:
    page.centre(".timeline-plot")
    x, y = page.evaluate(
        "(() => { const bars = [...document.querySelector('.timeline-plot').querySelectorAll('.onbar')]"
        ".filter(bar => bar.style.top === '0px').map(bar => bar.getBoundingClientRect());"
        "const b = bars.sort((a, b) => b.width - a.width)[0]; return [b.x + b.width / 2, b.y + 5]; })()"
    )

    page.point(x, y)
    assert re.match(r"rank 0 \(host0/cpu0\): S\d+ \(.+\): .+ node.+, from .+ to .+\.$", told(page))

    page.evaluate(
        "document.querySelector('.timeline-plot svg').dispatchEvent(new MouseEvent('dblclick', "
        f"{{bubbles: true, clientX: {x}, clientY: {y}}}))"
    )
    assert 0 < view(page)[1] < 1e6
    assert page.evaluate("document.querySelector('.timeline-plot .onbar').textContent").startswith("S")


def test_fingers_pinch_and_pan(page: Page) -> None:
    x, y = page.centre(".timeline-plot")
    page.call("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})

    page.touch([((x - 40, y), (x - 80, y)), ((x + 40, y), (x + 80, y))])
    start, length = view(page)
    assert 4e5 < length < 7e5

    page.touch([((x, y), (x - 60, y))])
    moved, same = view(page)
    assert same == pytest.approx(length)
    assert moved > start


def test_keys_go_from_bar_to_bar_and_zoom(page: Page) -> None:
    page.evaluate("document.querySelector('.timeline-body').focus()")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Timeline")

    page.press("ArrowRight")
    first = told(page)
    page.press("ArrowRight")
    second = told(page)
    assert first.startswith("rank 0") and second.startswith("rank 0") and first != second
    page.press("ArrowLeft")
    assert told(page) == first
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert told(page).startswith("rank 1")

    page.press("+")
    assert view(page)[1] == pytest.approx(5e5)
    page.press("-")
    page.press("+")
    page.press("Home")
    assert view(page) == WHOLE


def test_the_table_has_what_is_in_view(page: Page) -> None:
    rows = "document.querySelectorAll('.timeline-table tbody tr').length"
    page.click(".timeline-table summary")
    page.evaluate(FRAME)
    whole = page.evaluate(rows)
    assert whole > 5

    page.evaluate("document.querySelector('.timeline-body').focus()")
    for _ in range(3):
        page.press("+")
    view(page)
    assert 0 < page.evaluate(rows) < whole
    assert "gradients" in page.text(".timeline-table tbody") or "S" in page.text(".timeline-table tbody")
    assert audit(page) == NOTHING_WRONG
