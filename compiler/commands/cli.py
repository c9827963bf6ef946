"""The command line: each command reads files, calls one function, and says what came of it.

    partc model NAME -> forward.onnx      partc grad -> train.onnx      partc inspect
    partc compile    -> out/              partc run, partc verify       partc executor

Exit codes: 0 done, 1 verification failed or an executor died, 2 what the user gave must change, 3 a mistake
of partc's own, 128 + N stopped by signal N.
"""

import io
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from partc.runtime.errors import BadUsage, PartcError, RankFailed, Stopped
from partc.runtime.log import configure_log, log, printable
from partc.runtime.supervision.stop_signals import raise_when_stopped

INTERNAL_ERROR = 3

# Name -> what it does. A command lies in commands/NAME.py as NAME_command, and is imported when it is asked
# for: `partc --help` needs no solver.
COMMANDS = {
    "model": "Write a model of partc's own as a forward ONNX graph.",
    "grad": "Differentiate a forward graph: loss, gradients, clipping, updates.",
    "inspect": "Show variables, gradients, data inputs, and the work of one step.",
    "compile": "Spread a training step over a cluster: segments, plan, report.",
    "search": "Find a quick strategy by simulated steps: names, and operators' own devices and degrees.",
    "profile": "Measure what the operators of a step take on this machine, in whole and in parts.",
    "simulate": "Predict a step: its time, its bytes, its busiest link and its timeline.",
    "run": "Train: one executor daemon per device; save the trained variables.",
    "checkpoint": "List, verify and export what a training was saved as.",
    "verify": "Train on all ranks, and compare every step with one device on the same total batch.",
    "seal": "Accept a plan that you edited by hand: check its program, and write its hashes anew.",
    "executor": "Run one rank of a job: the daemon itself, one per device.",
    "ops": "List the standard ops: which of them `partc grad` differentiates, and how.",
    "cluster": "Look at a cluster as it is.",
}


def app_for(selected: str) -> typer.Typer:
    """Return the command line with one command that can be run; of the others it has the names alone."""
    app = typer.Typer(
        name="partc",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_partc)
    for name, line in COMMANDS.items():
        if name != selected:
            app.command(name, help=line)(_not_imported)
            continue
        module = import_module(f"partc.compiler.commands.{name}")
        command = getattr(module, f"{name}_command")
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, epilog=module.EPILOG)(command)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"partc {version('partc')}")
        raise typer.Exit


def _partc(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Compile one ONNX training step into the ONNX subgraphs that train it on every device of a cluster."""


def _not_imported() -> None:
    raise AssertionError("only the command that was asked for is run")


def _bad_command(error: typer.TyperException, arguments: Sequence[str]) -> BadUsage:
    command = f"partc {arguments[0]}" if arguments[:1] and arguments[0] in COMMANDS else "partc"
    what = error.format_message().removesuffix(".")
    what = what.replace("Value error, ", "")
    return BadUsage(what[0].lower() + what[1:], at=f"`{command}`", fix=f"see `{command} --help`")


def _bad_file(error: OSError) -> BadUsage:
    return BadUsage(
        error.strerror or str(error),
        at=str(error.filename2 or error.filename or "the files read and written"),
        fix="give paths that this user can read and write, on a disk that has room",
    )


def _no_memory(error: MemoryError) -> BadUsage:
    return BadUsage(
        f"not enough memory: {error}", at=_own_frame(error), fix="use a machine with more, or smaller sizes"
    )


def _own_frame(error: Exception) -> str:
    """Return the last place in partc's own code that an exception came through."""
    own = Path(__file__).parents[2]
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).is_relative_to(own) and "site-packages" not in f.filename]
    frame = (inside or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def _internal(error: Exception) -> str:
    """Return what to say of an exception that nobody foresaw: a mistake of partc's, not of the user's."""
    message = "".join(traceback.format_exception_only(error)).strip()
    return str(
        PartcError(
            f"internal error: {message}",
            at=_own_frame(error),
            fix="this is a mistake of partc: report it with the command and its files "
            "(PARTC_LOG_LEVEL=DEBUG shows more)",
        )
    )


def _tell(said: object) -> None:
    """Say what went wrong; names in it may be anybody's."""
    print(printable(f"partc: {said}"), file=sys.stderr)


def _replace_what_cannot_be_printed() -> None:
    """Let no character that a terminal's encoding lacks end a command: µ in ASCII, say."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def exit_code_of(command: Callable[[], object], arguments: Sequence[str] = ()) -> int:
    """Run a command; tell what went wrong on stderr, and return the exit code."""
    try:
        code = command()
    except Stopped as error:
        _tell(error)
        return 128 + error.signal
    except PartcError as error:
        _tell(error)
        return 1 if isinstance(error, RankFailed) else 2
    except typer.TyperException as error:
        _tell(_bad_command(error, arguments))
        return 2
    except OSError as error:
        _tell(_bad_file(error))
        return 2
    except MemoryError as error:
        _tell(_no_memory(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        _tell("interrupted")
        return 130
    except Exception as error:  # the last resort: an honest word instead of a traceback
        log.debug("an internal error", exc_info=error)
        _tell(_internal(error))
        return INTERNAL_ERROR
    return code if isinstance(code, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Never shows a traceback for the user's mistakes."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    _replace_what_cannot_be_printed()

    def run() -> object:
        configure_log()
        raise_when_stopped()
        app = app_for(given[0] if given else "")
        return app(args=given or ["--help"], prog_name="partc", standalone_mode=False)

    return exit_code_of(run, given)


if __name__ == "__main__":
    sys.exit(main())
