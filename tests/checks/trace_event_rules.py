"""The rules of Chrome's trace event format that a viewer needs, for the two phases that partc writes."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

NAMES = {"process_name": "name", "thread_name": "name"}
SORTS = {"process_sort_index": "sort_index", "thread_sort_index": "sort_index"}


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return a file's events, checked."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    check_events(events)
    return events


def check_events(events: list[dict[str, Any]]) -> None:
    """Assert every rule."""
    assert events
    for event in events:
        _check_common(event)
        {"X": _check_complete, "M": _check_metadata}[event["ph"]](event)
    _check_all_named(events)
    complete = [event for event in events if event["ph"] == "X"]
    assert [e["ts"] for e in complete] == sorted(e["ts"] for e in complete), "not sorted by ts"
    _check_no_overlap(complete)


def _check_common(event: dict[str, Any]) -> None:
    assert isinstance(event["name"], str) and event["name"]
    assert type(event["pid"]) is int and type(event["tid"]) is int
    assert isinstance(event["ts"], int | float) and event["ts"] >= 0
    assert isinstance(event["args"], dict)


def _check_complete(event: dict[str, Any]) -> None:
    assert isinstance(event["dur"], int | float) and event["dur"] >= 0
    assert isinstance(event["cat"], str) and event["cat"]


def _check_metadata(event: dict[str, Any]) -> None:
    assert event["name"] in NAMES | SORTS
    value = event["args"][(NAMES | SORTS)[event["name"]]]
    assert isinstance(value, str) if event["name"] in NAMES else type(value) is int


def _check_all_named(events: list[dict[str, Any]]) -> None:
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    processes = {pid for name, pid, _ in named if name == "process_name"}
    for event in events:
        if event["ph"] == "X":
            assert event["pid"] in processes
            assert ("thread_name", event["pid"], event["tid"]) in named


def _check_no_overlap(complete: list[dict[str, Any]]) -> None:
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in complete:
        lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in lanes.values():
        for one, other in pairwise(events):
            end_ns = round(one["ts"] * 1000) + round(one["dur"] * 1000)
            assert end_ns <= round(other["ts"] * 1000), (one, other)


def process_names(events: list[dict[str, Any]]) -> dict[str, int]:
    """Return process name -> pid."""
    return {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}


def thread_names(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return tid -> thread name."""
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
