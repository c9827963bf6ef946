import json
from pathlib import Path

import msgspec
import pytest

from partc.runtime.errors import BadPlan
from partc.runtime.plan.check_references import check_references
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from tests.builders.plans.boxed_plans import LAYOUTS, boxed_momentum, columns, strided
from tests.builders.plans.hand_made_plans import with_changes
from tests.builders.plans.linear_plans import linear_all_reduce, linear_servers


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


def test_a_plan_of_an_earlier_format_is_told_by_it_whatever_its_keys(tmp_path: Path) -> None:
    folder = linear_servers(tmp_path / "out", merged=True, scattered=True)
    tree = json.loads((folder / "plan.json").read_bytes())
    tree["format"] = "partc-plan/2"
    tree["ranks"][0]["held"] = [{"variable": "W", "value": "W_owned", "start": 0, "stop": 2}]
    (folder / "plan.json").write_text(json.dumps(tree))

    with pytest.raises(
        BadPlan, match=r"format 'partc-plan/2'\n.*\n.*reads 'partc-plan/7': compile"
    ) as refusal:
        read_plan_folder(folder)

    assert "start" not in str(refusal.value)


def test_boxes_are_read_back_and_held_to_their_variables(tmp_path: Path) -> None:
    folder = boxed_momentum(tmp_path / "out", LAYOUTS["strided"])
    plan = read_plan_folder(folder).plan
    assert [rank.pieces[0].box for rank in plan.ranks] == list(LAYOUTS["strided"])

    for boxes, what in (
        ((strided(0, 1), strided(0, 1)), r"nobody holds axis 1: \[1, 2\) of factor 2\n.*variables: w"),
        ((columns(0, 5), columns(4, 6)), r"rank 0 and rank 1 hold the same part of it\n.*variables: w"),
        ((columns(0, 5), strided(1, 2)), r"rank 0 and rank 1 hold the same part of it\n.*variables: w"),
        ((None, strided(1, 2)), r"rank 0 holds it whole, rank 1 a part of it\n.*variables: w"),
        (
            (columns(0, 7), None),
            r"a box of 'w' has \[0, 7\) of 6 on axis 1, shaped \[4, 6\]\n.*ranks: 0: pieces",
        ),
    ):
        ranks = tuple(
            msgspec.structs.replace(
                rank, pieces=(msgspec.structs.replace(rank.pieces[0], box=box), *rank.pieces[1:])
            )
            for rank, box in zip(plan.ranks, boxes, strict=True)
        )
        with pytest.raises(BadPlan, match=what):
            check_references(with_changes(plan, ranks=ranks))
