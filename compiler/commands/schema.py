"""`partc schema`: the form of what commands write with --json."""

import sys
from typing import Annotated

import typer

from partc.compiler.commands.console import answer, tell
from partc.compiler.commands.results.machines import SchemaList
from partc.compiler.commands.results.schemas import RESULTS, schema_of
from partc.runtime.errors import BadUsage, one_of

EPILOG = "Example: partc schema compile"


def schema_command(
    command: Annotated[
        list[str],
        typer.Argument(help="The command, or failure: what every one writes that fails. None: their list."),
    ] = [],
) -> None:
    """Show the JSON schemas of what commands write with --json."""
    name = " ".join(command)
    if not name:
        for command_name in RESULTS:
            tell(command_name)
        answer(SchemaList(tuple(RESULTS)))
        return
    if name not in RESULTS:
        raise BadUsage(f"no schema of {name!r}", at="partc schema", fix=one_of(RESULTS, name))
    sys.stdout.write(schema_of(name).decode())
