"""Declare commands: each has --json, -q and -v besides its own options, and help in groups."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from partc.compiler.commands.command_line.panels import GroupedCommand
from partc.compiler.commands.console import Verbosity, writing

Function = TypeVar("Function", bound=Callable[..., object])

WRITTEN = "What is written"  # the group of these options in every help

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Write the results as one JSON document on stdout (`partc schema` has its form).",
        rich_help_panel=WRITTEN,
    ),
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Write results and errors alone.", rich_help_panel=WRITTEN)
]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v", "--verbose", help="Write phases, their times, and decisions on stderr.", rich_help_panel=WRITTEN
    ),
]
_COMMON = {"json": Json, "quiet": Quiet, "verbose": Verbose}


def declare(
    app: typer.Typer, name: str, epilog: str, panel: str | None = None
) -> Callable[[Function], Function]:
    """Return a decorator that makes a function a command of `app`."""

    def register(function: Function) -> Function:
        app.command(name, epilog=epilog, cls=GroupedCommand, rich_help_panel=panel)(with_common(function))
        return function

    return register


def with_common(function: Callable[..., object]) -> Callable[..., object]:
    """Return a command with the options that all have."""
    own = inspect.signature(function, eval_str=True)

    @wraps(function)
    def command(**values: Any) -> object:  # Any: the values of any command's options
        chosen = Verbosity(**{name: bool(values.pop(name)) for name in _COMMON})
        with writing(chosen):
            return function(**values)

    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in _COMMON.items()
    ]
    every = [
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own.parameters.values()),
        *common,
    ]
    command.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]  # read by inspect
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return command
