"""A plan's folder appears whole or not at all, and holds what it says it holds."""

import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.compiler.output.plan_files import PlanFiles
from partc.passes.graph.training_graph import MadeTensor, StoredTensor
from partc.runtime.errors import BadUsage
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.variables import Constant, Made, Stored
from tests.builders.graphs.foreign_steps import ADAM, SGD, parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)
from tests.checks.command_line import hashes_of
from tests.checks.held_folders import held_by_another
from tests.checks.small_disk import small_disk

EMPTY = "graph () => (float y) { y = Constant <value = float {1.0}> () }"


def test_all_but_the_report_is_hashed_in_the_plan(tmp_path: Path) -> None:
    folder = compile_step(import_text(ADAM), tmp_path / "out").folder

    found = hashes_of(folder.path)
    del found["plan.json"]
    del found["report.html"]  # a run adds what it measured
    assert folder.plan.files == found
    assert {"strategy.json", "cluster.json", "annotated.onnx", "train.onnx"} <= found.keys()
    assert "initial.safetensors" in found
    assert folder.plan.predicted_step_s > 0


def test_a_model_whose_constants_lie_in_a_file_beside_it_trains(tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    model = parse(SGD.replace("float lr = {0.1}", "float[4,3] lr"))
    model.graph.initializer.append(numpy_helper.from_array(np.full((4, 3), 0.1, np.float32), "lr"))
    onnx.save(model, path, save_as_external_data=True, location="step.data", size_threshold=0)
    options = GraphOptions(state={"W": "W_next"})

    training = import_training_graph(path, options, needs_initial=False)
    compiled = compile_step(training, tmp_path / "out")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, steps=2))


def test_compiling_twice_gives_identical_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        compile_step(import_text(ADAM), tmp_path / name, strategy="ps")

    assert hashes_of(tmp_path / "one") == hashes_of(tmp_path / "two")


def test_ranks_that_do_the_same_share_files(tmp_path: Path) -> None:
    few = compile_step(import_text(SGD), tmp_path / "few", "1x2", "allreduce")
    many = compile_step(import_text(SGD), tmp_path / "many", "1x8", "allreduce")

    assert len(list((few.folder.path / "segments").iterdir())) == len(
        list((many.folder.path / "segments").iterdir())
    )


def test_a_segment_is_a_file_of_its_name_and_no_other_may_have_it(tmp_path: Path) -> None:
    files = PlanFiles(tmp_path / "out")
    with files:
        path = files.save_segment(parse(EMPTY), "01-worker-forward")
        with pytest.raises(AssertionError, match="two segments"):
            files.save_segment(parse(EMPTY.replace("1.0", "2.0")), "01-worker-forward")

    assert path == "segments/01-worker-forward.onnx"
    assert onnx.load(tmp_path / "out" / path) == parse(EMPTY)


def test_initial_values_are_stored_made_or_described(tmp_path: Path) -> None:
    files = PlanFiles(tmp_path / "out")
    tensor = onnx.numpy_helper.from_array(np.ones(3, np.float32), "W")
    with files:
        assert files.save_initial("W", StoredTensor(tensor, Path())) == Stored("initial.safetensors", "W")
        made = files.save_initial("V", MadeTensor(parse(EMPTY), "y"))
        assert files.save_initial("m", Constant(0.0)) == Constant(0.0)

    assert isinstance(made, Made)
    assert made.output == "y"
    onnx.checker.check_model(str(tmp_path / "out" / made.file))


class Broken(Exception):
    """A stand-in for whatever may go wrong."""


def break_off(out: Path) -> None:
    with PlanFiles(out) as files:
        files.save_segment(parse(EMPTY), "01")
        raise Broken


