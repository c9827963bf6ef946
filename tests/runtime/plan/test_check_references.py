"""A plan that was edited by hand: refused, until it is accepted; and what does not fit itself, even then."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.errors import BadPlan
from partc.runtime.plan.check_references import check_references
from partc.runtime.plan.plan_folder import read_plan_folder, seal_plan_folder
from partc.runtime.plan.plan_json import decode_plan, encode_plan
from partc.runtime.plan.program import Plan
from tests.checks.command_line import PAIR, done, make_mlp, partc, refused

Tree = dict[str, Any]  # plan.json


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with plans of both kinds: by AllReduce, and on servers."""
    folder = make_mlp(tmp_path_factory.mktemp("plans"))
    for strategy in ("allreduce", "ps"):
        out = ("-o", folder / strategy)
        done("compile", folder / "train.onnx", "-c", PAIR, "--strategy", strategy, *out)
    return folder


def first(tree: Tree, kind: str) -> Tree:
    return next(i for i in tree["instructions"] if i["type"] == kind)


def set_in(entry: Callable[[Tree], Tree], key: str, value: object) -> Callable[[Tree], object]:
    return lambda tree: entry(tree).__setitem__(key, value)


def hold(box: Tree) -> Callable[[Tree], object]:
    return lambda tree: tree["ranks"][0]["pieces"][0].update(box=box)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (set_in(lambda t: t, "model", "/etc/passwd"), "'/etc/passwd', which the plan does not have"),
        (set_in(lambda t: first(t, "run"), "segment", "../outside.onnx"), "segment '../outside.onnx'"),
        (set_in(lambda t: t["files"], "../outside.onnx", "0"), "leads out of the folder"),
        (set_in(lambda t: t["files"], "/etc/passwd", "0"), "is an absolute path"),
        (set_in(lambda t: t["files"], "gone.onnx", "0"), "missing"),
        (lambda t: t["buffers"].clear(), "buffer 'bucket0', which the plan does not have"),
        (set_in(lambda t: t["buffers"][0], "elements", 3), "of a buffer of 3"),
        (set_in(lambda t: t["buffers"][0], "elements", 1 << 60), "no machine holds"),
        (set_in(lambda t: t["buffers"][0], "dtype", "object"), "no type of numbers"),
        (set_in(lambda t: t["slices"][0], "offset", -1), "offset -1"),
        (set_in(lambda t: first(t, "start"), "group", "everybody"), "group 'everybody'"),
        (set_in(lambda t: first(t, "start"), "reads", []), "of 0 values into"),
        (set_in(lambda t: first(t, "start"), "counts", [1, 2, 3]), "3 counts"),
        (set_in(lambda t: t, "replicas", 3), "the plan has 3"),
        (lambda t: t["ranks"].pop(0), "do not count from 0"),
        (lambda t: t["variables"].pop(0), "which the plan does not have"),
        (set_in(lambda t: t["variables"][0], "shape", [1 << 62, 8]), "no machine holds"),
        (hold({"factored": [[6], [4, 2]], "ranges": [[[0, 6]], [[0, 4], [0, 3]]]}), "[0, 3) of 2 on axis 1"),
        (hold({"factored": [[6], [4, 2]], "ranges": [[[0, 6]], [[3, 2], [0, 2]]]}), "[3, 2) of 4 on axis 1"),
        (hold({"factored": [[6], [3, 2]], "ranges": [[[0, 6]], [[0, 3], [0, 2]]]}), "factors [3, 2] of"),
        (hold({"factored": [[6], [8]], "ranges": [[[0, 6]], [[0, 4], [0, 1]]]}), "2 axes of factors"),
        (hold({"factored": [[6]], "ranges": [[[0, 6]]]}), "1 axes of factors"),
        (hold({"factored": [[6], [8]], "ranges": [[[0, 6]], [[0, 4]]]}), "rank 0 a part of it"),
        (set_in(lambda t: t, "loss", "gain"), "the loss is output 'gain'"),
        (set_in(lambda t: t["data_inputs"][0], "sample_axis", 9), "sample axis 9"),
        (set_in(lambda t: t["outputs"][0], "value", "nothing"), "value 'nothing'"),
        (lambda t: t["data_inputs"].append(t["data_inputs"][0]), "twice"),
        (lambda t: t["instructions"].remove(first(t, "wait")), "nobody waits"),
        (lambda t: t["instructions"].remove(first(t, "start")), "which nobody starts"),
        (set_in(lambda t: t["ranks"][0], "threads", 1_000_000), "1000000 threads"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_itself_is_refused_edited_or_accepted(
    made: Path, tmp_path: Path, damage: Callable[[Tree], object], what: str
) -> None:
    tree = json.loads((made / "allreduce" / "plan.json").read_bytes())
    damage(tree)
    edited = json.dumps(tree).encode()
    folder = copy_of(made / "allreduce", tmp_path / "out")

    (folder / "plan.json").write_bytes(edited)
    for command in (("run", folder, "--steps", "1"), ("simulate", folder), ("verify", folder)):
        refused(*command, what="the plan was changed", at="plan.json", fix=f"partc seal {folder}")
    refused("seal", folder, what=what, at=str(folder), fix="compile the model again")
    assert (folder / "plan.json").read_bytes() == edited
    (folder / "plan.json").write_bytes(encode_plan(msgspec.json.decode(edited, type=Plan)))
    refused("simulate", folder, what=what, at=str(folder), fix="compile the model again")


def copy_of(folder: Path, to: Path) -> Path:
    for path in folder.rglob("*"):
        if path.is_file():
            (to / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(folder)).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_what_partc_compiles_fits_itself(made: Path, strategy: str) -> None:
    check_references(read_plan_folder(made / strategy).plan)


def test_spaces_and_the_order_of_keys_are_no_edit(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made / "ps", tmp_path / "out")
    tree = json.loads((folder / "plan.json").read_bytes())
    (folder / "plan.json").write_text(json.dumps(dict(reversed(tree.items()))))

    assert read_plan_folder(folder).plan == read_plan_folder(made / "ps").plan
    assert seal_plan_folder(folder) == []


def test_an_edit_that_was_accepted_is_run(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made / "allreduce", tmp_path / "out")
    plan = decode_plan((folder / "plan.json").read_bytes(), folder)
    threads = tuple(msgspec.structs.replace(rank, threads=2) for rank in plan.ranks)
    (folder / "plan.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(plan, ranks=threads)))
    with pytest.raises(BadPlan, match="the plan was changed"):
        read_plan_folder(folder)
    (folder / "strategy.json").write_text("{}")

    told = done("seal", folder)

    assert told.startswith("accepted: strategy.json, plan.json\n") and "partc verify tells" in told
    assert read_plan_folder(folder).plan.ranks[0].threads == 2


def test_a_link_that_leaves_the_plans_folder_is_refused(made: Path, tmp_path: Path) -> None:
    folder = copy_of(made / "ps", tmp_path / "out")
    (tmp_path / "elsewhere.json").write_bytes((folder / "strategy.json").read_bytes())
    (folder / "strategy.json").unlink()
    (folder / "strategy.json").symlink_to(tmp_path / "elsewhere.json")

    refused("simulate", folder, what="a link that leads out", at="plan.json", fix="compile")


def test_a_deleted_all_reduce_is_told_by_the_command_line(made: Path, tmp_path: Path) -> None:
    """Accepted by hand, it runs to its end; but replicas drift apart, and their variables are no result."""
    folder = copy_of(made / "allreduce", tmp_path / "out")
    tree = json.loads((folder / "plan.json").read_bytes())
    tree["instructions"] = [i for i in tree["instructions"] if i["type"] not in ("start", "wait")]
    (folder / "plan.json").write_text(json.dumps(tree))
    done("seal", folder)

    answer = partc("run", folder, "--steps", "2")

    assert answer.code == 2
    assert "ranks ended with different copies of 4 variables: layer0.weight, layer0.bias" in answer.error
    assert f"the first rank's variables are in {folder / 'disagreeing.safetensors'}" in answer.error
    assert not (folder / "trained.safetensors").exists() and not (folder / "trained.onnx").exists()
    assert read_arrays(folder / "disagreeing.safetensors").keys() >= {"layer0.weight", "layer1.bias"}


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_instructions_in_any_order_any_number_of_times_are_a_plan_or_refused(
    made: Path, tmp_path: Path, strategy: str
) -> None:
    folder = tmp_path / "plan"
    shutil.copytree(made / strategy, folder)
    plan = read_plan_folder(folder).plan
    several = range(len(plan.instructions))
    orders = [
        edited
        for at in several
        for edited in (
            [*several[: at + 1], *several[at:]],
            [*several[:at], *several[at + 1 :]],
            [at, *several[:at], *several[at + 1 :]],
            [*several[:at], *several[at + 1 :], at],
        )
    ]
    refused_orders = 0
    for order in orders:
        edited_plan = msgspec.structs.replace(plan, instructions=tuple(plan.instructions[n] for n in order))
        (folder / "plan.json").write_bytes(encode_plan(edited_plan))
        try:
            read_plan_folder(folder)
        except BadPlan:
            refused_orders += 1

    assert refused_orders > len(orders) / 2
