"""What a member notes is what others read, whole, whenever they look."""

import os
import signal

import pytest

from partc.runtime.plan.program import Run, Start, Store, Wait
from partc.runtime.supervision import track_memory
from partc.runtime.supervision.messages import Position
from partc.runtime.supervision.track import Track
from partc.runtime.supervision.track_memory import read_note, share_memory

PROGRAM = (
    Run("worker", "a.onnx", (), ()),
    Start(7, "all_reduce", "workers", "worker", "worker", ("g",), ("g",), label="AllReduce g"),
    Wait(7),
    Store("worker", "g", "W"),
)


def test_instructions_are_noted_by_their_numbers() -> None:
    track = Track()
    enter = track.through(PROGRAM)
    track.begin(3, track.place("reading data"))
    seen = [track.position("cpu0")]

    for index in range(len(PROGRAM) + 1):
        enter(index)
        seen.append(track.position("cpu0"))

    assert seen == [
        Position(3, "reading data", False, "cpu0"),
        Position(3, "a.onnx", False, "cpu0"),
        Position(3, "communication AllReduce g (7)", False, "cpu0"),
        Position(3, "communication AllReduce g (7)", True, "cpu0"),
        Position(3, "moving values", False, "cpu0"),
        Position(3, "communications at the end of the step", True, "cpu0"),
    ]


def test_nothing_is_known_of_who_noted_nothing() -> None:
    assert read_note(share_memory()) is None
    assert Track().position("cpu0") == Position(device="cpu0")


def test_names_that_are_no_line_are_none_to_others() -> None:
    track = Track()
    odd, next_to_it = track.place("a\nb\0c"), track.place("d")

    track.begin(1, odd)
    assert track.position("").at == "a b c"
    track.begin(1, next_to_it)
    assert track.position("").at == "d"


def test_without_room_for_more_places_the_step_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.runtime.supervision.track.SIZE_BYTES", track_memory.HEAD_BYTES + 10)
    track = Track()

    track.begin(1, track.place("a place of more than ten letters"))

    assert track.position("") == Position()


def test_a_killed_process_leaves_a_whole_note() -> None:
    memory = share_memory()
    child = os.fork()
    if child == 0:
        track = Track()
        even, odd = track.place("even"), track.place("odd", awaits=True)
        step = 1
        while True:
            track.begin(step, odd if step % 2 else even)
            step += 1
    while (note := read_note(memory)) is None or note[0] < 1000:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    note = read_note(memory)

    assert note is not None
    step, at, awaits = note
    assert step >= 1000
    assert (at, awaits) == (("odd", True) if step % 2 else ("even", False))
