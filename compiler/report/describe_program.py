"""Segments and instructions: what is executed, in words."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

import onnx

from partc.compiler.compilation import Compilation
from partc.compiler.report.describe_messages import MICROBATCH, MessageNames, Words
from partc.compiler.report.units import join_words, operations, plural, size, some_ranges
from partc.runtime.plan.held_memory import piece_bytes
from partc.runtime.plan.program import (
    IDLE,
    Instruction,
    Plan,
    Rank,
    Run,
    Site,
    Start,
    Store,
    Wait,
    instructions_of,
    members_of,
)

MAX_OPS = 3
SIZES = re.compile(r"(?<=Grad)_\d.*")  # that a function of one shape has in its name

MAX_LISTINGS = 12
MAX_STEPS = 120  # of a listing, after those that follow each other and are alike were put together
ALIKE = 4  # communications of one kind in a row are told together from so many on


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One ONNX file."""

    name: str  # what the page calls it: S3
    path: str
    site: str
    nodes: int
    ops: str
    is_all: bool  # of the nodes
    work: str
    touched: str
    file_size: str
    updates: str
    ranks: str


@dataclass(frozen=True, slots=True)
class SegmentGroup:
    """Files of equal work: the first, what the others are called, and where all of them run."""

    first: SegmentRow
    alike: tuple[str, ...]  # S4 (004-stage1-forward.onnx)
    sites: str


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
    left_out: int


def describe_segments(plan: Plan, folder: Path) -> tuple[SegmentRow, ...]:
    """Return the distinct segments in the order in which they first run. Reads their files."""
    variable_of = {piece.value: piece.variable for rank in plan.ranks for piece in rank.pieces}
    return tuple(
        _segment(f"S{i}", run, plan, variable_of, folder) for i, run in enumerate(_first_runs(plan), 1)
    )


def group_segments(rows: Iterable[SegmentRow]) -> tuple[SegmentGroup, ...]:
    """Return the segments, those together that do equal work on as many ranks and write no variables."""
    groups: dict[object, list[SegmentRow]] = {}
    for row in rows:
        alone = row.name if row.updates else ""
        groups.setdefault((row.nodes, row.ops, row.work, row.touched, row.ranks, alone), []).append(row)
    return tuple(
        SegmentGroup(
            same[0],
            tuple(f"{row.name} ({PurePosixPath(row.path).stem})" for row in same[1:]),
            _sites(list(dict.fromkeys(row.site for row in same))),
        )
        for same in groups.values()
    )


def _sites(sites: Sequence[str]) -> str:
    return sites[0] if len(sites) == 1 else f"{sites[0]} and {len(sites) - 1} more"


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
    counted = Counter(op_in_words(node.op_type) for node in graph.node)
    ops = counted.most_common(MAX_OPS)
    return SegmentRow(
        name=name,
        path=run.segment,
        site=run.site,
        nodes=len(graph.node),
        ops=", ".join(op if number == 1 else f"{op}\u00a0×\u00a0{number}" for op, number in ops),
        is_all=0 < len(counted) <= MAX_OPS,
        work=operations(run.flops) if run.flops else "–",
        touched=size(run.touched_bytes),
        file_size=size(path.stat().st_size),
        updates=_updates(run, variable_of),
        ranks=plural(sum(run.site in rank.sites for rank in plan.ranks), "rank"),
    )


def is_server(plan: Plan, rank: Rank) -> bool:
    """Tell whether a rank keeps elements of a variable that lives on servers."""
    served = {variable.name: variable for variable in plan.variables if variable.method == "servers"}
    return "server" in rank.sites and any(
        piece.variable in served and piece_bytes(piece, served[piece.variable]) for piece in rank.pieces
    )


def is_idle(plan: Plan, rank: Rank) -> bool:
    """Tell whether a rank has nothing to do: a worker without operators, or a server without variables."""
    if rank.replica is not None:
        return IDLE in rank.sites
    return not is_server(plan, rank) and not instructions_of(plan, rank)


def roles_of(plan: Plan, rank: Rank) -> tuple[Site, ...]:
    """Return the sites that a rank plays. A worker is a server too where it keeps something for all."""
    return tuple(s for s in rank.sites if s != "server" or rank.sites == (s,) or is_server(plan, rank))


def op_in_words(op: str) -> str:
    """Return an op without the sizes in its name: MaxPoolGrad of MaxPoolGrad_3x3s2x2_26x26_float32."""
    return SIZES.sub("", op)


def _updates(run: Run, variable_of: Mapping[str, str]) -> str:
    """Name the variables that a segment writes."""
    variables = [variable_of[value] for _, value in run.writes if value in variable_of]
    if len(variables) > MAX_OPS:
        return f"{', '.join(variables[:MAX_OPS])} and {len(variables) - MAX_OPS} more"
    return join_words(variables) if variables else ""


def instruction_words(compilation: Compilation, segments: tuple[SegmentRow, ...]) -> dict[int, Words]:
    """Return runs and communications in words, by their place in the plan's instructions."""
    by_path = {segment.path: _run_words(segment) for segment in segments}
    names = MessageNames(compilation)
    words: dict[int, Words] = {}
    for number, instruction in enumerate(compilation.plan.instructions):
        if isinstance(instruction, Run):
            words[number] = by_path[instruction.segment]
        elif isinstance(instruction, Start):
            words[number] = names.words(instruction)
    return words


