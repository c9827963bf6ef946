"""Where a command may write: asked before the work begins, so that nobody waits for a refusal."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from partc.runtime.checkpoints.manifest import FOLDER, folder_of, steps_in
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.metrics import METRICS_FILE
from partc.runtime.jobs.results import DISAGREEING_FILE, LOG_FILE, TRAINED_FILE
from partc.runtime.plan.plan_folder import PLAN_FILE
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.plan.program import PLAN_FORMAT

TRAINED_FILES = (TRAINED_FILE, DISAGREEING_FILE, "trained.onnx", "trained.onnx.data")
OF_A_TRAINING = (*TRAINED_FILES, METRICS_FILE, LOG_FILE, FOLDER)  # what a run leaves in its plan's folder
REPORT = "report.html"
PROFILE = "profile.json"  # the measured kernels that prices were made of
MEASURED = "measured.json"  # of a run, beside its prediction
_ANY_FORMAT = PLAN_FORMAT.split("/")[0] + "/"


def check_output_file(path: Path, sources: Iterable[Path | str | None]) -> None:
    """Refuse a path that is a folder, that lies in a file, or that is what is read. Raises BadUsage.

    `sources`: all that the command reads. Files that a plan lists, and checkpoints, nobody replaces anyway.
    """
    output = path.resolve()
    for source in (Path(source).resolve() for source in sources if source):
        is_within = output.exists() and output.is_relative_to(source)  # a folder of data
        if output == source or (is_within and files_of_earlier_plan(source) is None):
            raise BadUsage("the output is the input", at=str(path), fix="name another file")
    if whose := _owner_of(output):
        raise BadUsage(f"the output is a file of {whose}", at=str(path), fix="name another file")
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


def _owner_of(path: Path) -> str:
    """Return whose file a path is: a checkpoint's, or a plan's; nothing if it is neither's."""
    checkpoint = path.parent
    if checkpoint.name in map(folder_of, steps_in(checkpoint.parent)):
        return f"checkpoint {checkpoint}"
    for folder in path.parents:
        own = files_of_earlier_plan(folder) or frozenset()
        if str(path.relative_to(folder)) in {*own, *(OF_A_TRAINING if own else ())}:
            return f"the plan in {folder}"
    return ""


def _check_parents(path: Path) -> None:
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise BadUsage(
                f"{str(parent)!r} is a file, not a folder",
                at=str(path),
                fix="write to another folder with -o",
            )
