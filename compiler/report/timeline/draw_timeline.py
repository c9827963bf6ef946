"""A step's predicted timeline: a row per rank, a lane to compute and one to communicate.

A row's bars of one colour are one path, so that many are as quick as one; templates/timeline.js stretches the
paths to what is in view, and finds the bar under the pointer in `TimelinePicture.data`.

    x   0 .. UNITS: the step        y   computing above; below it communication, in as many tracks as overlap
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10

import numpy as np

from partc.compiler.report.describe_messages import Words
from partc.compiler.report.describe_program import roles_of
from partc.compiler.report.methods import KEYS, LegendEntry
from partc.compiler.report.timeline.bar_events import BarEvent, WordsOf, event_of
from partc.compiler.report.timeline.group_ranks import apart_s_of, group_ranks
from partc.compiler.report.units import count, plural, seconds, some_ranges
from partc.cost.simulation.timeline import Timeline
from partc.runtime.plan.program import Plan, Rank

UNITS = 1_000_000  # of time in a step: thousands of bars are told apart when the view is enlarged
COMPUTE, GAP = 26, 2  # pixels: of the lane that computes, and below it
ONE_TRACK, TRACK, MOST_TRACKS = 18, 14, 6  # of the only track, of several; more than these share their room
TRACK_GAP = 0.1  # of a track, where there are several
MAX_ROWS = 20
TICKS = 6
APART = 1e-6  # of the step: ranks that begin the same so much apart are said to
BUSY_END = 0.25  # of the step: what follows the last long computation has a button if it is shorter


@dataclass(frozen=True, slots=True)
class BarPath:
    """All bars of a row that have one colour, as an SVG path."""

    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of the time axis."""

    share: float  # of the step
    label: str


@dataclass(frozen=True, slots=True)
class Row:
    """One rank, or several that behave alike."""

    name: str
    remark: str
    plays: str
    paths: tuple[BarPath, ...]
    height: float  # pixels
    compute: str
    communicate: str
    idle: str


@dataclass(frozen=True, slots=True)
class TimelinePicture:
    """Everything that the template draws, and what its script is given.

    data    step_s; end: where the busy end begins, in units; words: (kind, short, what), by number;
            instructions: the number of each one's words, -1 for those that have none;
            rows: for each its name; lanes, the first one computes, of [units since the bar before, units
            that it lasts, its words, bytes], one after the other; and each lane's [top, height] in pixels
    """

    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    keys: tuple[LegendEntry, ...]
    left_out: int
    data: Mapping[str, object]


def draw_timeline(timeline: Timeline, plan: Plan, words: WordsOf) -> TimelinePicture | None:
    """Return the step's picture; None where nothing takes any time. `words`: of runs and starts."""
    if timeline.step_s <= 0.0:
        return None
    groups = group_ranks(timeline, plan, MAX_ROWS)
    apart_s = apart_s_of(timeline, groups, len(plan.ranks))
    listed = groups[:MAX_ROWS]
    lanes_of = _lanes_of(timeline, [members[0] for members in listed], len(plan.ranks))
    busy = [pair for pair in zip(listed, apart_s.tolist(), strict=False) if any(lanes_of[pair[0][0]])]
    numbers: dict[Words, int] = {}
    rows, data = [], []
    for members, spread_s in busy:
        computing, communicating = lanes_of[members[0]]
        lanes = [computing, *_tracks(communicating, timeline.step_s)]
        places = _places(len(lanes) - 1)
        rows.append(_row(members, lanes, places, timeline.step_s, spread_s, plan, words))
        data.append(
            {
                "name": f"{rows[-1].name} ({rows[-1].remark})",
                "lanes": [_encode(lane, timeline.step_s, words, numbers) for lane in lanes],
                "places": places,
            }
        )
    kinds = {word.kind for word in numbers}
    end_s = _busy_end_s(timeline)
    instructions = [
        numbers.setdefault(words[number], len(numbers)) if number in words else -1
        for number in range(len(plan.instructions))
    ]
    return TimelinePicture(
        rows=tuple(rows),
        ticks=_ticks(timeline.step_s),
        keys=tuple(key for key in KEYS if key.kind in kinds),
        left_out=len(groups) - len(listed),
        data={
            "step_s": timeline.step_s,
            "end": None if end_s is None else round(end_s / timeline.step_s * UNITS),
            "words": [[word.kind, word.short, word.what] for word in numbers],
            "instructions": instructions,
            "rows": data,
        },
    )


def _busy_end_s(timeline: Timeline) -> float | None:
    """Return when the step's last long computation ends, if little of the step is left then."""
    computing = [bars for bars in timeline.bars if bars.lane == "compute"]
    if not computing:
        return None
    lengths_s = np.concatenate([bars.stop_s - bars.start_s for bars in computing])
    stop_s = float(np.concatenate([bars.stop_s for bars in computing])[int(lengths_s.argmax())])
    rest_s = timeline.step_s - stop_s
    return stop_s - 0.04 * rest_s if 0.0 < rest_s < BUSY_END * timeline.step_s else None


