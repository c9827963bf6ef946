"""A figure that no test holds says of which day it is."""

import re
from pathlib import Path

import pytest

from .pages import PAGES, ROOT

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b|\b\d{1,2} [A-Z][a-z]+ 20\d\d\b")
MEASURED = re.compile(r"^\|.*\d ?(ms|µs|s|MB|GB/s|x|%) *\|", re.MULTILINE)  # a cell of a table


@pytest.mark.parametrize("path", [*PAGES, *DECISIONS], ids=lambda path: path.stem)
def test_tables_of_figures_are_dated(path: Path) -> None:
    text = path.read_text()

    assert DATE.search(text) or not MEASURED.search(text)


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_decisions_are_dated_and_numbered_once(path: Path) -> None:
    heading, _, rest = path.read_text().partition("\n")
    number = int(path.name[:3])

    assert heading.startswith(f"# {number}.") or heading.startswith(f"# {number:03}")
    assert DATE.search(rest[:200])
    assert [other for other in DECISIONS if other.name.startswith(path.name[:3])] == [path]
