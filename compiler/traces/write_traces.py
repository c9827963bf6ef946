"""Write the predicted timeline of a plan, and that of a run, with the prediction beside it.

A communication lasts from its Start to the end of its Wait: when its result could be read, not when
its last byte came.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from partc.compiler.report.describe_program import segment_names
from partc.compiler.traces.trace_events import Bar, write_trace
from partc.cost.cluster.cluster import read_cluster
from partc.cost.simulation.timeline import Event, Timeline, simulate
from partc.runtime.execution.recorder import RankTimes, StepTimes
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Instruction, Plan, Rank, Run, Start, Store, Wait, instructions_of


def predicted_process(rank: Rank) -> str:
    """Return the name of a rank's process in the trace."""
    return f"rank {rank.rank} {rank.device}: predicted"


def predicted_bars(plan: Plan, timeline: Timeline) -> list[Bar]:
    """Return what every rank is predicted to do in a step that begins at 0."""
    process = {rank.rank: predicted_process(rank) for rank in plan.ranks}
    names = segment_names(plan)
    steps = [Bar(name, "step", "step", "step", 0.0, timeline.step_s) for name in process.values()]
    draws = [
        Bar(process[rank], "compute", "draw its batch", "draw", 0.0, end_s)
        for rank, end_s in timeline.beside_s.items()
    ]
    return steps + draws + [_bar(event, process[event.rank], names) for event in timeline.events]


def _bar(event: Event, process: str, names: dict[str, str]) -> Bar:
    if event.lane == "communication":
        details: dict[str, str | int | float] = {"bytes": event.payload_bytes}
        return Bar(process, event.lane, event.label, "communication", event.start_s, event.stop_s, details)
    site, _, digest = event.label.partition(" ")
    name = f"{names[digest]} ({site})"
    return Bar(process, event.lane, name, "run", event.start_s, event.stop_s, {"segment": digest})


def measured_process(rank: Rank) -> str:
    """Return the name of a rank's process in the trace."""
    return f"rank {rank.rank} {rank.device}: measured"


def measured_bars(plan: Plan, times: Mapping[int, RankTimes]) -> list[Bar]:
    """Return the bars of all recorded steps; the first step begins at 0, on rank 0's clock."""
    ranks = [rank for rank in plan.ranks if rank.rank in times]
    steps = [(rank, step) for rank in ranks for step in times[rank.rank].steps if step.begin_s]
    origin_s = min((step.begin_s[0] + times[rank.rank].offset_s for rank, step in steps), default=0.0)
    names = segment_names(plan)
    bars: list[Bar] = []
    for rank, step in steps:
        shift_s = times[rank.rank].offset_s - origin_s
        bars += _bars_of_step(instructions_of(plan, rank), step, measured_process(rank), shift_s, names)
    return bars


def _bars_of_step(
    program: tuple[Instruction, ...], step: StepTimes, process: str, shift_s: float, names: Mapping[str, str]
) -> Iterator[Bar]:
    begins = [begin_s + shift_s for begin_s in step.begin_s]
    ends = [end_s + shift_s for end_s in step.end_s]
    yield Bar(process, "step", f"step {step.step}", "step", begins[0], ends[-1])
    starts = {i.tag_id: i for i in program if isinstance(i, Start)}
    complete = {i.tag_id: end_s for i, end_s in zip(program, ends, strict=True) if isinstance(i, Wait)}
    for instruction, begin_s, end_s, sent in zip(program, begins, ends, step.sent_bytes, strict=True):
        name = _name(instruction, starts, names)
        category = type(instruction).__name__.lower()
        yield Bar(process, "compute", name, category, begin_s, end_s, _details(instruction))
        if isinstance(instruction, Start):
            end_s = complete.get(instruction.tag_id, ends[-1])
            details: dict[str, str | int | float] = {"bytes": sent, "kind": instruction.kind}
            label = instruction.label or instruction.kind
            yield Bar(process, "communication", label, "communication", begin_s, end_s, details)


def _name(instruction: Instruction, starts: Mapping[int, Start], names: Mapping[str, str]) -> str:
    match instruction:
        case Run(site=site, segment=segment):
            return f"{names[PurePosixPath(segment).stem]} ({site})"
        case Store(target=target):
            return f"store {target}"
        case Start() | Wait():
            start = starts[instruction.tag_id]
            return f"{type(instruction).__name__.lower()} {start.label or start.kind}"


def _details(instruction: Instruction) -> dict[str, str | int | float]:
    if isinstance(instruction, Run):
        return {"segment": instruction.segment, "flops": instruction.flops}
    return {}


HOW_TO_OPEN = "Open a trace at https://ui.perfetto.dev (Open trace file), or in Chrome at chrome://tracing."


def write_predicted_trace(path: Path, plan: Plan, timeline: Timeline) -> None:
    """Write one step as the simulator sees it."""
    write_trace(path, predicted_bars(plan, timeline), [predicted_process(rank) for rank in plan.ranks])


def write_run_trace(path: Path, folder: PlanFolder, times: Mapping[int, RankTimes]) -> None:
    """Write the recorded steps, and beside the first of them the prediction, rank by rank: of all in `times`.

    A plan without its cluster.json has no prediction.
    """
    plan = folder.plan
    cluster = folder.path / "cluster.json"
    bars = measured_bars(plan, times)
    ranks = [rank for rank in plan.ranks if rank.rank in times]
    processes = [measured_process(rank) for rank in ranks]
    if cluster.exists():
        predicted = {predicted_process(rank) for rank in ranks}
        every = predicted_bars(plan, simulate(plan, read_cluster(cluster)))
        bars += [bar for bar in every if bar.process in predicted]
        processes = [name for rank in ranks for name in (predicted_process(rank), measured_process(rank))]
    write_trace(path, bars, processes)
