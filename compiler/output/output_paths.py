"""Where a command may write: asked before the work begins, so that nobody waits for a refusal."""

from pathlib import Path

import msgspec

from partc.runtime.errors import BadUsage
from partc.runtime.jobs.results import DISAGREEING_FILE, TRAINED_FILE
from partc.runtime.plan.plan_folder import PLAN_FILE
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.plan.program import PLAN_FORMAT

TRAINED_FILES = (TRAINED_FILE, DISAGREEING_FILE, "trained.onnx")
REPORT = "report.html"
PROFILE = "profile.json"  # the measured kernels that prices were made of
MEASURED = "measured.json"  # of a run, beside its prediction
_ANY_FORMAT = PLAN_FORMAT.split("/")[0] + "/"


def check_output_file(path: Path, source: Path | None = None) -> None:
    """Refuse a path that is a folder, that lies in a file, or that is what is read. Raises BadUsage."""
    if source is not None and path.resolve() == source.resolve():
        raise BadUsage("the output is the input", at=str(path), fix="give another file with -o")
    if path.is_dir():
        raise BadUsage("the output is a folder", at=str(path), fix=f"name a file, as {path / 'model.onnx'}")
    _check_parents(path)


def check_output_folder(path: Path, force: bool = False) -> None:
    """Refuse to replace what is not a plan's folder, or has trained variables. Raises BadUsage.

    `force`: trained variables may go.
    """
    if path.resolve() == Path.cwd():
        raise BadUsage(
            "the output is the current folder", at=str(path), fix="give a folder of its own, as -o out"
        )
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and files_of_earlier_plan(path) is None):
        raise BadUsage(
            "the output exists and is not a plan's folder",
            at=str(path),
            fix="give an empty or new folder with -o, or remove this one",
        )
    if not force and (trained_files := [name for name in TRAINED_FILES if (path / name).exists()]):
        raise BadUsage(
            f"the output folder holds trained variables: {', '.join(trained_files)}",
            at=str(path),
            fix="give another folder with -o, move them away, or replace them with --force",
        )
    _check_parents(path)


def check_new_folder(path: Path) -> None:
    """Refuse to write into a folder that has files. Raises BadUsage."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise BadUsage("the output folder is not empty", at=str(path), fix="give a new one with -o")
    _check_parents(path)


class _Earlier(msgspec.Struct):
    """What is asked of an earlier plan.json, of whatever version."""

    format: str
    files: dict[str, str]


def files_of_earlier_plan(folder: Path) -> frozenset[str] | None:
    """Return the files that partc wrote into a plan's folder, None if none of its plans lies there.

    Report and measurements are not the plan's: a run writes them.
    """
    try:
        earlier = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=_Earlier)
    except (OSError, *NOT_DECODED):
        return None
    if not earlier.format.startswith(_ANY_FORMAT):
        return None
    return frozenset({PLAN_FILE, REPORT, MEASURED, *earlier.files})


def _check_parents(path: Path) -> None:
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise BadUsage(
                f"{str(parent)!r} is a file, not a folder",
                at=str(path),
                fix="write to another folder with -o",
            )
