"""A step's predicted timeline as a picture: a row per rank, a lane to compute and one to communicate.

Ranks that do the same at the same time share a row once there are more than FEW_RANKS.

The events that take longest are a list, too, for those who cannot point at a picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any, Literal

import numpy as np

from partc.compiler.report.methods import method_of_label
from partc.compiler.report.units import plural, seconds, shorten, size, some_ranges
from partc.cost.simulation.timeline import Bars, Event, Timeline
from partc.runtime.plan.program import Plan, Rank

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

WIDTH = 1080
LABEL_WIDTH = 190
ROW, COMPUTE, COMMUNICATE, TOP = 62, 26, 18, 26
FEW_RANKS = 6
MAX_ROWS = 12
CHARACTER = 7.4  # width of a character of a bar's label
REMARK_CHARACTERS = 25  # fit left of the bars
THINNEST = 1.0
TICKS = 8
ZOOM_BELOW = 0.25  # communication shorter than this share of the step gets a picture of its own


@dataclass(frozen=True, slots=True)
class TimeBar:
    """An event, drawn."""

    x: float
    y: float
    width: float
    height: float
    kind: str  # compute, or the method that a communication serves
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of the time axis."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, or several that behave alike."""

    y: float
    name: str
    remark: str
    plays: str
    bars: tuple[TimeBar, ...]
    compute: str
    communicate: str
    idle: str


@dataclass(frozen=True, slots=True)
class Gantt:
    """Everything that the template draws."""

    title: str
    width: float
    height: float
    left: float
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Span:
    """The part of the step that a picture shows."""

    start_s: float
    stop_s: float

    def x(self, time_s: float) -> float:
        """Return where a time lies in the picture, clamped to its edges."""
        share = (time_s - self.start_s) / (self.stop_s - self.start_s)
        return LABEL_WIDTH + min(1.0, max(0.0, share)) * (WIDTH - LABEL_WIDTH)


def draw_timelines(timeline: Timeline, plan: Plan, segment_names: dict[str, str]) -> tuple[Gantt, ...]:
    """Return the step's picture, and a second one of its end where communication is too thin to see.

    segment_names: a segment's file name, without .onnx -> what the page calls it
    """
    if timeline.step_s <= 0.0:
        return ()
    groups = _group_ranks(timeline, plan)
    whole = _draw("The whole step", Span(0.0, timeline.step_s), groups, timeline, plan, segment_names)
    zoom = _busy_end(timeline)
    if zoom is None:
        return (whole,)
    title = f"The last {seconds(zoom.stop_s - zoom.start_s)} of it, enlarged"
    return (whole, _draw(title, zoom, groups, timeline, plan, segment_names))


def _busy_end(timeline: Timeline) -> Span | None:
    """Return the end of the step from its last long computation on, if that is short."""
    computing = [bars for bars in timeline.bars if bars.lane == "compute"]
    if not computing:
        return None
    lengths_s = np.concatenate([bars.stop_s - bars.start_s for bars in computing])
    stop_s = np.concatenate([bars.stop_s for bars in computing])[int(lengths_s.argmax())]
    rest_s = timeline.step_s - float(stop_s)
    if not 0.0 < rest_s < ZOOM_BELOW * timeline.step_s:
        return None
    return Span(float(stop_s) - 0.04 * rest_s, timeline.step_s)


def _group_ranks(timeline: Timeline, plan: Plan) -> list[list[int]]:
    """Return the ranks with events, those with equal events together."""
    if len(plan.ranks) <= FEW_RANKS:
        return [[rank.rank] for rank in plan.ranks]
    kinds = np.zeros(len(plan.ranks), np.uint64)  # a hash of each rank's events so far
    for number, bars in enumerate(timeline.bars):
        # To a billionth of the step: the simulator's sums differ in the last bits from rank to rank.
        times = np.rint(np.stack([bars.start_s, bars.stop_s]) / (timeline.step_s or 1.0) * 1e9)
        event = [np.full(len(bars.ranks), number, np.uint64), *times.astype(np.uint64)]
        for part in event:
            kinds[bars.ranks] = _mix(kinds[bars.ranks] ^ part)
    groups: dict[int, list[int]] = {}
    for rank, kind in enumerate(kinds.tolist()):
        groups.setdefault(kind, []).append(rank)
    return list(groups.values())


