"""Every command of the documentation is one that partc takes: its options and their values exist."""

import pytest
import typer

from partc.compiler.commands.cli import COMMANDS, app_for

from .pages import PAGES, ROOT, DocumentedCommand, commands, inline_commands

FOUND = [command for page in PAGES for command in commands(page)]


def parse(arguments: tuple[str, ...]) -> None:
    """Parse a command line as `partc` does, and run nothing. Raises typer's exceptions."""
    group = typer.main.get_command(app_for(arguments[0]))
    chosen = group.commands[arguments[0]]
    for command in getattr(chosen, "commands", {"": chosen}).values():
        command.callback = lambda **options: None
    group.main(args=list(arguments), prog_name="partc", standalone_mode=False)


TASKS = list(inline_commands(ROOT / "docs" / "tasks.md"))  # whole ones, to be copied


@pytest.mark.parametrize("command", [*FOUND, *TASKS], ids=str)
def test_documented_commands_are_partcs(command: DocumentedCommand) -> None:
    assert command.arguments[0] in {*COMMANDS, "--version"}
    parse(command.arguments)


def test_what_is_no_option_is_found() -> None:
    with pytest.raises(typer.TyperException, match="no-such"):
        parse(("compile", "train.onnx", "-c", "cluster.json", "--no-such", "-o", "out"))


def test_commands_are_found_on_the_pages() -> None:
    assert len(FOUND) > 40
    assert len(TASKS) > 10
