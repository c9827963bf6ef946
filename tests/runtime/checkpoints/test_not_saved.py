"""What is said of checkpoints that cannot be written fits the system's error."""

import errno
import subprocess
from pathlib import Path

import pytest

from partc.runtime.checkpoints.not_saved import number_of, probe_folder, repair_of
from partc.runtime.errors import NotSaved


def test_the_repair_fits_the_error() -> None:
    assert repair_of(errno.ENOSPC) == "make room there, or name another folder with --checkpoints"
    assert repair_of(errno.EROFS) == "let this user write there, or name another folder with --checkpoints"
    assert repair_of(errno.ENOTDIR) == "name another folder with --checkpoints"
    assert [number_of(fault) for fault in (None, OSError(errno.ENOSPC, ""), OSError("?"))] == [
        0,
        errno.ENOSPC,
        errno.EIO,
    ]


def test_a_read_only_folder_is_told_and_another_one_stays_as_it_is(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "partc-test", str(disk)]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(NotSaved, match=r"(?s)Read-only file system.*fix: let this user write there"):
            probe_folder(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)

    probe_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
