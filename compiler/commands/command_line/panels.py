"""Help in groups: their headings, one for one kind of option in every command, and what prints them.

Help is plain text that goes through a pipe.
"""

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from typer import Abort
from typer.core import TyperCommand, TyperGroup

from partc.runtime.errors import BadUsage

STEP = "The training step"
CLUSTER = "The cluster"
STRATEGY = "The strategy"
GRADIENTS = "Gradients"
LIMITS = "Memory and precision"
OUTPUT = "The output"

OPTIMIZER = "The optimizer"
TRAINED = "What is trained"

DATA = "The data"
CHECKPOINTS = "Checkpoints"
FAULTS = "When something goes wrong"
WATCHED = "What is watched"


if TYPE_CHECKING:  # typer has click inside, and does not say where
    from typer._click import Context, HelpFormatter

_WHOLE_LINE = 200
_WITHOUT_VALUE = re.compile(r"--[^=]+=")
_ARGUMENTS, _OPTIONS = "Arguments", "Options"


class GroupedCommand(TyperCommand):
    """A command whose options stand in the groups that they name by `rich_help_panel`."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Read the words. Raises BadUsage of an empty one, which would be taken for an option left out."""
        for before, word in pairwise((ctx.command_path, *args)):
            if (not word or _WITHOUT_VALUE.fullmatch(word)) and not ctx.resilient_parsing:
                at = word.removesuffix("=") or before
                raise BadUsage("an empty value", at=at, fix="leave it out, or give it a value")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write a section for each group, in the order of the signature."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                by_default = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
                heading = getattr(parameter, "rich_help_panel", None) or by_default
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class GroupedGroup(TyperGroup):
    """A command of commands, which stand in the groups that they name."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Show help, which is no mistake, where no command is named and one has to be."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            print(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def invoke(self, ctx: "Context") -> object:
        """Run a command. Of Ctrl-C Typer would make an exit code, and who runs this could not tell of it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Abort from interrupt

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write a section for each group of commands."""
        sections: dict[str, list[tuple[str, str]]] = {}
        width = max(map(len, self.commands))
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            line = command.get_short_help_str(limit=_WHOLE_LINE)
            sections.setdefault(heading, []).append((name.ljust(width), line))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
