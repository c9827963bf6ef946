"""devices/: what each rank runs, as lists that follow from plan.json."""

import json
from pathlib import Path

import msgspec
import pytest

from partc.runtime.errors import BadPlan
from partc.runtime.plan.device_index import device_index, index_ranges
from partc.runtime.plan.plan_folder import read_plan_folder, seal_plan_folder, sha256_of_file
from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import Plan, Run, instructions_of
from tests.builders.graphs.foreign_steps import TABLE
from tests.builders.plans.compiled_steps import Compiled, compile_step, import_text


@pytest.fixture
def compiled(tmp_path: Path) -> Compiled:
    return compile_step(import_text(TABLE), tmp_path / "out", "2x1s", "ps", "global")


def test_every_rank_lists_what_it_runs_in_order(compiled: Compiled) -> None:
    plan, folder = compiled.plan, compiled.folder.path

    for rank in plan.ranks:
        listed = json.loads((folder / f"devices/rank-{rank.rank}/segments.json").read_bytes())
        runs = [i.segment for i in instructions_of(plan, rank) if isinstance(i, Run)]
        assert [entry["file"] for entry in listed["segments"]] == list(dict.fromkeys(runs))
        assert [entry["runs"] for entry in listed["segments"]] == [runs.count(s) for s in dict.fromkeys(runs)]
        assert listed["devices"] == [rank.device]
        assert listed["ranks"] == str(rank.rank)
        assert all((folder / entry["file"]).is_file() for entry in listed["segments"])


def test_of_many_ranks_those_that_run_the_same_have_one_list(compiled: Compiled) -> None:
    workers, servers = (
        [rank for rank in compiled.plan.ranks if site in rank.sites] for site in ("worker", "server")
    )
    many = [
        msgspec.structs.replace(rank, rank=number, device=f"device{number}")
        for number, rank in enumerate([*workers[:1] * 100, *servers])
    ]

    files = device_index(msgspec.structs.replace(compiled.plan, ranks=tuple(many)))

    assert list(files) == [
        "devices/rank-0-and-99-more/segments.json",
        "devices/rank-100-and-1-more/segments.json",
    ]
    listed = [json.loads(content) for content in files.values()]
    assert [entry["ranks"] for entry in listed] == ["0-99", "100-101"]
    assert len(listed[0]["devices"]) == 100


def test_an_edited_list_is_refused_and_sealing_writes_it_anew(compiled: Compiled) -> None:
    folder = compiled.folder.path
    path = folder / "devices/rank-1/segments.json"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"runs": 1', b'"runs": 2', 1))

    with pytest.raises(BadPlan, match=r"was changed(.|\n)*devices/rank-1/segments.json"):
        read_plan_folder(folder)

    # Even if somebody writes its hash as well.
    files = compiled.plan.files | {"devices/rank-1/segments.json": sha256_of_file(path)}
    (folder / "plan.json").write_bytes(encode_plan(msgspec.structs.replace(compiled.plan, files=files)))
    with pytest.raises(BadPlan, match=r"not that of plan.json\n.*rank-1/segments.json\n.*partc seal"):
        read_plan_folder(folder)

    assert seal_plan_folder(folder) == ["devices/rank-1/segments.json", "plan.json"]
    assert path.read_bytes() == before
    read_plan_folder(folder)


def test_lists_follow_an_edited_plan_when_it_is_sealed(compiled: Compiled) -> None:
    folder = compiled.folder.path
    servers = [rank.rank for rank in compiled.plan.ranks if "server" in rank.sites]
    tree = json.loads((folder / "plan.json").read_bytes())
    second = next(i for i in tree["instructions"] if i["type"] == "run" and i["site"] == "server")
    tree["instructions"].append(second)
    (folder / "plan.json").write_text(json.dumps(tree))

    changed = seal_plan_folder(folder)

    assert changed == [*(f"devices/rank-{rank}/segments.json" for rank in servers), "plan.json"]
    for rank in servers:
        listed = json.loads((folder / f"devices/rank-{rank}/segments.json").read_bytes())
        assert next(e["runs"] for e in listed["segments"] if e["file"] == second["segment"]) == 2


def test_a_plan_that_has_no_lists_is_read(compiled: Compiled) -> None:
    """Plans of this format had none before."""
    files = {name: found for name, found in compiled.plan.files.items() if not name.startswith("devices/")}
    plan: Plan = msgspec.structs.replace(compiled.plan, files=files)
    (compiled.folder.path / "plan.json").write_bytes(encode_plan(plan))

    assert read_plan_folder(compiled.folder.path).plan.files == files
    assert seal_plan_folder(compiled.folder.path) == []


def test_numbers_are_written_as_ranges() -> None:
    assert index_ranges([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8"
    assert index_ranges([]) == ""
