"""The events of a step that take longest, as a list for those who cannot point at a picture."""

from dataclasses import dataclass

import numpy as np

from partc.compiler.reporting.methods import method_of_label
from partc.compiler.reporting.units import plural, seconds
from partc.cost.timeline import Bars, Event, Timeline

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
    named: dict[tuple[str, str], list[Bars]] = {}
    for bars in timeline.bars:
        named.setdefault((bars.lane, bars.label), []).append(bars)
    longest = [(max(map(_longest_of, same), key=_length_s), same) for same in named.values()]
    longest.sort(key=lambda found: (-_length_s(found[0]), found[0].start_s, found[0].label))
    return tuple(_describe(event, same, segment_names) for event, same in longest[:MOST])


def _length_s(event: Event) -> float:
    return event.stop_s - event.start_s


def _longest_of(bars: Bars) -> Event:
    at = int((bars.stop_s - bars.start_s).argmax())
    times = float(bars.start_s[at]), float(bars.stop_s[at])
    return Event(int(bars.ranks[at]), bars.lane, bars.label, *times, int(bars.payload_bytes[at]))


def _describe(event: Event, same: list[Bars], segment_names: dict[str, str]) -> LongEvent:
    computes = event.lane == "compute"
    site, _, digest = event.label.partition(" ")
    return LongEvent(
        kind="compute" if computes else method_of_label(event.label),
        what=f"{segment_names.get(digest, digest)} ({site})" if computes else event.label,
        where=plural(len(np.unique(np.concatenate([bars.ranks for bars in same]))), "rank"),
        start=seconds(event.start_s),
        length=seconds(_length_s(event)),
    )
