from pathlib import Path

import pytest

from partc.compiler.demo import MODEL_OPTIONS, DemoStep, demonstrate, steps
from partc.models.catalogue import build_model, parse_options


def files_of(step: DemoStep) -> tuple[set[str], set[str]]:
    """Return the files a command reads and those it writes, among those below the folder."""
    arguments = list(step.arguments)
    written = {arguments[arguments.index("-o") + 1]} if "-o" in arguments else set()
    return {text for text in arguments if text.startswith("somewhere/")} - written, written


def test_each_command_reads_only_what_an_earlier_one_wrote() -> None:
    there: set[str] = set()
    for step in steps(Path("somewhere")):
        read, written = files_of(step)
        assert read <= there
        there |= written

    assert there == {"somewhere/forward.onnx", "somewhere/train.onnx", "somewhere/out"}


def test_it_narrates_each_command_and_ends_with_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executed: list[str] = []

    code = demonstrate(lambda step: executed.append(step.arguments[0]) or 0, tmp_path)

    printed = capsys.readouterr().out
    assert code == 0
    assert executed == ["model", "grad", "inspect", "compile", "run", "verify"]
    assert all(f"$ partc {command}" in printed for command in executed)
    assert printed.rstrip().endswith("report.html")


def test_it_stops_where_a_command_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = demonstrate(lambda step: 2 if step.arguments[0] == "inspect" else 0, tmp_path)

    printed = capsys.readouterr().out
    assert code == 2
    assert "`partc inspect` ended with code 2" in printed
    assert "$ partc compile" not in printed


def test_its_model_is_one_that_the_catalogue_builds() -> None:
    texts = [f"{key}={value}" for key, value in MODEL_OPTIONS.items()]

    assert build_model("lm", **parse_options(texts)).graph.name == "lm"
