from functools import partial
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
        check_output_file(tmp_path / name, ())


def test_a_folder_of_somebody_elses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").touch()

    with pytest.raises(BadUsage, match="give an empty or new folder"):
        check_output_folder(tmp_path)
    with pytest.raises(BadUsage, match="not a plan's folder"):
        check_output_folder(tmp_path / "diary.txt")
    with pytest.raises(BadUsage, match="fix: name a file"):
        check_output_file(tmp_path, ())


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").touch()

    for check in (partial(check_output_file, sources=()), check_output_folder):
        with pytest.raises(BadUsage, match=r"diary.txt' is a file, not a folder"):
            check(tmp_path / "diary.txt" / "a" / "b")


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BadUsage, match="fix: give a folder of its own"):
        check_output_folder(Path())


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "part-1.npz").touch()

    for name, source in (("a.onnx", tmp_path / "x" / ".." / "a.onnx"), ("data/part-1.npz", str(data))):
        with pytest.raises(BadUsage, match=r"(?s)the output is the input.*fix: name another file"):
            check_output_file(tmp_path / name, (None, "", "synthetic", source))
    check_output_file(data / "trace.json", (str(data),))


def test_files_of_a_plan_and_of_a_checkpoint_are_not_replaced(tmp_path: Path) -> None:
    plan = tmp_path / "out"
    checkpoint = plan / "checkpoints" / "step-0000000002"
    checkpoint.mkdir(parents=True)
    (plan / "plan.json").write_text('{"format": "partc-plan/1", "files": {"segments/a.onnx": ""}}')

    of_a_training = ("trained.safetensors", "trained.onnx", "metrics.jsonl", "run.log", "checkpoints")
    for name in ("plan.json", "report.html", "segments/a.onnx", *of_a_training):
        with pytest.raises(BadUsage, match=f"the output is a file of the plan in {plan}"):
            check_output_file(plan / name, ())
    with pytest.raises(BadUsage, match="the output is a file of checkpoint "):
        check_output_file(checkpoint / "manifest.json", ())
    for name in ("trace.json", "segments/b.onnx", "checkpoints/trace.json"):
        check_output_file(plan / name, (plan,))
