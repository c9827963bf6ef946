import json
from pathlib import Path
from typing import Any

import pytest

from partc.compiler.traces.trace_events import Bar, write_trace
from tests.checks.trace_event_rules import check_events, process_names, read_trace, thread_names


def bar(begin_s: float, end_s: float, thread: str = "communication", process: str = "a") -> Bar:
    return Bar(process, thread, "sum", "communication", begin_s, end_s, {"bytes": 4})


def written(path: Path, *bars: Bar, processes: tuple[str, ...] = ("a", "b")) -> list[dict[str, Any]]:
    write_trace(path, bars, processes)
    return read_trace(path)


def test_a_bar_is_a_complete_event_in_microseconds(tmp_path: Path) -> None:
    events = written(tmp_path / "t.json", bar(0.001, 0.0035))

    (event,) = [event for event in events if event["ph"] == "X"]
    assert (event["ts"], event["dur"], event["args"]) == (1000.0, 2500.0, {"bytes": 4})


def test_what_overlaps_moves_to_another_thread_and_returns_when_the_first_is_free(tmp_path: Path) -> None:
    events = written(tmp_path / "t.json", bar(0, 2), bar(1, 3), bar(2, 4))

    threads = thread_names(events)
    shown = [(event["ts"], threads[event["tid"]]) for event in events if event["ph"] == "X"]
    assert shown == [(0, "communication"), (1e6, "communication 2"), (2e6, "communication")]


def test_ends_that_meet_before_rounding_meet_after_it(tmp_path: Path) -> None:
    third = 1 / 3
    events = written(tmp_path / "t.json", *(bar(i * third, (i + 1) * third) for i in range(50)))

    assert set(thread_names(events).values()) == {"communication"}


def test_processes_keep_the_order_that_was_asked_for(tmp_path: Path) -> None:
    events = written(tmp_path / "t.json", bar(0, 1), bar(0, 1, process="b"), processes=("b", "a"))

    sorts = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    pids = process_names(events)
    assert sorts[pids["b"]] < sorts[pids["a"]]


def test_equal_bars_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_trace(tmp_path / name, [bar(0, 1), bar(0.5, 2)], ["a"])

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


BREAKS = {
    "unsorted": lambda e: e.reverse(),
    "negative": lambda e: e[-1].update(dur=-1.0),
    "unnamed": lambda e: e[-1].update(tid=77),
    "overlapping": lambda e: e[-2].update(dur=e[-1]["ts"] + 1e6),
    "unknown phase": lambda e: e[-1].update(ph="Z"),
    "fractional process": lambda e: e[-1].update(pid=1.0),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_rules_refuse_a_trace_that_is(tmp_path: Path, name: str) -> None:
    write_trace(tmp_path / "t.json", [bar(0, 1), bar(1, 2)], ["a"])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    check_events(events)
    BREAKS[name](events)

    with pytest.raises((AssertionError, KeyError)):
        check_events(events)