def names_of_messages(words: Mapping[int, Words]) -> dict[int, str]:
    """Return what each communication moves, the same for all micro-batches."""
    return {
        number: message.what.partition(MICROBATCH)[0]
        for number, message in words.items()
        if message.kind != "compute"
    }


def _run_words(segment: SegmentRow) -> Words:
    updates = f"; updates {segment.updates}" if segment.updates else ""
    nodes = plural(segment.nodes, "node")
    return Words("compute", segment.name, f"{segment.name} ({segment.site}): {nodes}{_of(segment)}{updates}")


def _of(segment: SegmentRow) -> str:
    """Say what a segment's nodes are: the most frequent, or all."""
    if segment.is_all:
        return f" ({segment.ops})"
    return f", most of them {segment.ops}" if segment.ops else ""


def describe_listings(
    plan: Plan, segments: tuple[SegmentRow, ...], words: Mapping[int, Words]
) -> tuple[ProgramListing, ...]:
    """Return each program once, of the first rank that has it; no more than MAX_LISTINGS."""
    kinds: dict[tuple[object, ...], Rank] = {}
    for rank in plan.ranks:
        kinds.setdefault((rank.sites, rank.kind), rank)
    by_path = {segment.path: segment for segment in segments}
    numbers = {id(instruction): number for number, instruction in enumerate(plan.instructions)}
    listings: dict[object, ProgramListing] = {}
    for rank in kinds.values():
        listing = _listing(plan, rank, by_path, words, numbers)
        listings.setdefault((roles_of(plan, rank), listing.steps, listing.left_out), listing)
        if len(listings) == MAX_LISTINGS:
            break
    return tuple(listings.values())


def _listing(
    plan: Plan,
    rank: Rank,
    segments: Mapping[str, SegmentRow],
    words: Mapping[int, Words],
    numbers: Mapping[int, int],
) -> ProgramListing:
    instructions = instructions_of(plan, rank)
    steps: list[ProgramStep] = []
    for _, together in groupby(instructions, key=_kind_of):
        alike = list(together)
        match alike[0]:
            case Run():
                steps += [_run_step(run, segments) for run in alike if isinstance(run, Run)]
            case Wait():
                steps.append(_wait_step([wait.tag_id for wait in alike if isinstance(wait, Wait)]))
            case Start():
                starts = [(start, words[numbers[id(start)]]) for start in alike if isinstance(start, Start)]
                steps += _start_steps(starts, plan, rank)
            case _:
                steps += [_store_step(store) for store in alike if isinstance(store, Store)]
    plays = " and ".join(roles_of(plan, rank))
    return ProgramListing(
        f"Rank {rank.rank}, {rank.device}, {plays}: {plural(len(instructions), 'instruction')}",
        tuple(steps[:MAX_STEPS]),
        max(0, len(steps) - MAX_STEPS),
    )


def _kind_of(instruction: Instruction) -> object:
    """Return what instructions that follow each other must have in common to be told together."""
    if isinstance(instruction, Start):
        return Start, instruction.kind, instruction.group
    return type(instruction)


def _run_step(run: Run, segments: Mapping[str, SegmentRow]) -> ProgramStep:
    segment = segments[run.segment]
    remark = f"{plural(segment.nodes, 'node')}, {segment.touched} touched"
    updates = f"; updates {segment.updates}" if segment.updates else ""
    return ProgramStep("run", "run", f"{segment.name} ({run.site})", remark + updates)


def _wait_step(tags: Sequence[int]) -> ProgramStep:
    return ProgramStep("wait", "wait", f"for {_tags(tags)}", "")


def _store_step(store: Store) -> ProgramStep:
    return ProgramStep("store", "store", f"{store.source} → {store.target}", "")


def _start_steps(starts: Sequence[tuple[Start, Words]], plan: Plan, rank: Rank) -> list[ProgramStep]:
    """Tell communications of one kind and group that follow each other, together if there are many."""
    first, words = starts[0]
    members = plural(len(members_of(plan, first.group, rank)), "rank")
    if len(starts) < ALIKE:
        return [
            ProgramStep(
                words.kind,
                "start",
                f"#{start.tag_id} {words.short}",
                ": ".join([", ".join([f"among {members}", *_amount(start.payload_bytes)]), words.what]),
            )
            for start, words in starts
        ]
    amount = ", ".join([f"among {members}", *_amount(sum(start.payload_bytes for start, _ in starts))])
    tags = _tags([start.tag_id for start, _ in starts])
    others = f"{words.what}, and {len(starts) - 1} more of the kind"
    return [ProgramStep(words.kind, "start", f"{tags} {words.short}", f"{amount} together: {others}")]


def _amount(payload_bytes: int) -> list[str]:
    return [size(payload_bytes)] if payload_bytes else []


def _tags(tags: Sequence[int]) -> str:
    return f"#{some_ranges(tags)}"
