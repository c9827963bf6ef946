"""Completion, by the variables through which bash, zsh and fish ask for it."""

import subprocess
import sys
from pathlib import Path

import pytest

from partc.compiler.commands.cli import main
from tests.checks.command_line import EXAMPLES


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with files of several kinds, and a plan."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.onnx", "trained.txt", "cluster.json", "mine.json", "data.npz"):
        Path(name).touch()
    Path("sub").mkdir()
    Path("sub/deep.onnx").touch()
    Path("out").mkdir()
    Path("out/plan.json").touch()


def offered(
    line: str, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> set[str]:
    """Return what a shell is offered at the end of a line."""
    monkeypatch.setenv("_PARTC_COMPLETE", f"complete_{shell}")
    if shell == "bash":
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    else:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit):
        main([])
    lines = capsys.readouterr().out.splitlines()
    if shell == "zsh":
        lines = [word.partition('":')[0].strip('"') for word in lines]
        lines[0] = lines[0].removeprefix("_arguments '*: :((\"")
        lines = [word.removesuffix("))'").strip('"') for word in lines]
    return {word.partition("\t")[0] for word in lines if word}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("partc comp", {"compile", "compare"}),
        ("partc checkpoint ", {"ls", "verify", "export"}),
        ("partc model r", {"resnet50", "resnet101", "rnntc", "rnnlm"}),
        ("partc inspect t", {"train.onnx"}),
        ("partc inspect sub/", {"sub/deep.onnx"}),
        ("partc run o", {"out"}),
        ("partc compile --strategy m", {"microbatches", "mine.json"}),
        ("partc compile --method ", {"auto", "mcmc", "ilp", "dp", "exhaustive"}),
        ("partc compile --without local", {"local-aggregation"}),
        ("partc compile -c ", {"cluster.json", "mine.json", "trained.txt"}),
        ("partc run out --data ", {"synthetic", "data.npz"}),
        ("partc grad f.onnx --optimizer ada", {"adagrad", "adam", "adamw", "adafactor"}),
        ("partc cluster init --gpu-type h", {"h100", "h200"}),
        ("partc examples copy cluster-2", {"cluster-2x2.json"}),
        ("partc simulate --me", {"--measure"}),
    ],
)
def test_words_are_completed(
    line: str,
    words: set[str],
    shell: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert offered(line, shell, monkeypatch, capsys) == words


def test_a_file_of_no_fitting_name_is_left_to_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offered("partc inspect su", "bash", monkeypatch, capsys) == set()
    assert offered("partc inspect su", "zsh", monkeypatch, capsys) == {"_files"}


def test_bash_completes_by_the_script_that_partc_writes() -> None:
    partc = Path(sys.executable).with_name("partc")
    script = (
        f"source <(_PARTC_COMPLETE=source_bash {partc}); COMP_WORDS=(partc model len); COMP_CWORD=2; "
        f'_partc_completion {partc}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )

    completed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=EXAMPLES)

    assert completed.stdout.split() == ["lenet"], completed.stderr
