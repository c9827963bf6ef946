"""A disk that is soon full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(at: Path) -> Iterator[Path]:
    """Yield a folder with room for 8 kB; skip the test where none can be mounted."""
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "partc-test", str(at)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)
