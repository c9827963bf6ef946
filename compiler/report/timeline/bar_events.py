"""One bar of one rank, and the longest of all."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from partc.compiler.report.describe_messages import MICROBATCH, Words
from partc.compiler.report.units import plural, seconds
from partc.cost.network.ways import Array
from partc.cost.simulation.timeline import Bars, Timeline

WordsOf = Mapping[int, Words]  # of the plan's instructions, by their place


@dataclass(frozen=True, slots=True)
class BarEvent:
    """What a rank does for a time."""

    start_s: float
    stop_s: float
    instruction: int
    payload_bytes: int


def event_of(bars: Bars, at: int) -> BarEvent:
    """Return what the rank at a position of `bars.ranks` does."""
    return BarEvent(
        float(bars.start_s[at]), float(bars.stop_s[at]), bars.instruction, int(bars.payload_bytes[at])
    )


MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class LongEvent:
    """A computation or communication that several ranks may share."""

    kind: str  # compute, or the method that a communication serves
    what: str
    where: str
    start: str
    length: str


def list_longest(timeline: Timeline, words: WordsOf) -> tuple[LongEvent, ...]:
    """Return the longest events; of those in the same words, micro-batches aside, the longest alone."""
    bars_by_words: dict[Words, list[Bars]] = {}
    for bars in timeline.bars:
        instruction_words = words[bars.instruction]
        alike = replace(instruction_words, what=instruction_words.what.partition(MICROBATCH)[0])
        bars_by_words.setdefault(alike, []).append(bars)
    longest = [(max(map(_longest_of, same), key=_length_s), same) for same in bars_by_words.values()]
    longest.sort(key=lambda group: (-_length_s(group[0]), group[0].start_s, group[0].instruction))
    return tuple(_describe(event, same, words) for event, same in longest[:MAX_LISTED])


def _longest_of(bars: Bars) -> BarEvent:
    lengths_s: Array = bars.stop_s - bars.start_s
    return event_of(bars, int(lengths_s.argmax()))


def _length_s(event: BarEvent) -> float:
    return event.stop_s - event.start_s


def _describe(event: BarEvent, same: list[Bars], words: WordsOf) -> LongEvent:
    instruction_words = words[event.instruction]
    what, microbatch, _ = instruction_words.what.partition(MICROBATCH)
    if microbatch and len({words[bars.instruction].what for bars in same}) == 1:
        what = instruction_words.what
    return LongEvent(
        kind=instruction_words.kind,
        what=what if instruction_words.kind == "compute" else f"{what} ({instruction_words.short})",
        where=plural(len(np.unique(np.concatenate([bars.ranks for bars in same]))), "rank"),
        start=seconds(event.start_s),
        length=seconds(_length_s(event)),
    )