def _lanes_of(timeline: Timeline, ranks: Sequence[int], number: int) -> dict[int, list[list[BarEvent]]]:
    """Return what each of some ranks does and takes any time, computing and communicating, by time.

    `number`: of all ranks
    """
    lanes: dict[int, list[list[BarEvent]]] = {rank: [[], []] for rank in ranks}
    is_listed = np.zeros(number, bool)
    is_listed[list(ranks)] = True
    for bars in timeline.bars:
        for at in np.flatnonzero(is_listed[bars.ranks] & (bars.stop_s > bars.start_s)).tolist():
            lanes[int(bars.ranks[at])][bars.lane != "compute"].append(event_of(bars, at))
    for lane in (lane for of_rank in lanes.values() for lane in of_rank):
        lane.sort(key=lambda event: event.start_s)
    return lanes


def _tracks(events: Iterable[BarEvent], step_s: float) -> list[list[BarEvent]]:
    """Return events, by time, in as few tracks as keep those apart that overlap: one at least."""
    tracks: list[list[BarEvent]] = [[]]
    for event in events:
        start, _ = _units(event, step_s)
        free = (track for track in tracks if not track or _units(track[-1], step_s)[1] <= start)
        if (track := next(free, None)) is None:
            tracks.append(track := [])
        track.append(event)
    return tracks


def _places(tracks: int) -> list[tuple[float, float]]:
    """Return (top, height) of the lane that computes, and of each track that communicates."""
    if tracks == 1:
        return [(0, COMPUTE), (COMPUTE + GAP, ONE_TRACK)]
    room = TRACK * min(1.0, MOST_TRACKS / tracks)
    tops = (COMPUTE + GAP + number * room for number in range(tracks))
    return [(0, COMPUTE), *((round(top, 2), round(room * (1 - TRACK_GAP), 2)) for top in tops)]


def _row(
    members: list[int],
    lanes: Sequence[Sequence[BarEvent]],
    places: Sequence[tuple[float, float]],
    step_s: float,
    apart_s: float,
    plan: Plan,
    words: WordsOf,
) -> Row:
    spread = f", {seconds(apart_s)} apart" if apart_s > APART * step_s else ""
    rank = plan.ranks[members[0]]
    compute_s = sum(event.stop_s - event.start_s for event in lanes[0])
    communicate_s = sum(event.stop_s - event.start_s for lane in lanes[1:] for event in lane)
    return Row(
        name=f"{'rank' if len(members) == 1 else 'ranks'} {some_ranges(members, 2)}",
        remark=rank.device if len(members) == 1 else _who(members, rank, plan) + spread,
        plays=" + ".join(roles_of(plan, rank)),
        paths=_paths(lanes, places, step_s, words),
        height=sum(places[-1]),
        compute=seconds(compute_s),
        communicate=seconds(communicate_s),
        idle=seconds(step_s - compute_s),
    )


def _who(members: list[int], first: Rank, plan: Plan) -> str:
    """Name several ranks that do the same; `first` is one of them."""
    if tuple(members) in plan.groups.get("leaders", ()):
        return "first worker of each host"
    site = first.sites[0]
    return plural(len(members), site) if site in ("worker", "server") else f"{count(len(members))} of {site}"


def _paths(
    lanes: Sequence[Sequence[BarEvent]],
    places: Sequence[tuple[float, float]],
    step_s: float,
    words: WordsOf,
) -> tuple[BarPath, ...]:
    drawn: dict[str, list[str]] = {}
    for lane, (y, height) in zip(lanes, places, strict=True):
        for event in lane:
            start, stop = _units(event, step_s)
            bar = f"M{start} {y}h{max(1, stop - start)}v{height}H{start}z"
            drawn.setdefault(words[event.instruction].kind, []).append(bar)
    return tuple(BarPath(kind, "".join(bars)) for kind, bars in drawn.items())


def _units(event: BarEvent, step_s: float) -> tuple[int, int]:
    return round(event.start_s / step_s * UNITS), round(event.stop_s / step_s * UNITS)


def _encode(lane: Iterable[BarEvent], step_s: float, words: WordsOf, numbers: dict[Words, int]) -> list[int]:
    """Return a lane as the page's script reads it. `numbers`: those of the words so far."""
    encoded: list[int] = []
    before = 0
    for event in lane:
        start, stop = _units(event, step_s)
        number = numbers.setdefault(words[event.instruction], len(numbers))
        encoded += [start - before, stop - start, number, event.payload_bytes]
        before = stop
    return encoded


def _ticks(step_s: float) -> tuple[Tick, ...]:
    between_s = _round_step(step_s)
    return tuple(
        Tick(number * between_s / step_s, seconds(number * between_s))
        for number in range(floor(step_s / between_s * (1 + 1e-12)) + 1)
    )


def _round_step(length_s: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that about TICKS marks fit."""
    rough = length_s / TICKS
    power: float = 10.0 ** floor(log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
