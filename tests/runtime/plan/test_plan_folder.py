from pathlib import Path

import pytest

from partc.runtime.errors import BadPlan
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from tests.builders.plans.hand_made_plans import with_changes
from tests.builders.plans.linear_plans import linear_all_reduce


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    folder = read_plan_folder(linear_all_reduce(tmp_path / "out", 2))

    assert len(folder.plan.ranks) == 2
    assert folder.path == tmp_path / "out"


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    segment = folder / "segments/gradient.onnx"
    segment.write_bytes(segment.read_bytes() + b"\0")

    with pytest.raises(BadPlan, match=r"was changed(.|\n)*gradient.onnx\n  fix: restore the file"):
        read_plan_folder(folder)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    (folder / "segments/update.onnx").unlink()

    with pytest.raises(BadPlan, match="missing"):
        read_plan_folder(folder)


def test_a_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    plan = with_changes(read_plan_folder(folder).plan, files={"../secret": "0"})
    (folder / "plan.json").write_bytes(encode_plan(plan))

    with pytest.raises(BadPlan, match="outside the plan's folder"):
        read_plan_folder(folder)


def test_a_folder_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match="partc compile"):
        read_plan_folder(tmp_path)


def test_a_truncated_plan_is_refused(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    plan = folder / "plan.json"
    plan.write_bytes(plan.read_bytes()[:200])

    with pytest.raises(BadPlan, match=r"plan.json"):
        read_plan_folder(folder)
