"""A section of the page: what its template is given, and the style and script that go with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from partc.compiler.compilation import Compilation
from partc.compiler.report.describe_messages import Words
from partc.compiler.report.describe_program import SegmentRow, names_of_messages
from partc.compiler.report.measure_traffic import StepTraffic, step_traffic
from partc.cost.cluster.cluster import Cluster
from partc.cost.strategy import SyncFacts


@dataclass(frozen=True)
class ReportSource:
    """What sections are made of.

    folder: the plan's, with its model and segments
    segments: the distinct ones, in the order in which they first run
    words: what the page calls runs and starts, by their place in the plan's instructions
    """

    compilation: Compilation
    cluster: Cluster
    folder: Path
    segments: tuple[SegmentRow, ...]
    words: Mapping[int, Words]

    @cached_property
    def traffic(self) -> StepTraffic:
        """Return what the step's communications move."""
        return step_traffic(self.compilation.plan, self.cluster, names_of_messages(self.words))

    @property
    def facts(self) -> dict[str, SyncFacts]:
        """Return what is known of each parameter's gradient."""
        return {fact.name: fact for fact in self.compilation.facts}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page, in the order of `SECTIONS` in page.py.

    anchor     the id that its template gives its `<section>`, to which the navigation leads
    title      in the navigation
    template   a file of templates/, which is rendered with what `describe` returns; the macros of parts.html
               are there as `parts`
    describe   None where the plan has nothing of the kind: the section is left out
    styles, scripts   files of templates/ that are written into the page once, after report.css and report.js
    """

    anchor: str
    title: str
    template: str
    describe: Callable[[ReportSource], Mapping[str, object] | None]
    styles: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
