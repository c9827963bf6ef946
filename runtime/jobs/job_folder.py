"""Temporary folders, such as a job's inside the plan's: held by a lock, which ends with its process.

A process that is killed leaves its folder behind; the next one that makes such a folder there removes it.
"""

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".run-"
LOCK_FILE = "held"
_LAST_WORDS_S = 2.0


@contextmanager
def job_folder(plan_folder: Path) -> Iterator[Path]:
    """Make a folder that the hosts of the plan see, and remove it in the end."""
    with held_folder(plan_folder, PREFIX) as folder:
        yield folder


@contextmanager
def held_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder in `parent`, and remove it in the end, with all such folders whose process is gone."""
    remove_stale(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = _hold(folder)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def remove_stale(parent: Path, prefix: str = PREFIX) -> None:
    """Remove the folders whose process is gone."""
    for lock_file in parent.glob(f"{glob.escape(prefix)}*/{LOCK_FILE}"):
        remove_left(lock_file.parent)


def remove_left(folder: Path) -> None:
    """Remove a folder if its process is gone."""
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR)
    except OSError:  # somebody else removes it
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_from_writers(folder)
    except OSError:  # held by a job that runs; or a file system without locks, where nobody can tell
        pass
    finally:
        os.close(lock)


def _remove_from_writers(folder: Path) -> None:
    """Remove a folder into which ranks of the killed process, which end a little later, may still write."""
    elsewhere = folder.with_name(f"{folder.name}.left")  # where no rank finds it
    folder.rename(elsewhere)
    shutil.rmtree(elsewhere, ignore_errors=True)


def _hold(folder: Path) -> int:
    """Lock the folder for this process; the file gets its name once it is locked."""
    unnamed = folder / f"{LOCK_FILE}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks: the folder is nobody's to remove
        return lock
    unnamed.rename(folder / LOCK_FILE)
    return lock


def _remove(folder: Path) -> None:
    """Remove a folder into which a rank that is being ended may still write why."""
    deadline_s = time.monotonic() + _LAST_WORDS_S
    while folder.exists() and time.monotonic() < deadline_s:
        shutil.rmtree(folder, ignore_errors=True)
