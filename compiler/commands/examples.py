"""`partc examples`: clusters, batch scripts and programs to begin with."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from partc.compiler.commands.command_line.completion import complete_examples
from partc.compiler.commands.command_line.declare import declare, with_common
from partc.compiler.commands.command_line.panels import GroupedGroup
from partc.compiler.commands.console import answer, show, tell
from partc.compiler.commands.results.machines import ExampleEntry, ExampleList, ExamplesCopied
from partc.compiler.machines.example_files import (
    EXAMPLES,
    copy_examples,
    describe_example,
    names_of_examples,
)

EPILOG = "Example: partc examples copy cluster-2x2.json"

examples_command = typer.Typer(
    cls=GroupedGroup,
    invoke_without_command=True,
    help="List the examples, and copy them.",
    epilog=EPILOG,
)


def _list_examples(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    entries = [ExampleEntry(n, describe_example(EXAMPLES / n)) for n in names_of_examples(EXAMPLES)]
    table = Table("example", "what it is", box=None)
    for entry in entries:
        table.add_row(entry.name, entry.description)
    show(table)
    answer(ExampleList(tuple(entries)))


examples_command.callback()(with_common(_list_examples))


@declare(examples_command, "copy", epilog=EPILOG)
def copy_command(
    name: Annotated[
        str,
        typer.Argument(
            help="As `partc examples` lists it, a folder of these, or all.", autocompletion=complete_examples
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write.", metavar="DIR")] = Path("examples"),
) -> None:
    """Write an example, a folder of them, or all, into a folder."""
    files = tuple(map(str, copy_examples(name, folder)))
    for file in files:
        tell(file)
    answer(ExamplesCopied(files))
