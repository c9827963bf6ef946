"""Run `partc` in this process, and read what a person would: exit code, output, complaint."""

import contextlib
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

from partc.compiler.commands.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = str(EXAMPLES / "cluster-2x2.json")
PAIR = str(Path(__file__).with_name("cluster-2x1.json"))  # whose two ranks start in half the time
MLP = ("--set", "sizes=6,8,3", "--set", "batch=4")


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code."""

    code: int
    out: str
    error: str


def partc(*arguments: object) -> Answer:
    """Run one command."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main([str(argument) for argument in arguments])
    assert "Traceback" not in error.getvalue()
    return Answer(code, out.getvalue(), error.getvalue())


def done(*arguments: object) -> str:
    """Run one command that must succeed, and return what it printed."""
    answer = partc(*arguments)
    assert answer.code == 0, answer.error
    return answer.out


def refused(*arguments: object, what: str = "", at: str = "", fix: str) -> None:
    """Run one command that must be refused for the user's mistake, in three parts."""
    answer = partc(*arguments)
    assert answer.code == 2, answer
    assert answer.out == ""
    assert answer.error.startswith("partc: ")
    told, _, rest = answer.error.removeprefix("partc: ").partition("\n  at:  ")
    place, _, repair = rest.partition("\n  fix: ")
    assert what in told, answer.error
    assert at in place, answer.error
    assert fix in repair, answer.error
    assert repair.strip()


def make_mlp(folder: Path, *options: str) -> Path:
    """Write forward.onnx and train.onnx of a tiny perceptron, and return the folder."""
    done("model", "mlp", *MLP, "-o", folder / "forward.onnx")
    loss = ("--loss", "softmax_cross_entropy")
    done("grad", folder / "forward.onnx", *loss, *options, "-o", folder / "train.onnx")
    return folder


def make_wrong_files(folder: Path) -> Path:
    """Write what make_mlp writes, its plan in out/, and files that are not what their names say."""
    make_mlp(folder)
    done("compile", folder / "train.onnx", "-c", CLUSTER, "-o", folder / "out")
    (folder / "garbage.json").write_text("{nope")
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00\x81")
    (folder / "text.onnx").write_text("hello, I am no model\n")
    (folder / "text.npz").write_text("hello, I am no archive\n")
    (folder / "folder").mkdir()
    (folder / "folder" / "diary.txt").write_text("dear diary")
    return folder


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
