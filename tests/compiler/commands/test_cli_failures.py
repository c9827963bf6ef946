"""What goes wrong after the arguments were right: damaged plans, diverging losses, broken compilations."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.output import describe_plan
from tests.builders.graphs.foreign_steps import parse
from tests.checks.command_line import PAIR, done, hashes_of, make_mlp, partc, refused
from tests.checks.small_disk import small_disk
from tests.sampling import sampled


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny perceptron, compiled into out/, in the current folder."""
    monkeypatch.chdir(make_mlp(tmp_path))
    done("compile", "train.onnx", "-c", PAIR, "-o", "out")
    return tmp_path


def names_beside(folder: Path) -> set[str]:
    """Return what lies in a folder, but for the log of wall times."""
    return {path.name for path in folder.iterdir()} - {"out.log"}


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("command", ["run out --steps 1", "verify out --steps 1"])
@pytest.mark.parametrize("pattern", ["segments/*.onnx", "train.onnx", "strategy.json", "cluster.json"])
def test_a_plan_whose_files_were_changed_is_refused(folder: Path, command: str, pattern: str) -> None:
    file = next((folder / "out").glob(pattern))
    file.write_bytes(file.read_bytes() + b" ")

    refused(*command.split(), what="was changed: SHA-256", at=file.name, fix="compile the model again")

    file.unlink()
    refused(*command.split(), what="missing", at=file.name, fix="compile the model again")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda text: text[:300], "truncated"),
        (lambda text: text.replace(b"partc-plan/7", b"partc-plan/8"), "'partc-plan/8'"),
        (lambda text: b"[]", "not a plan"),
        (lambda text: b"\xff\x00", "not a plan"),
    ],
)
def test_a_damaged_plan_is_refused(folder: Path, damage: Callable[[bytes], bytes], what: str) -> None:
    plan = folder / "out" / "plan.json"
    plan.write_bytes(damage(plan.read_bytes()))

    refused("run", "out", "--steps", "1", what=what, at="plan.json", fix="compile the model again")


# ---------------------------------------------------------------- disks


def test_a_full_disk_is_told_with_the_file_and_leaves_what_was_there(folder: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        for name in ("trace.json", "page.html"):
            (disk / name).write_text("as before")
        for command in ("simulate out --trace trace.json", "compare out out --html page.html"):
            *words, name = command.split()
            answer = partc(*words, disk / name)
            assert answer.code == 2 and f"No space left on device\n  at:  {disk / name}" in answer.error

        assert [path.read_text() for path in disk.iterdir()] == ["as before"] * 2


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize(
    "command", ["verify out --steps 4 --data", "compile train.onnx -c cluster.json -o new --sample-data"]
)
@pytest.mark.parametrize(
    ("function", "said", "at"),
    [
        ("fails_later", "ValueError: mine", "later_batches.py:7"),
        ("of_c", "TypeError: 'int'", "later_batches:of_c"),
    ],
)
def test_a_function_that_fails_behind_its_first_batch_is_no_mistake_of_partc(
    folder: Path, command: str, function: str, said: str, at: str
) -> None:
    Path("cluster.json").write_text(Path(PAIR).read_text())
    Path("later_batches.py").write_text(
        "import numpy as np\n"
        "BATCH = {'x': np.zeros((8, 6), np.float32), 'labels': np.zeros(8, np.int64)}\n"
        "def of_c():\n"
        "    return map(dict, [BATCH, 3])\n"
        "def fails_later():\n"
        "    yield BATCH\n"
        "    raise ValueError('mine')\n"
    )

    name = f"later_batches:{function}"
    refused(*command.split(), name, what=f"{name} gives no more batches: {said}", at=at, fix="mend")


@pytest.fixture
def poisoned(folder: Path) -> Path:
    """Data whose third step has a NaN for the second replica."""
    x = np.zeros((64, 6), np.float32)
    x[2 * 8 + 4] = np.nan
    np.savez("nan.npz", x=x, labels=np.zeros(64, np.int64))
    return folder


@pytest.mark.parametrize(
    "options", sampled(["", "--strategy ps", "--batch global --strategy allreduce"], range(2, 3))
)
def test_a_nan_loss_stops_and_names_the_step_and_the_rank(poisoned: Path, options: str) -> None:
    done("compile", "train.onnx", "-c", PAIR, "-o", "out", *options.split())
    share = 2 if "global" not in options else 1
    x = np.zeros((4 * 4 * share, 6), np.float32)
    x[(2 * 4 + 2) * share] = np.nan
    np.savez("nan.npz", x=x, labels=np.zeros(len(x), np.int64))

    answer = partc("run", "out", "--steps", "4", "--data", "nan.npz")

    assert answer.code == 2
    assert "the loss is nan in step 3: the data holds nan" in answer.error
    assert "at:  rank 1 (replica 1 on host1/cpu0); " in answer.error
    assert f"nan.npz: array 'x', element [{(2 * 4 + 2) * share}, 0]" in answer.error
    assert "fix: correct that data" in answer.error
    assert not (poisoned / "out" / "trained.safetensors").exists()


def test_a_nan_loss_goes_on_if_the_user_says_so(poisoned: Path) -> None:
    shown = done("run", "out", "--steps", "4", "--data", "nan.npz", "--on-nan", "continue")

    assert "4 steps" in shown
    assert "the loss is not finite since step 3: the trained variables are of no use" in shown
    answer = partc("run", "out", "--steps", "5", "--data", "nan.npz", "--on-nan", "continue", "--json")
    assert json.loads(answer.out)["not_finite_since"] == 3
    assert (poisoned / "out" / "trained.safetensors").exists()


def test_a_nan_loss_keeps_the_variables_of_an_earlier_run(poisoned: Path) -> None:
    done("run", "out", "--steps", "1")
    before = hashes_of(poisoned / "out")

    assert partc("run", "out", "--steps", "4", "--data", "nan.npz").code == 2

    after = hashes_of(poisoned / "out")
    # What the launcher prints while it ends the ranks depends on which of them it reaches first; the steps
    # that were trained are the later run's.
    for name in ("run.log", "metrics.jsonl"):
        del before[name], after[name]
    assert after == before


# ---------------------------------------------------------------- compilations


def _break_while_writing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def render(*_: object) -> str:
        raise error

    monkeypatch.setattr(describe_plan, "render_report", render)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "report.html"), KeyboardInterrupt()]
)
def test_a_compilation_that_breaks_off_leaves_the_earlier_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = hashes_of(folder / "out")
    _break_while_writing(monkeypatch, error)

    answer = partc("compile", "train.onnx", "-c", PAIR, "--strategy", "ps", "-o", "out")

    assert answer.code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert hashes_of(folder / "out") == before
    assert names_beside(folder) == {"forward.onnx", "out", "train.onnx"}


