"""Segments of equal work share a line, and a program of any length leaves the page one that can be read."""

from dataclasses import replace
from pathlib import Path

import pytest

from partc.compiler.report.describe_program import (
    ProgramListing,
    ProgramStep,
    SegmentRow,
    group_segments,
)
from partc.compiler.report.page import TEMPLATES, render_part
from tests.checks.browser import Browser
from tests.checks.page_audit import NOTHING_WRONG, audit


def row(number: int, *, nodes: int = 12, site: str = "stage0", updates: str = "") -> SegmentRow:
    return SegmentRow(
        f"S{number}",
        f"segments/{number:03}-{site}-forward.onnx",
        site,
        nodes,
        "Add × 6, MatMul × 6",
        True,
        "38.8 kFLOP",
        "51.4 kB",
        "10.5 kB",
        updates,
        "64 ranks",
    )


def test_segments_of_equal_work_share_a_line_and_those_that_update_do_not() -> None:
    rows = [
        row(1),
        row(2, nodes=40),
        row(3, site="stage1"),
        row(4, updates="W"),
        row(5, updates="W"),
        row(6, site="stage1"),
    ]

    groups = group_segments(rows)

    assert [group.first.name for group in groups] == ["S1", "S2", "S4", "S5"]
    assert groups[0].alike == ("S3 (003-stage1-forward)", "S6 (006-stage1-forward)")
    assert [group.sites for group in groups] == ["stage0 and 1 more", "stage0", "stage0", "stage0"]


PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>page</title><style>{css}</style>
<body><main><h1>Page</h1>{body}</main><script>{script}</script></body></html>"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page of 700 segments that are all different, and of 12 programs of 120 lines."""
    rows = [replace(row(number), work=f"{number} FLOP") for number in range(1, 701)]
    step = ProgramStep("run", "run", "S1 (stage0)", "12 nodes, 51.4 kB touched")
    steps = tuple(replace(step, what=f"S{number} (stage0)") for number in range(120))
    listings = [ProgramListing(f"Rank {rank}", steps, 40) for rank in range(12)]
    values = {"groups": group_segments(rows), "files": len(rows), "listings": listings}
    css, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    text = PAGE.format(css=css, body=render_part("program.html", values), script=script)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    return tmp_path / "page.html"


@pytest.mark.parametrize(("width", "dark", "most_px"), [(1400, False, 12_000), (400, True, 15_000)])
def test_a_long_program_scrolls_in_its_frames_which_say_so(
    page: Path, browser: Browser, width: int, dark: bool, most_px: int
) -> None:
    with browser.open(page, width, dark=dark) as shown:
        assert audit(shown) == NOTHING_WRONG
        shown.evaluate("new Promise(done => setTimeout(done, 100))")
        assert shown.evaluate("document.documentElement.scrollHeight") < most_px
        told = shown.evaluate(
            "[...document.querySelectorAll('.tall')]"
            ".map(e => [e.tabIndex, e.ariaLabel, e.nextElementSibling.innerText])"
        )
        assert len(told) == 13
        assert all(
            index == 0 and label.endswith("up and down") and "up and down" in hint
            for index, label, hint in told
        )
        shown.evaluate("document.querySelector('.tall').focus()")
        shown.press("End")
        shown.evaluate("new Promise(done => setTimeout(done, 400))")
        assert shown.evaluate("document.querySelector('.tall').scrollTop") > 1000


def test_a_long_program_is_whole_on_paper(page: Path, browser: Browser) -> None:
    with browser.open(page, 1400) as shown:
        shown.emulate(media="print")
        shown.evaluate("dispatchEvent(new Event('beforeprint'))")
        cut = (
            "[...document.querySelectorAll('.tall')].filter(e => e.scrollHeight > e.clientHeight + 1).length"
        )
        assert shown.evaluate(cut) == 0
