"""Iterators and functions that callers hand over: what they raise is the caller's own, and let through.

with callers_code():                  whatever is raised here is marked,
    batch = next(batches)
raised_by_caller(error)               and told from mistakes of partc's own
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

_MARK = "_partc_raised_by"  # of an exception: whose code raised it, "" if that has no name


@contextmanager
def callers_code(name: str = "") -> Iterator[None]:
    """Mark what is raised inside as the caller's own. `name`: MODULE:FUNC, where a command was given that."""
    try:
        yield
    except Exception as error:
        vars(error)[_MARK] = name
        raise


def raised_by_caller(error: Exception) -> bool:
    """Tell whether an exception was raised in code that a caller has handed over."""
    return _MARK in vars(error)


def raising_function(error: Exception) -> tuple[str, str]:
    """Return the MODULE:FUNC that raised an exception, and the line of it; nothing if that has no name."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [place for place, frame in enumerate(frames) if frame.filename == __file__]
    behind = frames[calls[-1] + 1 :] if calls else []
    line = f"{behind[0].filename}:{behind[0].lineno}" if behind else ""
    return vars(error).get(_MARK, ""), line


def callers_function(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a function of the caller's that marks what it raises."""

    @wraps(function)
    def marking(*positional: Given.args, **named: Given.kwargs) -> Result:
        with callers_code():
            return function(*positional, **named)

    return marking


class CallersBatches(Iterator[Any]):  # whatever the caller gives: who reads it looks at each
    """A caller's batches. Mappings of other classes than dict may load what is asked for: they do so here."""

    def __init__(self, batches: Iterable[Any], name: str = "") -> None:
        self._name = name
        with callers_code(name):
            self._batches = iter(batches)

    def __next__(self) -> Any:
        """Return the next one."""
        with callers_code(self._name):
            batch = next(self._batches)
            is_lazy = isinstance(batch, Mapping) and type(batch) is not dict
            return dict(batch) if is_lazy else batch
