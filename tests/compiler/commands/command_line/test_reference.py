"""docs/commands.md, and the help that it is made of."""

import re
from pathlib import Path

import pytest

from partc.compiler.commands.command_line.reference import REGENERATE, reference
from partc.compiler.commands.results.schemas import RESULTS
from tests.checks.command_line import done, refused

PAGE = Path(__file__).parents[4] / "docs" / "commands.md"
COMMANDS = [name for name in RESULTS if name != "failure"]


def test_the_page_is_what_the_command_line_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), f"make it anew: {REGENERATE}"


def test_every_command_is_on_the_page() -> None:
    assert {*COMMANDS} <= set(re.findall(r"^### partc (.*)$", reference(), re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_the_common_options(command: str) -> None:
    shown = done(*command.split(), "--help")

    assert "Example" in shown or command == "executor"
    assert {"--json", "-q, --quiet", "-v, --verbose"} <= set(
        re.findall(r"--json|-q, --quiet|-v, --verbose", shown)
    )


def test_the_options_of_compile_stand_in_groups() -> None:
    shown = done("compile", "--help")

    groups = re.split(r"^(?=\S[^:\n]*:\n)", shown, flags=re.MULTILINE)
    of = {
        group.partition(":")[0]: set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", group, re.M)) for group in groups
    }
    assert {"--strategy", "--budget", "--method", "--without"} <= of["The strategy"]
    assert {"--batch", "--state", "--loss", "--size"} <= of["The training step"]
    assert of["Memory and precision"] == {"--recompute", "--round-sums"}
    assert of["Options"] == {"--help"}, "every other one is in a group"


@pytest.mark.parametrize(
    ("command", "what", "fix"),
    [
        ("compil train.onnx", "no such command 'compil'", "use 'compile'"),
        ("compile --stratgy ps", "no such option: --stratgy", "--strategy"),
        ("search --method mcm", "is not one of 'auto', 'mcmc', 'ilp', 'dp'", "use 'mcmc'"),
        ("model lst", "no model 'lst'", "'list' is the nearest"),
        ("model restnet50 -o f.onnx", "no model", "'resnet50' is the nearest"),
        ("checkpoint sl", "no such command 'sl'", "partc checkpoint --help"),
        ("schema compiel", "no schema of 'compiel'", "'compile' is the nearest"),
    ],
)
def test_a_wrong_word_is_told_the_nearest(command: str, what: str, fix: str) -> None:
    refused(*command.split(), what=what, fix=fix)
