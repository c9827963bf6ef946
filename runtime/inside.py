"""Paths that a file names: they may lead to files in its own folder, and nowhere else."""

from pathlib import Path, PurePosixPath


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