def _mix(hashes: Hashes) -> Hashes:
    """Scatter every bit of uint64 over all of them (Steele, Lea, Flood 2014, the finaliser of SplitMix64)."""
    hashes = hashes + np.uint64(0x9E3779B97F4A7C15)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _draw(
    title: str,
    span: Span,
    groups: list[list[int]],
    timeline: Timeline,
    plan: Plan,
    segment_names: dict[str, str],
) -> Gantt:
    visible_groups = groups[:MAX_ROWS]
    rows = tuple(
        _row(members, TOP + index * ROW, span, timeline, plan, segment_names)
        for index, members in enumerate(visible_groups)
    )
    return Gantt(
        title=title,
        width=WIDTH,
        height=TOP + ROW * len(visible_groups),
        left=LABEL_WIDTH,
        rows=rows,
        ticks=_ticks(span),
        left_out=len(groups) - len(visible_groups),
    )


def _row(
    members: list[int], y: float, span: Span, timeline: Timeline, plan: Plan, segment_names: dict[str, str]
) -> Row:
    own = timeline.events_of(members[0])
    bars = [
        _bar(event, y, span, segment_names)
        for event in own
        if event.stop_s > span.start_s and event.start_s < span.stop_s and _length_s(event) > 0.0
    ]
    rank = next(rank for rank in plan.ranks if rank.rank == members[0])
    compute_s, communicate_s = _total_s(own, "compute"), _total_s(own, "communication")
    return Row(
        y=y,
        name=f"{'rank' if len(members) == 1 else 'ranks'} {some_ranges(members, 2)}",
        remark=shorten(rank.device, REMARK_CHARACTERS) if len(members) == 1 else _who(members, rank, plan),
        plays=" + ".join(rank.sites),
        bars=tuple(bars),
        compute=seconds(compute_s),
        communicate=seconds(communicate_s),
        idle=seconds(timeline.step_s - compute_s),
    )


def _who(members: list[int], first: Rank, plan: Plan) -> str:
    """Name several ranks that do the same; `first` is one of them."""
    if tuple(members) in plan.groups.get("leaders", ()):
        return "first worker of each host"
    return plural(len(members), first.sites[0])


def _bar(event: Event, y: float, span: Span, segment_names: dict[str, str]) -> TimeBar:
    computes = event.lane == "compute"
    label, what = event.label, ""
    if computes:
        site, _, digest = event.label.partition(" ")
        label = segment_names.get(digest, digest)
        what = f" ({site})"
    else:
        what = f", {size(event.payload_bytes)} a rank" if event.payload_bytes else ""
    x = span.x(event.start_s)
    width = max(THINNEST, span.x(event.stop_s) - x)
    times = f"{seconds(_length_s(event))}, from {seconds(event.start_s)} to {seconds(event.stop_s)}"
    short = label.partition(" ")[0]
    return TimeBar(
        x=x,
        y=y + (4 if computes else 6 + COMPUTE),
        width=width,
        height=COMPUTE if computes else COMMUNICATE,
        kind="compute" if computes else method_of_label(event.label),
        label=short if width > len(short) * CHARACTER + 6 else "",
        title=f"{label}{what}: {times}",
    )


def _ticks(span: Span) -> tuple[Tick, ...]:
    step_s = _round_step(span.stop_s - span.start_s)
    first = int(-(-span.start_s // step_s))
    ticks: list[Tick] = []
    while (first + len(ticks)) * step_s <= span.stop_s * (1 + 1e-12):
        time_s = (first + len(ticks)) * step_s
        ticks.append(Tick(span.x(time_s), seconds(time_s)))
    return tuple(ticks)


def _round_step(length_s: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that about TICKS marks fit."""
    rough = length_s / TICKS
    power: float = 10.0 ** floor(log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _length_s(event: Event) -> float:
    return event.stop_s - event.start_s


def _total_s(events: Sequence[Event], lane: Literal["compute", "communication"]) -> float:
    return sum(_length_s(event) for event in events if event.lane == lane)


MAX_LISTED = 8


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
    bars_by_name: dict[tuple[str, str], list[Bars]] = {}
    for bars in timeline.bars:
        bars_by_name.setdefault((bars.lane, bars.label), []).append(bars)
    longest = [(max(map(_longest_of, same), key=_length_s), same) for same in bars_by_name.values()]
    longest.sort(key=lambda group: (-_length_s(group[0]), group[0].start_s, group[0].label))
    return tuple(_describe(event, same, segment_names) for event, same in longest[:MAX_LISTED])


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
