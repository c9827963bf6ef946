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
│  └─ BadData               the training data
├─ NoPlacement              the solver proved that nothing fits
│  └─ DoesNotFit            a device, or a host, has too little memory
├─ Diverged                 training met a NaN or an infinity
├─ CopiesDiffer             ranks ended with different copies of a variable
└─ RankFailed               an executor died while training
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PartcError(Exception):
    """What went wrong, where, and what the reader can do about it."""

    def __init__(self, what: str, *, at: str, fix: str) -> None:
        super().__init__(f"{what}\n  at:  {at}\n  fix: {fix}")
        self.what = what
        self.at = at
        self.fix = fix


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


class NoPlacement(PartcError):
    """The solver proved that no placement satisfies the constraints."""


class DoesNotFit(NoPlacement):
    """A device, or a host, has too little memory. `missing_bytes`: of the fullest device, 0 if not known."""

    def __init__(self, what: str, *, at: str, fix: str, missing_bytes: int = 0) -> None:
        super().__init__(what, at=at, fix=fix)
        self.missing_bytes = missing_bytes


class Diverged(PartcError):
    """Training met a NaN or an infinity."""


class CopiesDiffer(PartcError):
    """Ranks that hold a variable whole ended with different values of it."""


class RankFailed(PartcError):
    """An executor died, or stopped making progress, while training."""


@contextmanager
def naming(file: object, *kinds: type[PartcError]) -> Iterator[None]:
    """Let errors of these kinds say which file they are about, where they do not yet.

    `file`: a path; anything else names no file.
    """
    try:
        yield
    except kinds as error:
        if not isinstance(file, str | Path) or str(file) in error.at:
            raise
        raise type(error)(error.what, at=f"{file}: {error.at}", fix=error.fix) from error
