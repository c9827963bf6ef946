"""The audit of pages finds what is wrong with a page that was made so."""

from pathlib import Path

import pytest

from tests.checks.browser import Browser
from tests.checks.page_audit import NOTHING_WRONG, audit

PAGE = """<!DOCTYPE html><html lang="en"><title>page</title><style>
body {{ font: 15px sans-serif; color: #111; background: #fff; }} .scroll {{ overflow-x: auto; }}
svg {{ display: block; }}
</style><h1>Page</h1>{body}</html>"""


def drawing(texts: str, at: int = 0) -> str:
    box = f'<rect x="{at}" y="0" width="100" height="60" fill="none"/>'
    return f'<div class="scroll" tabindex="0"><svg width="900" height="60">{box}{texts}</svg></div>'


def text(x: int, y: int) -> str:
    return f'<text x="{x}" y="{y}">a label</text>'


def rows(*words: str) -> str:
    return (
        "<table><tbody>"
        + "".join(f"<tr><td>{word}</td><td>1</td></tr>" for word in words)
        + "</tbody></table>"
    )


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (drawing(text(10, 20) + text(20, 24)), "overlaps"),
        (drawing(text(450, 20), at=440), "aside"),
        (rows(*["Sum the gradients of a"] * 8), "walls"),
        (drawing(text(10, 20) + text(10, 50)), ""),
        (rows("sum", "send", *["hand a to stage1"] * 4), ""),
    ],
)
def test_what_is_wrong_is_found(body: str, wrong: str, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE.format(body=body), encoding="utf-8")

    with browser.open(tmp_path / "page.html", 400) as page:
        found = audit(page)

    names = [
        name
        for name in NOTHING_WRONG.__dataclass_fields__
        if getattr(found, name) != getattr(NOTHING_WRONG, name)
    ]
    assert names == [wrong][: bool(wrong)]
