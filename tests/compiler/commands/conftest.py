"""The files that tests of refusals share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checks.command_line import hashes_of, make_wrong_files


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wrong_files(tmp_path_factory.mktemp("refusals"))


@pytest.fixture
def folder(wrong_files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files above, in the current folder; whatever a test does, they must stay as they are."""
    monkeypatch.chdir(wrong_files)
    return wrong_files


@pytest.fixture
def _nothing_is_harmed(wrong_files: Path) -> Iterator[None]:
    before = hashes_of(wrong_files)
    yield
    (wrong_files / "out" / "run.log").unlink(missing_ok=True)
    assert hashes_of(wrong_files) == before
    assert not [path for path in wrong_files.iterdir() if path.name.startswith(".")]
