"""What every page must be, at any width and in any colours: nothing overflows or is too small, nothing
lies on something else or is said over and over, text can be told from its background, and who cannot see it
finds names and headings.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from tests.checks.browser import Page

SMALLEST_PX = 11.0
CONTRAST = 4.5  # WCAG 2.2, section 1.4.3, level AA

AUDIT = (Path(__file__).parent / "page_audit.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Audit:
    """What is wrong with a page, each as text that tells where; all empty where nothing is."""

    overflow_px: int
    small: list[str]  # text below SMALLEST_PX
    spills: list[str]  # text that leaves its drawing, or its box in it
    overlaps: list[str]  # texts of a drawing on each other
    aside: list[str]  # drawings of which nothing is seen before they are scrolled
    walls: list[str]  # lines in a row that say the same
    pale: list[str]  # text with less than CONTRAST
    headings: list[str]  # that skip a level
    unnamed: list[str]  # drawings, buttons, fields and links without a name
    repeated_ids: list[str]
    unmarked: list[str]  # what scrolls, and cannot be reached by keyboard


NOTHING_WRONG = Audit(0, [], [], [], [], [], [], [], [], [], [])


def audit(page: Page, *, unfold: bool = True) -> Audit:
    """Return what is wrong with a page. `unfold`: with all details open."""
    if unfold:
        page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    found = page.evaluate(f"({AUDIT})({SMALLEST_PX}, {CONTRAST})")
    return Audit(**{field.name: found[field.name] for field in fields(Audit)})
