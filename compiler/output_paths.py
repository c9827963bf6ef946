"""Where a command may write: asked before the work begins, so that nobody waits for a refusal."""

from pathlib import Path

from partc.runtime.errors import BadUsage


def check_output_file(path: Path) -> None:
    """Refuse a file's path that is a folder, or that lies in a file. Raises BadUsage."""
    if path.is_dir():
        raise BadUsage("the output is a folder", at=str(path), fix=f"name a file, as {path / 'model.onnx'}")
    _check_parents(path)


def check_output_folder(path: Path) -> None:
    """Refuse to replace what is not a plan's folder. Raises BadUsage."""
    if path.resolve() == Path.cwd():
        raise BadUsage(
            "the output is the current folder", at=str(path), fix="give a folder of its own, as -o out"
        )
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / "plan.json").exists()):
        raise BadUsage(
            "the output exists and is not a plan's folder",
            at=str(path),
            fix="give an empty or new folder with -o, or remove this one",
        )
    _check_parents(path)


def _check_parents(path: Path) -> None:
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise BadUsage(
                f"{str(parent)!r} is a file, not a folder",
                at=str(path),
                fix="write to another folder with -o",
            )