@pytest.mark.parametrize("earlier", [True, False])
def test_a_failure_leaves_what_was_there(tmp_path: Path, earlier: bool) -> None:
    if earlier:
        compile_step(import_text(SGD), tmp_path / "out")
    before = hashes_of(tmp_path)

    with pytest.raises(Broken):
        break_off(tmp_path / "out")

    assert hashes_of(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_failed_renaming_puts_the_earlier_result_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_step(import_text(SGD), tmp_path / "out")
    before = hashes_of(tmp_path)
    rename = Path.rename

    def fail_for_the_new(self: Path, target: Path) -> Path:
        if target == tmp_path / "out" and self.name == "plan":
            raise OSError(28, "No space left on device", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(OSError, match="No space"), PlanFiles(tmp_path / "out"):
        pass

    assert hashes_of(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


HOLD = """
import sys, time
from pathlib import Path
from partc.compiler.output.plan_files import PlanFiles
with PlanFiles(Path(sys.argv[1])) as files:
    print(files.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("name", ["out", "run [1]*"])
def test_what_a_killed_compilation_wrote_is_removed_by_the_next_and_what_runs_is_not(
    tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        left = Path(holder.stdout.readline().strip())
        with pytest.raises(Broken):
            break_off(out)
        assert left.exists()  # it is being written
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert left.exists()

        with PlanFiles(tmp_path / "another"):
            assert left.exists()
        with PlanFiles(out) as files:
            files.save_segment(parse(EMPTY), "01")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["another", name])
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_files_of_the_user_s_are_not_removed_where_a_compilation_is_killed_while_it_moves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = compile_step(import_text(SGD), tmp_path / "out").folder.path
    (out / "diary.txt").write_text("dear diary")
    rename = Path.rename

    def stop_at_the_diary(self: Path, target: Path) -> Path:
        if self.name == "diary.txt":
            raise Broken
        return rename(self, target)

    with monkeypatch.context() as killing:
        killing.setattr(Path, "rename", stop_at_the_diary)
        with pytest.raises(Broken):
            compile_step(import_text(SGD), out)
    compile_step(import_text(SGD), out)

    assert [path.read_text() for path in tmp_path.rglob("diary.txt")] == ["dear diary"]


def test_a_plan_that_is_trained_is_not_replaced_also_where_its_training_began_later(tmp_path: Path) -> None:
    out = compile_step(import_text(SGD), tmp_path / "out").folder.path
    before = (out / "plan.json").read_bytes()

    with held_by_another(out), pytest.raises(BadUsage, match="fix: wait for its end"):
        compile_step(import_text(ADAM), out)
    with ExitStack() as meanwhile:
        files = PlanFiles(tmp_path / "new")
        files.__enter__()
        shutil.copytree(out, tmp_path / "new")  # somebody else compiles there, and trains
        meanwhile.enter_context(held_by_another(tmp_path / "new"))
        with pytest.raises(BadUsage, match="fix: wait for its end"):
            files.__exit__(None, None, None)

    assert (out / "plan.json").read_bytes() == (tmp_path / "new" / "plan.json").read_bytes() == before


def test_a_link_to_a_plans_folder_stays_a_link(tmp_path: Path) -> None:
    compile_step(import_text(SGD), tmp_path / "there")
    (tmp_path / "out").symlink_to(tmp_path / "there")

    compile_step(import_text(ADAM), tmp_path / "out")

    assert (tmp_path / "out").is_symlink()
    assert {variable.name for variable in read_plan_folder(tmp_path / "there").plan.variables} >= {"m", "v"}


def test_a_full_disk_is_told_with_the_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        with pytest.raises(OSError, match="No space left") as end, PlanFiles(disk / "out") as files:
            (files.folder / "large.bin").write_bytes(b"x" * 20_000)

        assert end.value.filename == str(disk / "out")
        assert list(disk.iterdir()) == []


def test_what_is_no_plan_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary")

    with pytest.raises(BadUsage, match="not a plan's folder"), PlanFiles(tmp_path):
        pass

    assert (tmp_path / "diary.txt").read_text() == "dear diary"


def test_the_plan_is_plain_json_of_a_known_format(tmp_path: Path) -> None:
    folder = compile_step(import_text(SGD), tmp_path / "out").folder

    plan = msgspec.json.decode((folder.path / "plan.json").read_bytes())

    assert plan["format"] == "partc-plan/7"
    assert str(tmp_path) not in (folder.path / "plan.json").read_text()


# ---------------------------------------------------------------- an earlier plan's folder


def test_only_what_the_earlier_plan_lists_goes(tmp_path: Path) -> None:
    out = compile_step(import_text(ADAM), tmp_path / "out").folder.path
    gone = hashes_of(out).keys() - {"plan.json"}
    (out / "notes").mkdir()
    (out / "notes" / "diary.txt").write_text("dear diary")
    (out / "link").symlink_to(tmp_path)
    (out / "segments" / "mine.txt").write_bytes(b"mine")

    compile_step(import_text(SGD), out)

    assert (out / "notes" / "diary.txt").read_text() == "dear diary"
    assert (out / "link").is_symlink()
    assert (out / "segments" / "mine.txt").read_bytes() == b"mine"
    listed = read_plan_folder(out).plan.files.keys() | {"report.html"}
    assert not {name for name in gone - listed if (out / name).exists()}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_file_of_somebody_elses_under_a_plans_name_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").write_text('{"format": "partc-plan/0", "files": {}}')
    (out / "train.onnx").write_bytes(b"mine")
    before = hashes_of(out)

    with pytest.raises(BadUsage, match=r"the name of one: train\.onnx"):
        compile_step(import_text(SGD), out)

    assert hashes_of(out) == before


@pytest.mark.parametrize("name", ["trained.safetensors", "trained.onnx", "disagreeing.safetensors"])
def test_trained_variables_go_by_force_alone(tmp_path: Path, name: str) -> None:
    out = compile_step(import_text(SGD), tmp_path / "out").folder.path
    (out / name).write_bytes(b"trained for weeks")
    before = hashes_of(out)

    with pytest.raises(BadUsage, match=f"holds trained variables: {name}"), PlanFiles(out):
        pass
    assert hashes_of(out) == before

    with PlanFiles(out, force=True) as files:
        files.save_segment(parse(EMPTY), "01")
    assert not (out / name).exists()


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"format": "cake/1", "files": {}}', '{"format": "partc-plan/7"}', ""]
)
def test_a_foreign_plan_json_is_not_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)

    with pytest.raises(BadUsage, match="not a plan's folder"), PlanFiles(tmp_path):
        pass

    assert (tmp_path / "plan.json").read_text() == text
