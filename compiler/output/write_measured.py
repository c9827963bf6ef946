"""Write what a run took beside its prediction into the plan's folder: measured.json, and the report."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

import msgspec
import numpy as np

from partc.compiler.comparison.explain_run import ExplainedRun
from partc.compiler.output.output_paths import MEASURED, REPORT
from partc.compiler.report.describe_measured import with_measured
from partc.cost.simulation.timeline import Bars, LaneKind, Timeline
from partc.runtime.execution.recorder import StepTimes
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan, Run, Start, Wait, numbered_instructions_of
from partc.runtime.whole_file import write_whole


def write_measured(folder: PlanFolder, explained: ExplainedRun) -> None:
    """Write both, each whole or not at all. A folder without a report gets none."""
    record, report = explained.record, folder.path / REPORT
    text = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"
    write_whole(folder.path / MEASURED, text)
    if report.exists():
        timeline = measured_timeline(folder.plan, typical_step(explained.steps))
        page = report.read_text(encoding="utf-8")
        page = with_measured(page, folder.plan, record, timeline, explained.line)
        write_whole(report, page.encode())


Spans = dict[int, tuple[float, float]]  # rank -> begin and end


def typical_step(steps: Mapping[int, Sequence[StepTimes]]) -> dict[int, StepTimes]:
    """Return the step of middle length, of every rank."""
    lengths = [
        max(step.end_s[-1] for step in same) - min(step.begin_s[0] for step in same)
        for same in zip(
            *(of_rank for of_rank in steps.values() if of_rank and of_rank[0].begin_s), strict=True
        )
    ]
    middle = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    return {rank: of_rank[middle] for rank, of_rank in steps.items()}


def measured_timeline(plan: Plan, step: Mapping[int, StepTimes]) -> Timeline:
    """Return what every rank did in a step, from 0 on, when the first rank began it.

    A communication lasts from when all members had begun it until a rank's wait for it ended.
    """
    origin_s = min(times.begin_s[0] for times in step.values() if times.begin_s)
    spans = _spans(plan, step, origin_s)
    bars = tuple(_bars(plan, spans))
    ends = [end_s for of_rank in spans.values() for _, end_s in of_rank.values()]
    sent_bytes = {rank: sum(times.sent_bytes) for rank, times in step.items()}
    return Timeline(bars, max(ends, default=0.0), sent_bytes, dict.fromkeys(sent_bytes, 0))


def _spans(plan: Plan, step: Mapping[int, StepTimes], origin_s: float) -> dict[int, Spans]:
    """Return when ranks executed the plan's instructions: place in the list -> rank -> begin and end."""
    spans: dict[int, Spans] = {}
    for rank in plan.ranks:
        times = step[rank.rank]
        numbered = numbered_instructions_of(plan, rank)
        for (at, _), begin_s, end_s in zip(numbered, times.begin_s, times.end_s, strict=True):
            spans.setdefault(at, {})[rank.rank] = begin_s - origin_s, end_s - origin_s
    return spans


def _bars(plan: Plan, spans: Mapping[int, Spans]) -> Iterator[Bars]:
    waits = {(i.tag_id, rank): span for at, i in _waits(plan) for rank, span in spans.get(at, {}).items()}
    for at, instruction in enumerate(plan.instructions):
        of_ranks = spans.get(at, {})
        if isinstance(instruction, Run) and of_ranks:
            label = f"{instruction.site} {PurePosixPath(instruction.segment).stem}"
            yield _bar("compute", label, of_ranks, 0, at)
        elif isinstance(instruction, Start) and of_ranks:
            begun = _begun(plan, instruction, of_ranks)
            ended = {
                rank: (begun_s, max(begun_s, waits[instruction.tag_id, rank][1]))
                for rank, begun_s in begun.items()
                if (instruction.tag_id, rank) in waits
            }
            if ended:
                label = instruction.label or instruction.kind
                yield _bar("communication", label, ended, instruction.payload_bytes, at)


def _waits(plan: Plan) -> Iterator[tuple[int, Wait]]:
    return ((at, i) for at, i in enumerate(plan.instructions) if isinstance(i, Wait))


def _begun(plan: Plan, start: Start, of_ranks: Spans) -> dict[int, float]:
    """Return for every rank when all whom it meets had begun a communication."""
    begun: dict[int, float] = {}
    for members in plan.groups.get(start.group, ()):
        last_s = max((of_ranks[member][1] for member in members if member in of_ranks), default=0.0)
        begun |= dict.fromkeys(members, last_s)
    return begun


def _bar(lane: LaneKind, label: str, spans: Spans, payload_bytes: int, instruction: int) -> Bars:
    ranks = sorted(spans)
    begin_s, end_s = (np.array([spans[rank][i] for rank in ranks]) for i in range(2))
    payloads = np.full(len(ranks), payload_bytes)
    return Bars(lane, label, np.array(ranks, np.int64), begin_s, end_s, payloads, instruction)
