"""The simulator's timeline of one step, as bars of a trace."""

from partc.compiler.reporting.describe_program import segment_names
from partc.compiler.traces.trace_events import Bar
from partc.cost.timeline import Event, Timeline
from partc.runtime.program import Plan, Rank


def predicted_process(rank: Rank) -> str:
    """Return the name of a rank's process in the trace."""
    return f"rank {rank.rank} {rank.device}: predicted"


def predicted_bars(plan: Plan, timeline: Timeline) -> list[Bar]:
    """Return what every rank is predicted to do in a step that begins at 0."""
    process = {rank.rank: predicted_process(rank) for rank in plan.ranks}
    names = segment_names(plan)
    steps = [Bar(name, "step", "step", "step", 0.0, timeline.step_s) for name in process.values()]
    return steps + [_bar(event, process[event.rank], names) for event in timeline.events]


def _bar(event: Event, process: str, names: dict[str, str]) -> Bar:
    if event.lane == "communication":
        details: dict[str, str | int | float] = {"bytes": event.payload_bytes}
        return Bar(process, event.lane, event.label, "communication", event.start_s, event.stop_s, details)
    site, _, digest = event.label.partition(" ")
    name = f"{names[digest]} ({site})"
    return Bar(process, event.lane, name, "run", event.start_s, event.stop_s, {"segment": digest})