def test_a_full_disk_is_told_in_three_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _break_while_writing(monkeypatch, OSError(28, "No space left on device", "report.html"))

    refused(
        *("compile", "train.onnx", "-c", PAIR, "-o", "new"),
        what="No space left on device",
        at="report.html",
        fix="on a disk that has room",
    )
    assert not (folder / "new").exists()


def test_a_failed_compilation_leaves_the_earlier_result_and_no_folder_beside_it(folder: Path) -> None:
    before = hashes_of(folder / "out")
    strategy = folder / "s.json"
    strategy.write_text(
        '{"format": "partc-strategy/1", "batch": "per-replica",'
        ' "parameters": {"gone": {"method": "all_reduce"}}}'
    )

    refused("compile", "train.onnx", "-c", PAIR, "--strategy", strategy, "-o", "out", fix="remove the entry")

    strategy.unlink()
    assert hashes_of(folder / "out") == before
    assert names_beside(folder) == {"forward.onnx", "out", "train.onnx"}


def test_a_failed_grad_leaves_the_earlier_graph(folder: Path) -> None:
    before = hashes_of(folder)

    refused("grad", "forward.onnx", "--loss", "logits", "-o", "train.onnx", fix="reduce it to a scalar")

    assert hashes_of(folder) == before


# ---------------------------------------------------------------- what only shows at run time


def write_forward(path: Path, text: str, **weights: np.ndarray) -> None:
    model = parse(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w, name) for name, w in weights.items())
    onnx.save(model, path)


@pytest.mark.parametrize("strategy", sampled(["ps", "allreduce"], range(1)))
def test_an_id_beyond_its_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "lookup (int64[8] ids) => (float[8,2] y) { rows = Gather (E, ids) y = MatMul (rows, W) }"
    write_forward(Path("f.onnx"), text, E=np.ones((30, 4), np.float32), W=np.ones((4, 2), np.float32))
    done("grad", "f.onnx", "--loss", "mse", "-o", "t.onnx")
    done("compile", "t.onnx", "-c", PAIR, "--strategy", strategy, "-o", "out")
    np.savez("data.npz", ids=np.where(np.arange(64) == 37, 99, 1), targets=np.zeros((64, 2), np.float32))

    place = "data.npz: data input 'ids', step 3, sample 37"
    refused("run", "out", "--steps", "1", "--data", "data.npz", what="value 99", at=place, fix="correct")

    assert not (tmp_path / "out" / "trained.safetensors").exists()


def test_an_op_without_a_kernel_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "g (double[4,3,8,8] x) => (double[4,4,6,6] y) { y = Conv (x, W) }"
    write_forward(Path("f.onnx"), text, W=np.ones((4, 3, 3, 3)))
    done("grad", "f.onnx", "--loss", "mse", "-o", "t.onnx")

    refused("compile", "t.onnx", "-c", PAIR, "-o", "out", what="Conv in float64", at="t.onnx", fix="float32")
