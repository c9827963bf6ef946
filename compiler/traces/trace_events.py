"""Write bars as a file in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

    process   a rank, as predicted or as measured       M  names it and places it
    thread    what it does at one time: its step, its computation, its communication
    bar       a complete event                          X  from `ts`, for `dur` microseconds

Bars of one thread never overlap: where several communications of a rank are under way at once, the
later ones move to further threads of their own.

Source: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from partc.runtime.whole_file import write_whole

NANOSECONDS = 1e9  # times are rounded to these, as integers, so that ends meet exactly
_MAX_THREADS = 1000  # of one process: process 2, thread 3 has tid 2003

Detail = str | int | float


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasted, in seconds from the trace's beginning."""

    process: str
    thread: str
    name: str
    category: str
    begin_s: float
    end_s: float
    details: dict[str, Detail] = field(default_factory=dict)


class Complete(msgspec.Struct, frozen=True, tag_field="ph", tag="X"):
    """A bar."""

    name: str
    cat: str
    pid: int
    tid: int
    ts: float  # microseconds
    dur: float
    args: dict[str, Detail]


class Metadata(msgspec.Struct, frozen=True, tag_field="ph", tag="M"):
    """A name or a place for a process or a thread."""

    name: str
    pid: int
    tid: int
    args: dict[str, str | int]
    ts: float = 0.0


class Trace(msgspec.Struct, frozen=True, rename="camel"):
    """The file."""

    trace_events: list[Metadata | Complete]
    display_time_unit: str = "ms"


def write_trace(path: Path, bars: Iterable[Bar], processes: Sequence[str]) -> None:
    """Write bars; `processes` are shown in this order. Equal bars give equal bytes."""
    write_whole(path, msgspec.json.encode(trace_of(bars, processes), order="deterministic") + b"\n")


def trace_of(bars: Iterable[Bar], processes: Sequence[str]) -> Trace:
    """Return the trace: first the names, then the bars by time."""
    pids = {process: pid for pid, process in enumerate(processes, 1)}
    events: list[Complete] = []
    threads: dict[tuple[int, str], int] = {}
    for (process, thread), of_thread in _by_thread(bars).items():
        pid = pids[process]
        for bar, lane in _without_overlap(of_thread):
            name = thread if lane == 1 else f"{thread} {lane}"
            used = sum(other == pid for other, _ in threads)
            tid = threads.setdefault((pid, name), pid * _MAX_THREADS + used)
            events.append(_complete(bar, pid, tid))
    events.sort(key=lambda event: (event.ts, event.pid, event.tid, event.dur))
    return Trace([*_names(pids, threads), *events])


def _by_thread(bars: Iterable[Bar]) -> dict[tuple[str, str], list[Bar]]:
    threads: dict[tuple[str, str], list[Bar]] = {}
    for bar in bars:
        threads.setdefault((bar.process, bar.thread), []).append(bar)
    return threads


def _without_overlap(bars: Iterable[Bar]) -> list[tuple[Bar, int]]:
    """Give every bar the first lane, counted from 1, that is free when it begins."""
    free_ns: list[int] = []
    bars_on_lanes: list[tuple[Bar, int]] = []
    for bar in sorted(bars, key=lambda bar: (bar.begin_s, bar.end_s)):
        begin_ns, end_ns = _ns(bar.begin_s), _ns(bar.end_s)
        lane = next((lane for lane, until_ns in enumerate(free_ns) if until_ns <= begin_ns), len(free_ns))
        free_ns[lane : lane + 1] = [end_ns]
        bars_on_lanes.append((bar, lane + 1))
    return bars_on_lanes


def _complete(bar: Bar, pid: int, tid: int) -> Complete:
    begin_ns, end_ns = _ns(bar.begin_s), _ns(bar.end_s)
    return Complete(
        bar.name, bar.category, pid, tid, begin_ns / 1000, max(0, end_ns - begin_ns) / 1000, bar.details
    )


def _ns(time_s: float) -> int:
    return round(time_s * NANOSECONDS)


def _names(pids: dict[str, int], threads: dict[tuple[int, str], int]) -> list[Metadata]:
    metadata: list[Metadata] = []
    for process, pid in pids.items():
        metadata.append(Metadata("process_name", pid, 0, {"name": process}))
        metadata.append(Metadata("process_sort_index", pid, 0, {"sort_index": pid}))
    for (pid, thread), tid in threads.items():
        metadata.append(Metadata("thread_name", pid, tid, {"name": thread}))
        metadata.append(Metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
    return metadata
