import re

import pytest
from rich.table import Table

from partc.compiler.commands import console as console_module
from partc.compiler.commands.console import console, progress_of, tell, working_on


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list whose last entry is the time."""
    times = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: times[-1])
    return times


def test_a_long_line_stays_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    tell("word " * 60 + "end")

    assert capsys.readouterr().out == "word " * 60 + "end\n"


def test_names_with_brackets_and_colons_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("variable")
    table.add_row("layer[bold].weight:heart:")

    tell("layer[bold].weight:heart:")
    console.print(table)

    assert capsys.readouterr().out.count("layer[bold].weight:heart:") == 2


def test_progress_into_a_pipe_is_a_line_now_and_then_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with progress_of("training", 100) as advance:
        for step in range(1, 101):
            clock.append(step / 10)
            advance(step, "loss 1")

    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"training: {step}/100  loss 1" for step in (20, 40, 60, 80, 100)]


def test_work_of_unknown_length_says_nothing_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with working_on("compiling"):
        pass

    assert capsys.readouterr().out == ""


def test_a_terminal_shows_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_force_terminal", True)
    monkeypatch.setattr(console, "is_interactive", True)

    with progress_of("training", 2) as advance:
        advance(1, "loss 1")
        advance(2)
    with working_on("compiling"):
        pass

    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "training" in shown
    assert "2/2" in shown


def test_what_a_bar_says_is_cut_off_by_no_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_force_terminal", True), ("is_interactive", True), ("_width", 60)):
        monkeypatch.setattr(console, name, value)
    remark = "loss 2.5  31.0 steps/s, 1,985 samples/s  a step 32.2 ms, predicted 15.1 ms, as it seems"

    with progress_of("training", 2) as advance:
        advance(1, remark)

    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert (
        remark.split() == [word for word in shown.split() if word in remark.split()][-len(remark.split()) :]
    )
    assert "…" not in shown
