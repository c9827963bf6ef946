"""A step's predicted timeline: a row per rank, a lane to compute and one to communicate.

Ranks that do the same at the same time share a row once there are more than FEW_RANKS. A row's bars of one
colour are one path, so that many are as quick as one; templates/timeline.js stretches the paths to
what is in view, and finds the bar under the pointer in `TimelinePicture.data`.

    x   0 .. UNITS: the step        y   0 .. HEIGHT: computing above, communication below
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

import numpy as np

from partc.compiler.report.describe_messages import Words
from partc.compiler.report.methods import KEYS, Key
from partc.compiler.report.units import plural, seconds, some_ranges
from partc.cost.network.ways import Array
from partc.cost.simulation.timeline import Bars, Timeline
from partc.runtime.plan.program import Plan, Rank

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
WordsOf = Mapping[int, Words]  # of the plan's instructions, by their place

UNITS = 1_000_000  # of time in a step: thousands of bars are told apart when the view is enlarged
HEIGHT, COMPUTE, GAP = 46, 26, 2
FEW_RANKS = 6
MAX_ROWS = 20
TICKS = 6
BUSY_END = (
    0.25  # communication behind the last long computation has a button if it is shorter than this share
)


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
    compute: str
    communicate: str
    idle: str


@dataclass(frozen=True, slots=True)
class TimelinePicture:
    """Everything that the template draws, and what its script is given.

    data    step_s; end: where the busy end begins, in units; words: (kind, short, what), by number;
            rows: for each its name and two lanes of [units since the bar before, units that it lasts,
            its words, bytes], one after the other
    """

    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]
    keys: tuple[Key, ...]
    left_out: int
    data: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Event:
    start_s: float
    stop_s: float
    instruction: int
    payload_bytes: int


def draw_timeline(timeline: Timeline, plan: Plan, words: WordsOf) -> TimelinePicture | None:
    """Return the step's picture; None where nothing takes any time. `words`: of runs and starts."""
    if timeline.step_s <= 0.0:
        return None
    groups = _group_ranks(timeline, plan)
    listed = groups[:MAX_ROWS]
    numbers: dict[Words, int] = {}
    rows, data = [], []
    for members in listed:
        lanes = [_events(timeline, members[0], lane) for lane in ("compute", "communication")]
        rows.append(_row(members, lanes, timeline.step_s, plan, words))
        data.append(
            {
                "name": f"{rows[-1].name} ({rows[-1].remark})",
                "lanes": [_encode(lane, timeline.step_s, words, numbers) for lane in lanes],
            }
        )
    kinds = {word.kind for word in numbers}
    end_s = _busy_end_s(timeline)
    return TimelinePicture(
        rows=tuple(rows),
        ticks=_ticks(timeline.step_s),
        keys=tuple(key for key in KEYS if key.kind in kinds),
        left_out=len(groups) - len(listed),
        data={
            "step_s": timeline.step_s,
            "end": None if end_s is None else round(end_s / timeline.step_s * UNITS),
            "words": [[word.kind, word.short, word.what] for word in numbers],
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


def _events(timeline: Timeline, rank: int, lane: str) -> list[_Event]:
    """Return what a rank does in a lane and takes any time, by time."""
    found = []
    for bars in timeline.bars:
        for at in np.flatnonzero(bars.ranks == rank) if bars.lane == lane else ():
            event = _event(bars, int(at))
            if event.stop_s > event.start_s:
                found.append(event)
    return sorted(found, key=lambda event: event.start_s)


def _event(bars: Bars, at: int) -> _Event:
    return _Event(
        float(bars.start_s[at]), float(bars.stop_s[at]), bars.instruction, int(bars.payload_bytes[at])
    )


def _row(
    members: list[int], lanes: Sequence[Sequence[_Event]], step_s: float, plan: Plan, words: WordsOf
) -> Row:
    rank = plan.ranks[members[0]]
    compute_s, communicate_s = (sum(event.stop_s - event.start_s for event in lane) for lane in lanes)
    return Row(
        name=f"{'rank' if len(members) == 1 else 'ranks'} {some_ranges(members, 2)}",
        remark=rank.device if len(members) == 1 else _who(members, rank, plan),
        plays=" + ".join(rank.sites),
        paths=_paths(lanes, step_s, words),
        compute=seconds(compute_s),
        communicate=seconds(communicate_s),
        idle=seconds(step_s - compute_s),
    )


def _who(members: list[int], first: Rank, plan: Plan) -> str:
    """Name several ranks that do the same; `first` is one of them."""
    if tuple(members) in plan.groups.get("leaders", ()):
        return "first worker of each host"
    return plural(len(members), first.sites[0])


def _paths(lanes: Sequence[Sequence[_Event]], step_s: float, words: WordsOf) -> tuple[BarPath, ...]:
    drawn: dict[str, list[str]] = {}
    for number, lane in enumerate(lanes):
        y, height = (0, COMPUTE) if number == 0 else (COMPUTE + GAP, HEIGHT - COMPUTE - GAP)
        for event in lane:
            start, stop = _units(event, step_s)
            bar = f"M{start} {y}h{max(1, stop - start)}v{height}H{start}z"
            drawn.setdefault(words[event.instruction].kind, []).append(bar)
    return tuple(BarPath(kind, "".join(bars)) for kind, bars in drawn.items())


def _units(event: _Event, step_s: float) -> tuple[int, int]:
    return round(event.start_s / step_s * UNITS), round(event.stop_s / step_s * UNITS)


def _encode(lane: Iterable[_Event], step_s: float, words: WordsOf, numbers: dict[Words, int]) -> list[int]:
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
    """Return the longest events, those in the same words counted once: where it takes longest."""
    bars_by_words: dict[Words, list[Bars]] = {}
    for bars in timeline.bars:
        bars_by_words.setdefault(words[bars.instruction], []).append(bars)
    longest = [(max(map(_longest_of, same), key=_length_s), same) for same in bars_by_words.values()]
    longest.sort(key=lambda group: (-_length_s(group[0]), group[0].start_s, group[0].instruction))
    return tuple(_describe(event, same, words[event.instruction]) for event, same in longest[:MAX_LISTED])


def _longest_of(bars: Bars) -> _Event:
    lengths_s: Array = bars.stop_s - bars.start_s
    return _event(bars, int(lengths_s.argmax()))


def _length_s(event: _Event) -> float:
    return event.stop_s - event.start_s


def _describe(event: _Event, same: list[Bars], words: Words) -> LongEvent:
    return LongEvent(
        kind=words.kind,
        what=words.what if words.kind == "compute" else f"{words.what} ({words.short})",
        where=plural(len(np.unique(np.concatenate([bars.ranks for bars in same]))), "rank"),
        start=seconds(event.start_s),
        length=seconds(_length_s(event)),
    )
