"""What a person sees while a command works, and what a script reads when it is done.

    tell, show   results, for people                     stdout; with --json nothing: the document says it
    answer       the results as one JSON document        stdout, with --json alone
    note         how the work goes                       stdout; with --json stderr; with -q nothing
    announce     what is chosen while it goes            stdout; with --json stderr
    log          phases with their times, decisions      stderr, with -v

A bar on a terminal, plain lines elsewhere.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from partc.runtime.errors import BadUsage
from partc.runtime.log import log, printable

if TYPE_CHECKING:  # help and completion need no JSON
    from partc.runtime.plan.record import Record

# A pipe has no width: wide enough for tables, unless the reader says otherwise.
_HAS_WIDTH = sys.stdout.isatty() or "COLUMNS" in os.environ
console = Console(highlight=False, markup=False, emoji=False, width=None if _HAS_WIDTH else 120)

LINE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Verbosity:
    """What is written: see above."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False


_current = Verbosity()


@contextmanager
def writing(chosen: Verbosity) -> Iterator[None]:
    """Write as much as was chosen, while one command works. Raises BadUsage."""
    global _current
    if chosen.quiet and chosen.verbose:
        raise BadUsage("less and more at once", at="--quiet with --verbose", fix="leave one of the two out")
    before = _current
    with ExitStack() as at_the_end:
        if chosen.verbose:
            at_the_end.enter_context(_log_on_stderr())
        try:
            _current, console.stderr = chosen, chosen.json
            yield
        finally:
            _current, console.stderr = before, before.json


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Write what is logged as INFO, unless it goes somewhere already."""
    level, handler = log.level, logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.setLevel(min(level or logging.INFO, logging.INFO))
    is_heard = bool(log.handlers)
    if not is_heard:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def tell(line: str) -> None:
    """Print a line of results as it is: names may hold brackets, and a pipe wants it in one piece."""
    if not _current.json:
        console.print(Text(printable(line)), soft_wrap=True)


def show(table: RenderableType, *, is_wrapped: bool = True) -> None:
    """Print a table of results."""
    if not _current.json:
        console.print(table, soft_wrap=not is_wrapped)


def note(line: str) -> None:
    """Print a line about how the work goes."""
    if not _current.quiet:
        console.print(Text(printable(line)), soft_wrap=True)


def announce(line: str) -> None:
    """Print, while the work goes on, what nobody can know otherwise."""
    console.print(Text(printable(line)), soft_wrap=True)


def refuse_json(why: str, fix: str) -> None:
    """Raise BadUsage where JSON was asked for: of what has no results to write."""
    if _current.json:
        raise BadUsage(why, at="--json", fix=fix)


def answer(result: "Record") -> None:
    """Write the results as JSON, where that was asked for."""
    if _current.json:
        write_json(result)


def write_json(result: "Record") -> None:
    """Write a record on stdout. Numbers that are none become null."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n")


class _Bars(Progress):
    """Bars, and below them what their tasks say, in as many lines as that takes: cells would be cut off."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(task.fields["remark"]) for task in self.tasks if task.fields["remark"])


class Advance(Protocol):
    """Tells how far the work is."""

    def __call__(self, steps_done: int, remark: str = "", /) -> None:
        """Show that `done` of all steps are done."""


@contextmanager
def progress_of(what: str, total: int) -> Iterator[Advance]:
    """Show the progress of `total` steps."""
    with _logged_time(what):
        if _current.quiet or not console.is_interactive:
            yield _lines(what, total)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with _Bars(*columns, console=console, transient=True) as bars:
            task = bars.add_task(what, total=total, remark="")

            def advance(steps_done: int, remark: str = "") -> None:
                bars.update(task, completed=steps_done, remark=printable(remark))

            yield advance


def _lines(what: str, total: int) -> Advance:
    """A line at the start of long work, at most every few seconds, and at its end."""
    shown_s = time.monotonic()

    def advance(steps_done: int, remark: str = "") -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s >= LINE_EVERY_S or steps_done == total:
            shown_s = now_s
            note(f"{what}: {steps_done}/{total}  {remark}".rstrip())

    return advance


@contextmanager
def working_on(what: str) -> Iterator[None]:
    """Show that something of unknown length is going on."""
    with _logged_time(what):
        if _current.quiet or not console.is_interactive:
            yield
            return
        with console.status(what):
            yield


@contextmanager
def _logged_time(what: str) -> Iterator[None]:
    begun_s = time.perf_counter()
    yield
    log.info("%s: %.3f s", what, time.perf_counter() - begun_s)
