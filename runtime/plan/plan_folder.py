"""A plan on disk: plan.json and the files that it names, each checked against its SHA-256.

plan.json has a hash of its own. Whoever edited a plan, or a file of it, says so with `seal_plan_folder`
(`partc seal`), which writes the hashes anew, and the lists of ranks' segments. Either way the program is
proven to end, and to read only what is there, before anything is run.

Paths that a file names may lead to files in its own folder, and nowhere else.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from partc.runtime.errors import BadPlan, naming
from partc.runtime.jobs.job_folder import locked_folder
from partc.runtime.plan.check_program import check_program
from partc.runtime.plan.check_references import check_references
from partc.runtime.plan.device_index import check_device_index, indices_in, write_device_index
from partc.runtime.plan.plan_json import decode_plan, encode_plan, sha256_of_plan
from partc.runtime.plan.program import Plan
from partc.runtime.whole_file import write_whole

PLAN_FILE = "plan.json"
_AGAIN = "compile the model again"


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """A plan and where its files lie."""

    plan: Plan
    path: Path


def read_plan_folder(path: Path | str, *, is_checked: bool = False) -> PlanFolder:
    """Read plan.json, check its hash, every file that it names, and its program. Raises BadPlan.

    `is_checked`: whoever started this process has checked the program of the plan with this hash.
    """
    folder = Path(path)
    plan = open_plan_folder(folder).plan
    for fault in faults_of_files(plan, folder):
        raise fault
    if not is_checked:
        _check_program(plan, folder)
        check_device_index(plan, folder)
    return PlanFolder(plan, folder)


def open_plan_folder(path: Path | str) -> PlanFolder:
    """Read plan.json and check its hash, but neither its files nor its program. Raises BadPlan."""
    folder = Path(path)
    plan = _read(folder)
    _check_hash(plan, folder)
    return PlanFolder(plan, folder)


def faults_of_files(plan: Plan, folder: Path) -> Iterator[BadPlan]:
    """Yield what is wrong with the files that a plan names: missing, outside of its folder, or changed."""
    for name in plan.files:
        try:
            check_file(PlanFolder(plan, folder), name)
        except BadPlan as fault:
            yield fault


def seal_plan_folder(path: Path | str) -> list[str]:
    """Accept a plan that was edited by hand: check it and write its hashes anew. Raises BadPlan.

    Returns what had another hash: files, and plan.json. Raises BadUsage while the plan is being trained.
    """
    folder = Path(path)
    with locked_folder(folder):
        return _seal(folder)


def _seal(folder: Path) -> list[str]:
    plan = _read(folder)
    files = {name: sha256_of_file(_path_of(folder, name)) for name in plan.files}
    _check_program(plan, folder)
    if stale := indices_in(plan.files):
        files = _list_segments_anew(plan, folder, files, stale)
    changed = [name for name, sha256 in files.items() if sha256 != plan.files.get(name)]
    sealed = msgspec.structs.replace(plan, files=files)
    if changed or files.keys() != plan.files.keys() or plan.sha256 != sha256_of_plan(plan):
        write_whole(folder / PLAN_FILE, encode_plan(sealed))
        changed.append(PLAN_FILE)
    return changed


def _list_segments_anew(plan: Plan, folder: Path, files: dict[str, str], stale: list[str]) -> dict[str, str]:
    """Write the lists of ranks' segments, which follow from the program; return all files' hashes."""
    for name in stale:
        (folder / name).unlink()
    listed = write_device_index(plan, folder)
    current = {name: sha256 for name, sha256 in files.items() if name not in stale}
    return current | {name: sha256_of_file(folder / name) for name in listed}


def sha256_of_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(folder: Path) -> Plan:
    plan_file = folder / PLAN_FILE
    try:
        text = plan_file.read_bytes()
    except (OSError, ValueError) as error:  # a path that no file has is a ValueError
        raise BadPlan(
            f"no plan can be read: {getattr(error, 'strerror', error)}",
            at=str(plan_file),
            fix="give the folder that `partc compile -o` wrote",
        ) from error
    return decode_plan(text, plan_file)


def _check_program(plan: Plan, folder: Path) -> None:
    with naming(folder / PLAN_FILE, BadPlan):
        check_references(plan)
        check_program(plan)


def _check_hash(plan: Plan, folder: Path) -> None:
    actual = sha256_of_plan(plan)
    if actual != plan.sha256:
        recorded = f"it says {plan.sha256[:12]}..." if plan.sha256 else "it says none"
        raise BadPlan(
            f"the plan was changed: its SHA-256 is {actual[:12]}..., {recorded}",
            at=str(folder / PLAN_FILE),
            fix=f"{_AGAIN}; to run a plan that you edited, accept it with `partc seal {folder}`",
        )


def _path_of(folder: Path, name: str) -> Path:
    at = f"{folder / PLAN_FILE}: files"
    if why := outside(folder, name):
        raise BadPlan(f"file {name!r} {why}: it is outside the plan's folder", at=at, fix=_AGAIN)
    path = folder / name
    if not path.is_file():
        raise BadPlan("a file of the plan is missing", at=str(path), fix=_AGAIN)
    return path


def check_file(plan_folder: PlanFolder, name: str) -> None:
    """Hold a file of a plan against its hash. Raises BadPlan."""
    folder, expected = plan_folder.path, plan_folder.plan.files[name]
    path = _path_of(folder, name)
    actual = sha256_of_file(path)
    if actual != expected:
        raise BadPlan(
            f"a file of the plan was changed: SHA-256 {actual[:12]}..., the plan says {expected[:12]}...",
            at=str(path),
            fix=f"restore the file, or {_AGAIN}; accept an edit of yours with `partc seal {folder}`",
        )


def outside(folder: Path, name: str) -> str:
    """Return why `name` is no place inside `folder`, nothing if it is one. The file need not exist.

    A link is followed: what it leads to must lie in the folder too.
    """
    if not name or "\0" in name:
        return "is no name of a file"
    place = PurePosixPath(name)
    if place.is_absolute():
        return "is an absolute path"
    if ".." in place.parts:
        return "leads out of the folder"
    root = folder.resolve()
    path = (root / name).resolve()
    if path == root:
        return "is the folder itself"
    return "" if path.is_relative_to(root) else "is a link that leads out of the folder"
