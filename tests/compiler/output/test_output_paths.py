from pathlib import Path

import pytest

from partc.compiler.output.output_paths import check_output_file, check_output_folder
from partc.runtime.errors import BadUsage


def test_new_paths_and_earlier_results_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text('{"format": "partc-plan/1", "files": {}}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.onnx").touch()

    for name in ("out", "empty", "new", "new/deep"):
        check_output_folder(tmp_path / name)
    for name in ("old.onnx", "new.onnx", "new/deep.onnx"):
        check_output_file(tmp_path / name)


def test_a_folder_of_somebody_elses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").touch()

    with pytest.raises(BadUsage, match="give an empty or new folder"):
        check_output_folder(tmp_path)
    with pytest.raises(BadUsage, match="not a plan's folder"):
        check_output_folder(tmp_path / "diary.txt")
    with pytest.raises(BadUsage, match="fix: name a file"):
        check_output_file(tmp_path)


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").touch()

    for check in (check_output_file, check_output_folder):
        with pytest.raises(BadUsage, match=r"diary.txt' is a file, not a folder"):
            check(tmp_path / "diary.txt" / "a" / "b")


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BadUsage, match="fix: give a folder of its own"):
        check_output_folder(Path())
