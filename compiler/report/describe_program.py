"""Segments and instructions: what is executed, in words."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from partc.compiler.report.methods import method_of_label
from partc.compiler.report.units import join_words, operations, plural, size
from partc.runtime.plan.program import Instruction, Plan, Rank, Run, Start, Wait, instructions_of, members_of

MAX_OPS = 3

ACTS = {
    "all_reduce": "sum, everywhere",
    "reduce": "sum, at the first",
    "broadcast": "send to all",
    "reduce_scatter": "sum, each its part",
    "all_gather": "collect the parts, everywhere",
    "shift_ahead": "hand on to the next",
    "shift_back": "hand back to the one before",
    "exchange": "send what others want",
    "gather_rows": "collect rows at the first",
    "scatter_rows": "hand rows back",
    "all_gather_rows": "collect rows, everywhere",
    "all_to_all_rows": "exchange rows by owner",
}


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One ONNX file."""

    name: str  # what the page calls it: S3
    path: str
    site: str
    nodes: int
    ops: str
    work: str
    touched: str
    file_size: str
    updates: str
    ranks: str


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One instruction."""

    kind: str  # run, start, wait, store: the class of its line
    verb: str
    what: str
    remark: str


@dataclass(frozen=True, slots=True)
class ProgramListing:
    """The instructions of one rank."""

    title: str
    steps: tuple[ProgramStep, ...]


def describe_segments(plan: Plan, folder: Path) -> tuple[SegmentRow, ...]:
    """Return the distinct segments in the order in which they first run. Reads their files."""
    variable_of = {piece.value: piece.variable for rank in plan.ranks for piece in rank.held}
    return tuple(
        _segment(f"S{i}", run, plan, variable_of, folder) for i, run in enumerate(_first_runs(plan), 1)
    )


def segment_names(plan: Plan) -> dict[str, str]:
    """Return what pages and traces call the segments, by their files' names."""
    return {Path(run.segment).stem: f"S{i}" for i, run in enumerate(_first_runs(plan), 1)}


def _first_runs(plan: Plan) -> tuple[Run, ...]:
    runs: dict[str, Run] = {}
    for instruction in plan.instructions:
        if isinstance(instruction, Run):
            runs.setdefault(instruction.segment, instruction)
    return tuple(runs.values())


def _segment(name: str, run: Run, plan: Plan, variable_of: Mapping[str, str], folder: Path) -> SegmentRow:
    path = folder / run.segment
    graph = onnx.load(path, load_external_data=False).graph
    ops = Counter(node.op_type for node in graph.node).most_common(MAX_OPS)
    return SegmentRow(
        name=name,
        path=run.segment,
        site=run.site,
        nodes=len(graph.node),
        ops=", ".join(f"{op}\u00a0×\u00a0{number}" for op, number in ops),
        work=operations(run.flops) if run.flops else "–",
        touched=size(run.touched_bytes),
        file_size=size(path.stat().st_size),
        updates=_updates(run, variable_of),
        ranks=plural(sum(run.site in rank.sites for rank in plan.ranks), "rank"),
    )


def _updates(run: Run, variable_of: Mapping[str, str]) -> str:
    """Name the variables that a segment writes."""
    variables = [variable_of[value] for _, value in run.writes if value in variable_of]
    if len(variables) > MAX_OPS:
        return f"{', '.join(variables[:MAX_OPS])} and {len(variables) - MAX_OPS} more"
    return join_words(variables) if variables else ""


def describe_listings(plan: Plan, segments: tuple[SegmentRow, ...]) -> tuple[ProgramListing, ...]:
    """Return the program of one rank of every kind, the first of its kind."""
    kinds: dict[tuple[object, ...], Rank] = {}
    for rank in plan.ranks:
        kinds.setdefault((rank.sites, rank.kind), rank)
    by_path = {segment.path: segment for segment in segments}
    return tuple(_listing(plan, rank, by_path) for rank in kinds.values())


def _listing(plan: Plan, rank: Rank, segments: Mapping[str, SegmentRow]) -> ProgramListing:
    steps = tuple(_step(i, plan, rank, segments) for i in instructions_of(plan, rank))
    plays = " and ".join(rank.sites)
    return ProgramListing(
        f"Rank {rank.rank}, {rank.device}, {plays}: {plural(len(steps), 'instruction')}", steps
    )


def _step(
    instruction: Instruction, plan: Plan, rank: Rank, segments: Mapping[str, SegmentRow]
) -> ProgramStep:
    match instruction:
        case Run():
            segment = segments[instruction.segment]
            remark = f"{plural(segment.nodes, 'node')}, {segment.touched} touched"
            updates = f"; updates {segment.updates}" if segment.updates else ""
            return ProgramStep("run", "run", f"{segment.name} ({instruction.site})", remark + updates)
        case Start():
            return _start_step(instruction, members_of(plan, instruction.group, rank))
        case Wait():
            return ProgramStep("wait", "wait", f"#{instruction.tag_id}", "")
    return ProgramStep("store", "store", f"{instruction.source} → {instruction.target}", "")


def _start_step(start: Start, group: tuple[int, ...]) -> ProgramStep:
    members = plural(len(group), "rank")
    amount = f", {size(start.payload_bytes)}" if start.payload_bytes else ""
    what = f"#{start.tag_id} {ACTS[start.kind]}"
    return ProgramStep(
        method_of_label(start.label), "start", what, f"among {members}{amount}: {start.label}".rstrip(": ")
    )
