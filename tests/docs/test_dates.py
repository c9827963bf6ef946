"""A figure that no test holds says of which day it is."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .pages import PAGES, ROOT

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b|\b\d{1,2} [A-Z][a-z]+ 20\d\d\b")
FIGURE = re.compile(  # 2.31 s, 5.9 MB, 31 %, 2.6x
    r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:[ \u00a0](?:ms|µs|s|[kMG]B(?:/s)?|%)|x)(?![\w/-])"
)
CODE = re.compile(r"`[^`\n]*`")
# Page and section -> what its figures are, where nobody measured them.
NOT_MEASURED = {
    ("README.md", "The road of a model"): "sizes of files and weights: tests/models/test_lm.py",
    ("docs/asynchronous.md", "When something fails"): "limits of waiting",
    ("docs/clusters.md", "Cluster files"): "the size of the messages that `cluster measure` sends",
    ("docs/clusters.md", "Written for you"): "assumed of PCIe",
    ("docs/data.md", "How it is read"): "a limit",
    ("docs/engines.md", "Kubernetes"): "what Kubernetes gives a container",
    ("docs/faults.md", "What fell short, and what has not been run"): "limits of waiting",
    ("docs/parallax-api.md", "Partitions"): "a threshold",
    ("docs/placement.md", "Contiguous answers: chains of downsets"): "a step of the search",
    ("docs/report.md", "Links"): "examples of shares",
    ("docs/security.md", "What partc listens to, and whom it trusts"): "a limit",
    ("docs/troubleshooting.md", "A run"): "an example of a message, and what a container has",
}


@dataclass(frozen=True)
class Section:
    """A page's text from a heading to the next; `above`: of the headings that it belongs to."""

    page: str
    heading: str
    text: str
    above: tuple[str, ...]

    @property
    def figures(self) -> list[str]:
        return [found[0] for found in FIGURE.finditer(CODE.sub("", self.text))]

    @property
    def is_dated(self) -> bool:
        return any(DATE.search(text) for text in (*self.above, self.text))


def sections(page: str, text: str) -> Iterator[Section]:
    above: list[tuple[int, str]] = []
    for part in re.split(r"(?m)^(?=#{1,3} )", text):
        level = len(part) - len(part.lstrip("#"))
        above = [entry for entry in above if entry[0] < level]
        heading = part.partition("\n")[0].lstrip("# ")
        yield Section(page, heading, part, tuple(entry for _, entry in above))
        above.append((level, part))


ALL = [
    section
    for path in (*PAGES, *DECISIONS)
    for section in sections(str(path.relative_to(ROOT)), path.read_text())
]


@pytest.mark.parametrize("path", [*PAGES, *DECISIONS], ids=lambda path: path.stem)
def test_sections_with_figures_are_dated(path: Path) -> None:
    own = [section for section in ALL if section.page == str(path.relative_to(ROOT))]

    undated = {
        section.heading: section.figures
        for section in own
        if section.figures and not section.is_dated and (section.page, section.heading) not in NOT_MEASURED
    }
    assert undated == {}, "say when these were measured, or in NOT_MEASURED what they are"


def test_what_was_not_measured_is_on_the_pages() -> None:
    undated = {(s.page, s.heading) for s in ALL if s.figures and not s.is_dated}

    assert NOT_MEASURED.keys() <= undated


def test_figures_are_found_in_tables_and_sentences_and_dates_above_them_count() -> None:
    text = (
        "# A\n## B\n| row | 2.31 s |\n### C\nIt is 2.6x as fast.\n"
        "## D\n2026-11-24: 31 %\n### E\n1,024 MB\n## F\n`8 s`\n"
    )
    found = {s.heading: (len(s.figures), s.is_dated) for s in sections("page.md", text)}

    assert found == {
        "": (0, False), "A": (0, False), "B": (1, False), "C": (1, False), "D": (1, True), "E": (1, True),
        "F": (0, False),
    }  # fmt: skip


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_decisions_are_dated_and_numbered_once(path: Path) -> None:
    heading, _, rest = path.read_text().partition("\n")
    number = int(path.name[:3])

    assert heading.startswith(f"# {number}.") or heading.startswith(f"# {number:03}")
    assert DATE.search(rest[:200])
    assert [other for other in DECISIONS if other.name.startswith(path.name[:3])] == [path]
