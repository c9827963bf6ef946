"""Folders that one process holds, by a lock that ends with it.

A temporary one, such as a job's inside the plan's, has a lock of its own: a process that is killed leaves it
behind, and the next one that makes such a folder there removes it. A plan's folder, or one of checkpoints, is
locked itself, without a file, while a training or a compilation writes there.
"""

import fcntl
import glob
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partc.runtime.errors import BadUsage

PREFIX = ".run-"
LOCK_FILE = "held"
_LAST_WORDS_S = 2.0
_holders: dict[tuple[int, int], int] = {}  # device and inode of a folder -> the thread


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


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep others from writing into a folder that is there. Raises BadUsage while somebody else does.

    A thread that holds a folder may do so again within. Locks of folders are the local system's: where it
    has none, as over NFS, nobody is kept out.
    """
    lock = _lock(folder)
    if lock is None:
        yield
        return
    place = _identity(os.fstat(lock))
    _holders[place] = threading.get_ident()
    try:
        yield
    finally:
        del _holders[place]
        fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return the descriptor that holds a folder's lock, None where there is nothing to lock."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # whoever reads or writes there says what is wrong
        return None
    is_own = _holders.get(_identity(os.fstat(lock))) == threading.get_ident()
    if is_own or not _take(lock, folder):
        os.close(lock)
        return None
    if folder.exists() and _identity(folder.stat()) == _identity(os.fstat(lock)):
        return lock
    os.close(lock)
    return _lock(folder)  # another one has taken its place meanwhile


def _take(lock: int, folder: Path) -> bool:
    """Lock a folder; tell whether it can be."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise BadUsage(
            "another process of partc is training or writing in this folder",
            at=str(folder),
            fix="wait for its end, or use another folder",
        ) from error
    except OSError:  # a file system without such locks
        return False
    return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


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
