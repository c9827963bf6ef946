"""Files are whole, also where the disk has no room for them."""

from pathlib import Path

import pytest

from partc.runtime.whole_file import write_whole
from tests.checks.small_disk import small_disk


def test_a_full_disk_is_told_with_the_path_and_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "trace.json"
        path.write_text("as before")

        with pytest.raises(OSError, match="No space left") as end:
            write_whole(path, b"x" * 20_000)

        assert end.value.filename == str(path)
        assert path.read_text() == "as before"
        assert list(disk.iterdir()) == [path]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")

    write_whole(tmp_path / "link", b"new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "file").read_bytes() == b"new"


def test_a_device_is_written_and_stays_one() -> None:
    write_whole(Path("/dev/null"), b"gone")

    assert Path("/dev/null").is_char_device()
