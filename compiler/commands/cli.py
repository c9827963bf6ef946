"""The command line: each command reads files, calls one function, and says what came of it.

    partc model NAME -> forward.onnx      partc grad -> train.onnx      partc inspect
    partc compile    -> out/              partc run, partc verify       partc doctor

Exit codes: 0 done, 1 verification failed or an executor died, 2 what the user gave must change, 3 a mistake
of partc's own, 128 + N stopped by signal N.
"""

import atexit
import gc
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from partc.compiler.commands.command_line.declare import declare
from partc.compiler.commands.command_line.panels import GroupedGroup
from partc.compiler.commands.command_line.standard_streams import flush_stdout
from partc.runtime.callers_code import raising_function
from partc.runtime.errors import (
    BadData,
    BadUsage,
    InternalError,
    PartcError,
    RankFailed,
    Stopped,
    nearest,
    one_tree,
)
from partc.runtime.log import configure_log, log, printable
from partc.runtime.supervision.stop_signals import raise_when_stopped

# What a command leaves behind goes with its process: to look for cycles in it takes a large graph a second.
atexit.register(gc.freeze)

INTERNAL_ERROR = 3
COMPLETE = "_PARTC_COMPLETE"  # set by the shell's completion

# Group -> name -> what it does. A command lies in commands/NAME.py as NAME_command, and is imported when it
# is asked for: `partc --help` needs no solver.
GROUPS = {
    "A training step": {
        "model": "Write a model of partc's own as a forward ONNX graph.",
        "grad": "Differentiate a forward graph: loss, gradients, clipping, updates.",
        "inspect": "Show variables, gradients, data inputs, and the work of one step.",
        "ops": "List the standard ops: which of them `partc grad` differentiates, and how.",
    },
    "A plan": {
        "compile": "Spread a training step over a cluster: segments, plan, report.",
        "search": "Find a quick strategy by simulated steps: names, and operators' own devices and degrees.",
        "profile": "Measure what the operators of a step take on this machine, in whole and in parts.",
        "simulate": "Predict a step: its time, its bytes, its busiest link and its timeline.",
        "compare": "Compare two plans, or a plan and its run: what moved, and why one is quicker.",
        "verify": "Train on all ranks, and compare every step with one device on the same total batch.",
        "seal": "Accept a plan that you edited by hand: check its program, and write its hashes anew.",
    },
    "A training": {
        "run": "Train: one executor daemon per device; save the trained variables.",
        "checkpoint": "List, verify and export what a training was saved as.",
        "executor": "Run one rank of a job: the daemon itself, one per device.",
    },
    "Machines and scripts": {
        "cluster": "Describe a cluster, and look at it as it is.",
        "doctor": "Tell what is installed, what works, and how to get what is missing.",
        "examples": "List the examples, and copy them.",
        "schema": "Show the JSON schemas of what commands write with --json.",
    },
}
COMMANDS = {name: line for commands in GROUPS.values() for name, line in commands.items()}


def app_for(selected: str) -> typer.Typer:
    """Return the command line with one command that can be run; of the others it has the names alone."""
    app = typer.Typer(
        name="partc",
        cls=GroupedGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_partc)
    for panel, commands in GROUPS.items():
        for name, line in commands.items():
            if name != selected:
                app.command(name, help=line, rich_help_panel=panel)(_not_imported)
                continue
            module = import_module(f"partc.compiler.commands.{name}")
            command = getattr(module, f"{name}_command")
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=panel)
            else:
                declare(app, name, module.EPILOG, panel)(command)
    return app


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print(f"partc {version('partc')}")
        raise typer.Exit


def _partc(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Compile one ONNX training step into the ONNX subgraphs that train it on every device of a cluster."""


def _words_to_complete() -> list[str]:
    """Return the words of a command line that a shell asks to complete, none if it asks nothing."""
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return typed.split()[1:] if COMPLETE in os.environ else []


def _not_imported() -> None:
    raise AssertionError("only the command that was asked for is run")


def _bad_command(error: typer.TyperException) -> BadUsage:
    context = getattr(error, "ctx", None)  # of the command, or the group of commands, that refuses its words
    command = context.command_path if context is not None else "partc"
    what, _, meant = error.format_message().partition(" Did you mean ")
    what, _, possible = what.partition(" (Possible options: ")
    what = what.replace("Value error, ", "").removesuffix(".")
    meant = meant.rstrip("?.") or possible.rstrip(").").replace(", ", " or ")
    below = getattr(context.command, "commands", ()) if context is not None else ()
    if not meant and below and what.startswith("No such command"):
        meant = f"one of {', '.join(below)}"
    suggested = f"use {meant}, or " if meant else _nearest_choice(what)
    return BadUsage(what[0].lower() + what[1:], at=f"`{command}`", fix=f"{suggested}see `{command} --help`")


def _nearest_choice(what: str) -> str:
    """Return the choice that a wrong one resembles, of those that a message lists, or nothing."""
    value, is_choice, valid = what.rpartition(" is not one of ")
    if not is_choice:
        return ""
    names = re.findall(r"'([^']*)'", valid)
    meant = nearest(value.rpartition(": ")[2].strip("'"), names)
    return f"use '{meant}', or " if meant else ""


def _tell(error: PartcError, as_json: bool) -> None:
    """Say what went wrong, for scripts too where they asked for JSON; names in it may be anybody's."""
    print(printable(f"partc: {error}"), file=sys.stderr)
    if as_json:
        from partc.compiler.commands.console import write_json
        from partc.compiler.commands.results.schemas import Failure

        write_json(Failure(type(error).__name__, error.what, error.at, error.fix))


def _is_of_the_parser(error: Exception) -> bool:
    return isinstance(error, typer.TyperException | typer.Abort)


@contextmanager
def _refusing_functions() -> Iterator[None]:
    """Let what a function of batches raises, which a command was given as MODULE:FUNC, be refused as data."""
    try:
        yield
    except PartcError:
        raise
    except Exception as error:
        name, line = raising_function(error)
        if not name:
            raise
        what = f"{name} gives no more batches: {type(error).__name__}: {error}"
        fix = "mend what the named line does" if line else f"mend {name}"
        raise BadData(what, at=line or name, fix=fix) from error


def _replace_what_cannot_be_printed() -> None:
    """Let no character that a terminal's encoding lacks end a command: µ in ASCII, say."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def exit_code_of(command: Callable[[], object], arguments: Sequence[str] = ()) -> int:
    """Run a command; tell what went wrong on stderr, and return the exit code."""
    as_json = "--json" in arguments
    try:
        with one_tree(_is_of_the_parser), _refusing_functions():
            code = command()
            flush_stdout()
    except InternalError as error:  # the last resort: an honest word instead of a traceback
        log.debug("an internal error", exc_info=error.__cause__)
        _tell(error, as_json)
        return INTERNAL_ERROR
    except Stopped as error:
        _tell(error, as_json)
        return 128 + error.signal
    except PartcError as error:
        _tell(error, as_json)
        return 1 if isinstance(error, RankFailed) else 2
    except typer.TyperException as error:
        _tell(_bad_command(error), as_json)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("partc: interrupted", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Never shows a traceback for the user's mistakes."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    _replace_what_cannot_be_printed()

    def run() -> object:
        configure_log()
        raise_when_stopped()
        app = app_for(next(iter(words or _words_to_complete()), ""))
        return app(args=words or ["--help"], prog_name="partc", standalone_mode=False)

    return exit_code_of(run, words)


if __name__ == "__main__":
    sys.exit(main())
