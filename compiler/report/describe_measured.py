"""What a run took, under the predicted step: written into a report that is there already.

    ... </section>  <!-- measured --> <section id="measured"> ... </section> <!-- /measured -->  <section ...

A later run takes the place of an earlier one. A page without a predicted step is left as it is. Where another
version of partc wrote the page, its scripts would draw the measured step wrongly: the page says so instead.

What the page calls the plan's instructions is read back from it: there is no compilation any more.
"""

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from partc.compiler.comparison.difference_rows import difference_rows, sum_row, total_row
from partc.compiler.report.describe_messages import SHORT, Words
from partc.compiler.report.describe_program import segment_names
from partc.compiler.report.methods import method_of_label
from partc.compiler.report.packed_json import unpacked
from partc.compiler.report.page import has_scripts, render_part
from partc.compiler.report.timeline.draw_timeline import TimelinePicture, draw_timeline
from partc.compiler.report.units import EN_DASH, with_arrow
from partc.cost.simulation.timeline import Timeline
from partc.cost.step_account import MeasuredRun
from partc.runtime.plan.program import Plan, Run, Start

_BEGIN, _END = "<!-- measured -->", "<!-- /measured -->"
_EARLIER = re.compile(rf"{_BEGIN}.*?{_END}\n?", re.DOTALL)
_PREDICTED = re.compile(r'<section id="timeline".*?</section>\n?', re.DOTALL)
_ALL_PREDICTED = ", made before anything ran."
_LINK = '<a href="#timeline">Timeline</a>'
SCRIPTS = ("unpack.js", "timeline.js")  # that draw a timeline
MOST_ROWS = 12
SIDES = ("predicted", "measured")


def with_measured(page: str, plan: Plan, record: MeasuredRun, timeline: Timeline, line: str) -> str:
    """Return the page with what a run measured under what was predicted.

    `timeline`: of a measured step; `line`: the record in one line.
    """
    page = _EARLIER.sub("", page)
    predicted = _PREDICTED.search(page)
    if predicted is None:
        return page
    words = _words(plan, predicted[0])
    picture = draw_timeline(timeline, plan, words) if has_scripts(page, SCRIPTS) else None
    values = _values(record, line, picture)
    section = render_part("measured.html", values)
    page = f"{page[: predicted.end()]}{_BEGIN}{section}{_END}\n{page[predicted.end() :]}"
    page = page.replace(_LINK, f'{_LINK}{_BEGIN}<a href="#measured">Measured</a>{_END}', 1)
    but = ' <a href="#measured">A run measured</a> a step since.'
    return page.replace(_ALL_PREDICTED, f"{_ALL_PREDICTED}{_BEGIN}{but}{_END}", 1)


def _words(plan: Plan, predicted: str) -> dict[int, Words]:
    """Return what the predicted picture calls runs and starts; labels for those that it leaves out."""
    names = segment_names(plan)
    words: dict[int, Words] = {}
    for number, instruction in enumerate(plan.instructions):
        if isinstance(instruction, Run):
            name = names[PurePosixPath(instruction.segment).stem]
            words[number] = Words("compute", name, f"{name} ({instruction.site})")
        elif isinstance(instruction, Start):
            kind, label = method_of_label(instruction.label), instruction.label or instruction.kind
            words[number] = Words(kind, SHORT[instruction.kind], label)
    return words | words_of_page(predicted)


def _values(record: MeasuredRun, line: str, picture: TimelinePicture | None) -> Mapping[str, object]:
    steps = f"{record.first_step}{EN_DASH}{record.last_step}"
    largest, others = record.differences[:MOST_ROWS], record.differences[MOST_ROWS:]
    return {
        "line": with_arrow(f"A step: {line}."),
        "steps": steps if record.first_step != record.last_step else str(record.first_step),
        "timeline": picture,
        "rows": difference_rows(largest, SIDES),
        "others": sum_row(f"{len(others)} more", others) if others else None,
        "total": total_row(record.predicted.step_s, record.measured.step_s),
        "has_fewer_cores": any(d.kind == "sharing" for d in record.differences),
    }


_DATA = re.compile(r'<script type="application/json" class="timeline-data">(.*?)</script>', re.DOTALL)


def words_of_page(page: str) -> dict[int, Words]:
    """Return the words by the instructions' places; nothing where the page has no timeline."""
    match = _DATA.search(page)
    if match is None:
        return {}
    data = unpacked(json.loads(match[1]))
    words = [Words(*fields) for fields in data["words"]]
    return {place: words[number] for place, number in enumerate(data["instructions"]) if number >= 0}
