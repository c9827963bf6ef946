"""The timeline's data is decoded as the page's script does, and held to the simulator's events."""

import json
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from partc.compiler.report.describe_measured import words_of_page
from partc.compiler.report.describe_messages import Words
from partc.compiler.report.describe_program import describe_segments, instruction_words
from partc.compiler.report.timeline.bar_events import list_longest
from partc.compiler.report.timeline.draw_timeline import UNITS, TimelinePicture, draw_timeline
from partc.cost.simulation.timeline import Bars, Timeline
from tests.builders.plans.compiled_reports import Compiled


def drawn(compiled: Compiled) -> TimelinePicture:
    compilation = compiled.compilation
    words = instruction_words(compilation, describe_segments(compilation.plan, compiled.folder))
    picture = draw_timeline(compilation.timeline, compilation.plan, words)
    assert picture is not None
    return picture


def decoded(lane: list[int]) -> list[tuple[int, int, int, int]]:
    """Return (start, stop, words, bytes) of each bar."""
    bars, before = [], 0
    for gap, length, word, nbytes in zip(*(lane[i::4] for i in range(4)), strict=True):
        bars.append((before + gap, before + gap + length, word, nbytes))
        before += gap + length
    return bars


def test_every_event_of_every_rank_is_in_the_data(on_2x2: Compiled) -> None:
    timeline = on_2x2.compilation.timeline

    data = json.loads(json.dumps(drawn(on_2x2).data))

    assert data["step_s"] == timeline.step_s
    for rank, row in enumerate(data["rows"]):
        for lane, coded in (("compute", row["lanes"][:1]), ("communication", row["lanes"][1:])):
            events = sorted(
                (event.start_s, event.stop_s, event.payload_bytes)
                for event in timeline.events
                if (event.rank, event.lane) == (rank, lane) and event.stop_s > event.start_s
            )
            bars = sorted(bar for track in coded for bar in decoded(track))
            assert len(bars) == len(events) > 0
            for (start, stop, word, nbytes), (start_s, stop_s, payload) in zip(bars, events, strict=True):
                assert start == pytest.approx(start_s / timeline.step_s * UNITS, abs=1)
                assert stop == pytest.approx(stop_s / timeline.step_s * UNITS, abs=1)
                assert nbytes == payload
                assert (data["words"][word][0] == "compute") is (lane == "compute")


@pytest.mark.parametrize("overlapping", [1, 2, 9])
def test_messages_that_overlap_are_drawn_below_each_other(on_2x2: Compiled, overlapping: int) -> None:
    """A message begins every second and lasts as many seconds as there are to overlap."""
    rank, payload = np.array([0]), np.array([4096])
    starts = range(20)
    timeline = Timeline(
        tuple(
            Bars(
                "communication", "", rank, np.array([s + 0.0]), np.array([s + 0.0 + overlapping]), payload, s
            )
            for s in starts
        ),
        20.0 + overlapping,
        {},
        {},
    )
    words = {s: Words("servers", f"Pull {s}", "Pull") for s in starts}

    picture = draw_timeline(timeline, on_2x2.compilation.plan, words)

    assert picture is not None
    row = json.loads(json.dumps(picture.data))["rows"][0]
    tracks = [decoded(lane) for lane in row["lanes"][1:]]
    assert len(tracks) == overlapping
    for bars in tracks:
        assert all(bar[1] <= later[0] for bar, later in pairwise(bars))
    assert sum(map(len, tracks)) == len(starts)
    for (top, height), (later, _) in pairwise(row["places"]):
        assert top + height <= later
    assert sum(row["places"][-1]) == picture.rows[0].height < 120


def test_words_are_read_back_from_the_page(on_2x2: Compiled) -> None:
    compilation = on_2x2.compilation

    words = words_of_page(on_2x2.page)

    assert words == instruction_words(compilation, describe_segments(compilation.plan, on_2x2.folder))
    assert words_of_page("<html></html>") == {}


def test_paths_have_a_rectangle_for_each_bar(on_2x2: Compiled) -> None:
    picture = drawn(on_2x2)

    for row, data in zip(picture.rows, json.loads(json.dumps(picture.data))["rows"], strict=True):
        bars = sum(len(lane) // 4 for lane in data["lanes"])
        assert sum(paths.path.count("M") for paths in row.paths) == bars
        assert len({paths.kind for paths in row.paths}) == len(row.paths)
    assert {key.kind for key in picture.keys} == {paths.kind for row in picture.rows for paths in row.paths}


def test_ranks_that_do_the_same_share_a_row(all_compiled: dict[str, Compiled]) -> None:
    large = all_compiled["cluster-8x6-titanxp"]

    picture = drawn(large)

    assert len(picture.rows) < 10 < len(large.compilation.plan.ranks)
    assert picture.left_out == 0
    assert "48\u00a0workers" in [row.remark for row in picture.rows]


def test_a_short_end_behind_the_last_long_computation_has_a_view_of_its_own(on_2x2: Compiled) -> None:
    rank, payload = np.array([0]), np.array([4096])
    bars = (
        Bars("compute", "", rank, np.array([0.0]), np.array([1.0]), 0 * payload, 0),
        Bars("communication", "", rank, np.array([1.0]), np.array([1.02]), payload, 1),
    )
    traffic = dict.fromkeys(range(4), 4096)
    timeline = Timeline(bars, 1.02, traffic, traffic)
    words = {0: Words("compute", "S1", "S1"), 1: Words("all_reduce", "AllReduce", "Sum W")}

    picture = draw_timeline(timeline, on_2x2.compilation.plan, words)

    assert picture is not None
    end = picture.data["end"]
    assert isinstance(end, int) and 0.97 * UNITS < end < 1.0 / 1.02 * UNITS
    assert [event.what for event in list_longest(timeline, words)] == ["S1", "Sum W (AllReduce)"]


def test_ranks_that_all_differ_in_time_share_rows_by_their_programs(on_2x2: Compiled) -> None:
    """A thousand ranks, each a little later than the one before; the odd ones do something else at last."""
    plan = on_2x2.compilation.plan
    first = plan.ranks[0]
    ranks = tuple(msgspec.structs.replace(first, rank=rank) for rank in range(1024))
    everybody, odd = np.arange(1024), np.arange(1, 1024, 2)
    bars = [
        Bars("compute", "", everybody, n + everybody * 1e-5, n + 0.5 + everybody * 1e-5, 0 * everybody, n)
        for n in range(500)
    ]
    bars.append(Bars("compute", "", odd, 0.0 * odd + 501, 0.0 * odd + 502, 0 * odd, 500))
    timeline = Timeline(tuple(bars), 502.0, {}, {})
    large = msgspec.structs.replace(plan, ranks=ranks, groups={})

    picture = draw_timeline(timeline, large, dict.fromkeys(range(501), Words("compute", "S1", "S1")))

    assert picture is not None
    assert [row.name for row in picture.rows] == ["ranks 0, 2, …", "ranks 1, 3, …"]
    assert all(row.remark == "512\u00a0workers, 10.2\u00a0ms apart" for row in picture.rows)
    size = len(json.dumps(picture.data)) + sum(len(paths.path) for row in picture.rows for paths in row.paths)
    assert size < 100_000
