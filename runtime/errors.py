"""Errors a user of partc can meet.

PartcError                  root: catch this one
├─ InputError               what the user gave us is wrong
│  ├─ BadUsage              a command-line option or a function argument
│  ├─ BadCluster            cluster.json, a resource file
│  ├─ BadProfile            profile.json, or one that does not fit the cluster
│  ├─ BadModel              forward.onnx or train.onnx is malformed
│  ├─ UnsupportedModel      a model that is right but that partc cannot treat
│  ├─ BadStrategy           strategy.json
│  ├─ BadPlan               out/plan.json or a file that it names
│  ├─ BadData               the training data
│  └─ BadCheckpoint         a checkpoint is damaged, or of another model
├─ NoPlacement              the solver proved that nothing fits
│  ├─ DoesNotFit            a device, or a host, has too little memory
│  └─ OverLimit             a step keeps more than the user allows
├─ HostLacks                a host has not what a job needs
├─ NotSaved                 a checkpoint could not be written
├─ Diverged                 training met a NaN or an infinity
├─ CopiesDiffer             ranks ended with different copies of a variable
├─ RankFailed               an executor died while training
├─ Stopped                  somebody asked for an end
└─ InternalError            a mistake of partc's own
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Cause:
    """The one process of a job that is to blame for its end, and where it was.

    killed   a signal, or an exit without a word            failed   an error of its own
    hung     no sign of life: stopped, or frozen            stuck    all wait, for this one
    lost     its host, or what watches over it there, is gone
    """

    kind: Literal["killed", "failed", "hung", "stuck", "lost"]
    member: str  # rank 3; worker-1; server-0
    host: str
    device: str
    step: int  # a server's: of workers, in the mean
    at: str  # a segment or communication, or what else it was at
    reason: str


class PartcError(Exception):
    """What went wrong, where, and what the reader can do about it."""

    def __init__(self, what: str, *, at: str, fix: str) -> None:
        super().__init__(f"{what}\n  at:  {at}\n  fix: {fix}")
        self.what = what
        self.at = at
        self.fix = fix
        self.cause: Cause | None = None  # of an error that ended a job

    def __reduce__(self) -> tuple[object, ...]:
        """Let processes send it: exceptions are made anew by position, where this one has names."""
        return _made_anew, (type(self), self.args), self.__dict__


def _made_anew(kind: type[PartcError], args: tuple[object, ...]) -> PartcError:
    return kind.__new__(kind, *args)


class InputError(PartcError):
    """The files or arguments the user gave us are wrong."""


class BadUsage(InputError):
    """A command-line option or a function argument is wrong."""


class BadCluster(InputError):
    """The cluster description is wrong."""


class BadProfile(InputError):
    """The file of measured kernels is wrong, or is about none of the cluster's devices."""


class BadModel(InputError):
    """The model file is malformed."""


class UnsupportedModel(InputError):
    """The model is valid, but partc cannot treat it."""


class BadStrategy(InputError):
    """The strategy file is wrong, or does not fit the model or the cluster."""


class BadPlan(InputError):
    """A plan, or a file that it names, is damaged or of another version."""


class BadData(InputError):
    """The training data does not fit the model."""


class BadCheckpoint(InputError):
    """A checkpoint is damaged, or does not fit the plan."""


class NoPlacement(PartcError):
    """The solver proved that no placement satisfies the constraints."""


class OverLimit(NoPlacement):
    """A step's values take more memory than the user allows, whatever is computed again."""


class DoesNotFit(NoPlacement):
    """A device, or a host, has too little memory. `missing_bytes`: of the fullest device, 0 if not known."""

    def __init__(self, what: str, *, at: str, fix: str, missing_bytes: int = 0) -> None:
        super().__init__(what, at=at, fix=fix)
        self.missing_bytes = missing_bytes


class HostLacks(PartcError):
    """A host, or several, have not what a job needs: found before its first step."""


class NotSaved(PartcError):
    """A checkpoint could not be written, or the disk is full."""


class Diverged(PartcError):
    """Training met a NaN or an infinity."""


class CopiesDiffer(PartcError):
    """Ranks that hold a variable whole ended with different values of it."""


class RankFailed(PartcError):
    """An executor died, or stopped making progress, while training."""


class Stopped(PartcError):
    """A signal asked for an end. `signal`: its number."""

    def __init__(self, what: str, *, at: str, fix: str, signal: int) -> None:
        super().__init__(what, at=at, fix=fix)
        self.signal = signal


class InternalError(PartcError):
    """A mistake of partc's own, which nobody foresaw."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return the valid word that a wrong one resembles; nothing if none does."""
    names = {name.lower(): name for name in valid}
    return next((names[match] for match in get_close_matches(word.lower(), names, n=1)), "")


def one_of(valid: Iterable[str], value: str) -> str:
    """Return the repair of a wrong choice: the one it resembles, and all that there are."""
    names = tuple(valid)
    meant = nearest(value, names)
    return f"use one of {', '.join(names)}" + (f"; {meant!r} is the nearest" if meant else "")


def some_of(names: Iterable[str]) -> str:
    """List names for an error, the first ten of many."""
    listed = list(names)
    more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
    return f"{', '.join(repr(name) for name in listed[:10])}{more}"


@contextmanager
def one_tree(is_another: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
    """Let nothing but errors of this tree out: of files, of memory, and what nobody foresaw.

    `is_another`: tells of exceptions that are somebody else's, and are let through.
    """
    try:
        yield
    except PartcError:
        raise
    except Exception as error:
        if is_another(error):
            raise
        raise _in_this_tree(error) from error


def _in_this_tree(error: Exception) -> PartcError:
    """Return what to say of an exception that comes from below."""
    if isinstance(error, OSError):
        return BadUsage(
            error.strerror or str(error),
            at=str(error.filename2 or error.filename or "the files read and written"),
            fix="give paths that this user can read and write, on a disk that has room",
        )
    if isinstance(error, MemoryError):
        fix = "use a machine with more, or smaller sizes"
        return BadUsage(f"not enough memory: {error}", at=_own_frame(error), fix=fix)
    message = "".join(traceback.format_exception_only(error)).strip()
    return InternalError(
        f"internal error: {message}",
        at=_own_frame(error),
        fix="this is a mistake of partc: report it with the command and its files "
        "(PARTC_LOG_LEVEL=DEBUG shows more)",
    )


def _own_frame(error: Exception) -> str:
    """Return the last place in partc's own code that an exception came through."""
    own = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)[1:]  # beyond the frame of one_tree
    inside = [f for f in frames if Path(f.filename).is_relative_to(own) and "site-packages" not in f.filename]
    frame = (inside or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


@contextmanager
def naming(file: object, *kinds: type[PartcError]) -> Iterator[None]:
    """Let errors of these kinds say which file they are about, where they do not yet.

    `file`: a path; anything else names no file. What is about an option of the command is about no file.
    """
    try:
        yield
    except kinds as error:
        if not isinstance(file, str | Path) or str(file) in error.at or error.at.startswith("--"):
            raise
        raise type(error)(error.what, at=f"{file}: {error.at}", fix=error.fix) from error


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Let the system's errors say which file they are about: a write that fails on a full disk does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
