"""The events of a step that take longest, as a list for those who cannot point at a picture."""

from dataclasses import dataclass

from partc.compiler.reporting.methods import method_of_label
from partc.compiler.reporting.units import plural, seconds
from partc.cost.timeline import Event, Timeline

MOST = 8


@dataclass(frozen=True, slots=True)
class LongEvent:
    """A computation or communication that several ranks may share."""

    kind: str  # compute, or the method that a communication serves
    what: str
    where: str
    start: str
    length: str


def list_longest(timeline: Timeline, segment_names: dict[str, str]) -> tuple[LongEvent, ...]:
    """Return the longest events, those of the same name counted once: where it takes longest."""
    longest: dict[tuple[str, str], list[Event]] = {}
    for event in timeline.events:
        longest.setdefault((event.lane, event.label), []).append(event)
    events = [max(same, key=lambda event: event.stop_s - event.start_s) for same in longest.values()]
    events.sort(key=lambda event: (event.start_s - event.stop_s, event.start_s, event.label))
    return tuple(_describe(event, longest[event.lane, event.label], segment_names) for event in events[:MOST])


def _describe(event: Event, same: list[Event], segment_names: dict[str, str]) -> LongEvent:
    computes = event.lane == "compute"
    site, _, digest = event.label.partition(" ")
    return LongEvent(
        kind="compute" if computes else method_of_label(event.label),
        what=f"{segment_names.get(digest, digest)} ({site})" if computes else event.label,
        where=plural(len({other.rank for other in same}), "rank"),
        start=seconds(event.start_s),
        length=seconds(event.stop_s - event.start_s),
    )
