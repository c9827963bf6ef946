"""A plan on disk: plan.json and the files that it names, each checked against its SHA-256."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from partc.runtime.errors import BadPlan
from partc.runtime.program import Plan, decode_plan

PLAN_FILE = "plan.json"
_AGAIN = "compile the model again"


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """A plan and where its files lie."""

    plan: Plan
    path: Path


def read_plan_folder(path: Path | str) -> PlanFolder:
    """Read plan.json and check every file that it names. Raises BadPlan."""
    folder = Path(path)
    plan_file = folder / PLAN_FILE
    try:
        text = plan_file.read_bytes()
    except OSError as error:
        raise BadPlan(
            f"no plan can be read: {error.strerror}",
            at=str(plan_file),
            fix="give the folder that `partc compile -o` wrote",
        ) from error
    plan = decode_plan(text, plan_file)
    for name, expected in plan.files.items():
        _check_file(folder, name, expected)
    return PlanFolder(plan, folder)


def sha256_of_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_file(folder: Path, name: str, expected: str) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise BadPlan(f"a file outside the plan's folder: {name!r}", at="files", fix=_AGAIN)
    path = folder / name
    if not path.is_file():
        raise BadPlan("a file of the plan is missing", at=str(path), fix=_AGAIN)
    actual = sha256_of_file(path)
    if actual != expected:
        raise BadPlan(
            f"a file of the plan was changed: SHA-256 {actual[:12]}..., the plan says {expected[:12]}...",
            at=str(path),
            fix="restore the file, or compile the model again",
        )
