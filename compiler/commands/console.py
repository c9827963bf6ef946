"""What a person sees while a command works: a bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from partc.runtime.log import printable

# A pipe has no width: wide enough for tables, unless the reader says otherwise.
_HAS_WIDTH = sys.stdout.isatty() or "COLUMNS" in os.environ
console = Console(highlight=False, markup=False, emoji=False, width=None if _HAS_WIDTH else 120)

LINE_EVERY_S = 2.0


def tell(line: str) -> None:
    """Print a line as it is: names may hold brackets, and a reader of a pipe wants it in one piece."""
    console.print(Text(printable(line)), soft_wrap=True)


class Advance(Protocol):
    """Tells how far the work is."""

    def __call__(self, steps_done: int, note: str = "") -> None:
        """Show that `done` of all steps are done."""


@contextmanager
def progress_of(what: str, total: int) -> Iterator[Advance]:
    """Show the progress of `total` steps."""
    if not console.is_interactive:
        yield _lines(what, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=total, note="")

        def advance(steps_done: int, note: str = "") -> None:
            bars.update(task, completed=steps_done, note=printable(note))

        yield advance


def _lines(what: str, total: int) -> Advance:
    """A line at the start of long work, at most every few seconds, and at its end."""
    shown_s = time.monotonic()

    def advance(steps_done: int, note: str = "") -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s >= LINE_EVERY_S or steps_done == total:
            shown_s = now_s
            tell(f"{what}: {steps_done}/{total}  {note}".rstrip())

    return advance


@contextmanager
def working_on(what: str) -> Iterator[None]:
    """Show that something of unknown length is going on."""
    if not console.is_interactive:
        yield
        return
    with console.status(what):
        yield
