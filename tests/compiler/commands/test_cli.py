"""Every command from the model's name to verified training. What it refuses: test_cli_refusals.py."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from partc.compiler.commands.cli import COMMANDS, app_for
from partc.compiler.verification.ranks import Ranks, launch_in_process
from partc.compiler.verification.verify import verify
from tests.builders.graphs.foreign_steps import parse, with_zeros
from tests.checks.command_line import EXAMPLES, MLP, PAIR, done, hashes_of, make_mlp, partc, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny perceptron, compiled into out/. Tests leave it as it is."""
    folder = make_mlp(tmp_path_factory.mktemp("cli"))
    done("compile", folder / "train.onnx", "-c", PAIR, "-o", folder / "out")
    return folder


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    shown = done(command, "--help")

    assert f"partc {command}" in shown.partition("xample")[2] or command == "executor"
    assert "-h, --help" in shown


def test_the_example_of_the_daemon_says_who_starts_it() -> None:
    assert "Started by `partc run`" in done("executor", "--help")


def test_without_a_command_the_help_lists_all() -> None:
    shown = done()

    assert all(re.search(rf"^  {command} ", shown, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("group", ["checkpoint", "cluster"])
def test_a_group_without_a_command_shows_its_help(group: str) -> None:
    assert done(group) == done(group, "--help")


def test_the_help_of_model_lists_models_and_their_options() -> None:
    shown = " ".join(done("model", "--help").split())

    assert "mlp: multi-layer perceptron" in shown
    assert "vocab" in shown


def test_all_ways_tell_the_version_that_is_installed() -> None:
    installed = version("partc")
    assert done("--version") == f"partc {installed}\n"
    in_python = "import partc, sys; print(partc.__version__); sys.argv[1:] = ['--version']"
    run_module = f"{in_python}; import runpy; runpy.run_module('partc', run_name='__main__')"
    shown = subprocess.run([sys.executable, "-c", run_module], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, f"{installed}\npartc {installed}\n")


def test_it_runs_as_a_module_and_as_a_script() -> None:
    script = Path(sys.executable).with_name("partc")
    for command in ([sys.executable, "-m", "partc.compiler.commands.cli"], [str(script)]):
        shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
        assert "Usage: partc" in shown


def test_examples_of_help_name_options_that_exist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    for command in ("model", "grad", "inspect", "compile", "run", "verify"):
        example = done(command, "--help").partition("Example: partc ")[2].split("\n\n")[0].split()
        named = {word for word in example if word.startswith("--")}
        assert named <= set(re.findall(r"--[\w-]+", done(command, "--help")))


# ---------------------------------------------------------------- commands


def test_model_writes_a_forward_graph(tmp_path: Path) -> None:
    shown = done("model", "mlp", *MLP, "-o", tmp_path / "deep" / "f.onnx")

    onnx.checker.check_model(str(tmp_path / "deep" / "f.onnx"), full_check=True)
    assert re.fullmatch(r"mlp: \d+ nodes -> .*f.onnx\n", shown)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad"])
def test_grad_writes_a_training_graph(folder: Path, tmp_path: Path, optimizer: str) -> None:
    arguments = (folder / "forward.onnx", "--loss", "mse", "--optimizer", optimizer, "--lr", "0.5")
    done("grad", *arguments, "--clip-global-norm", "1", "-o", tmp_path / "t.onnx")

    model = onnx.load(tmp_path / "t.onnx")
    onnx.checker.check_model(model)
    assert len(model.graph.output) == 2 + 4 * (1 if optimizer == "sgd" else 2)


def test_inspect_shows_variables_inputs_and_work(folder: Path) -> None:
    shown = done("inspect", folder / "train.onnx")

    assert re.search(r"layer0.weight .* parameter .* float32 .* 6 x 8 .* dense", shown)
    assert re.search(r"labels .* int64 .* 0 to 2", shown)
    assert "main computation" in shown


def test_inspect_reads_the_graph_of_a_plan_and_names_it_where_the_folder_is_given(
    folder: Path, tmp_path: Path
) -> None:
    done("compile", folder / "train.onnx", "-c", PAIR, "-o", tmp_path / "out")

    shown = done("inspect", tmp_path / "out" / "train.onnx", "--groups")

    assert shown == done("inspect", folder / "train.onnx", "--groups")
    fix = f"such as {tmp_path / 'out' / 'train.onnx'}"
    refused("inspect", tmp_path / "out", what="a folder, not a file", fix=fix)


def test_inspect_lists_operator_groups_on_lines_that_nothing_folds(folder: Path) -> None:
    lines = done("inspect", folder / "train.onnx", "--groups").splitlines()

    assert lines[0].startswith("2 operator groups")
    assert re.search(r"  4 x 8  \[layer0.weight(, layer0.bias)?\]", lines[1])
    assert '"out:1": 8' in lines[2]


def test_compile_says_what_it_decided_and_where_the_report_is(folder: Path, tmp_path: Path) -> None:
    shown = done("compile", folder / "train.onnx", "-c", PAIR, "-o", tmp_path / "out")

    lines = shown.splitlines()
    assert lines[0] == "parameters: 4 by all_reduce"
    assert lines[1:3] == ["data input x: samples on axis 0", "data input labels: samples on axis 0"]
    assert re.fullmatch(r"2 ranks, [\d.]+ ms/step predicted -> .*out", lines[3])
    assert lines[4].startswith(f"report: {tmp_path / 'out' / 'report.html'}")
    assert hashes_of(tmp_path / "out") == hashes_of(folder / "out")


def test_compile_says_that_no_parameter_changes(tmp_path: Path) -> None:
    kept = """step (float[8,4] x, float[4,3] W) => (float loss, float[4,3] W_next) {
        y = MatMul (x, W)
        loss = ReduceMean <keepdims = 0> (y)
        W_next = Identity (W)
    }"""
    onnx.save(with_zeros(parse(kept), "W"), tmp_path / "kept.onnx")

    shown = done("compile", tmp_path / "kept.onnx", "--state", "W=W_next", "-c", PAIR, "-o", tmp_path / "out")

    assert shown.splitlines()[0] == "parameters: none that a gradient changes"


@pytest.mark.parametrize("strategy", ["hybrid", "allreduce", "ps"])
@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_compile_takes_every_strategy_and_its_own_file_back(
    folder: Path, tmp_path: Path, strategy: str, batch: str
) -> None:
    train = folder / "train.onnx"
    options = ("-c", PAIR, "--batch", batch)
    done("compile", train, *options, "--strategy", strategy, "-o", tmp_path / "out")
    file = tmp_path / "out" / "strategy.json"

    done("compile", train, "-c", PAIR, "--strategy", file, "-o", tmp_path / "again")

    assert (tmp_path / "again" / "strategy.json").read_bytes() == file.read_bytes()
    segments = "segments"
    assert hashes_of(tmp_path / "again" / segments) == hashes_of(tmp_path / "out" / segments)


def test_compile_takes_the_resource_file_of_the_manual(folder: Path, tmp_path: Path) -> None:
    done("compile", folder / "train.onnx", "-c", EXAMPLES / "resource-info.txt", "-o", tmp_path / "out")

    assert "gpu" in (tmp_path / "out" / "cluster.json").read_text()


def test_compiling_again_replaces_the_plan_and_leaves_nothing_beside_it(folder: Path, tmp_path: Path) -> None:
    compile_into = ("compile", folder / "train.onnx", "-c", PAIR, "-o", tmp_path / "out")
    done(*compile_into)
    done(*compile_into, "--strategy", "ps")

    assert '"servers"' in (tmp_path / "out" / "strategy.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "out.log"}


def test_run_trains_and_saves_twice_and_verify_leaves_that_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("compile", folder / "train.onnx", "-c", PAIR, "-o", out)
    before = hashes_of(out)

    shown = done("run", out, "--data", "synthetic", "--steps", "3")

    done_line = rf"^3 steps, [\d.]+ steps/s, [\d,]+ samples/s -> {out}/trained.safetensors$"
    assert re.search(done_line, shown, re.MULTILINE)
    assert shown.splitlines()[-2] == f"forward model with the trained variables -> {out}/trained.onnx"
    assert re.match(
        r"^a step: predicted \d.*s, measured \d.*s in steps 1 to 3, because ", shown.splitlines()[-1]
    )
    trained = load_file(out / "trained.safetensors")
    assert trained["layer0.weight"].shape == (6, 8)
    after = hashes_of(out)
    made = {"trained.safetensors", "trained.onnx", "run.log", "metrics.jsonl", "measured.json"}
    assert after.keys() - before.keys() == made
    del before["report.html"]  # tells what was measured, too
    assert before.items() <= after.items()

    shown = done("verify", out, "--steps", "2", "--seed", "7")

    assert re.search(
        r"^verified: 2 ranks against one device, 2 steps, per-replica batch", shown, re.MULTILINE
    )
    assert hashes_of(out) == after | {"run.log": hashes_of(out)["run.log"]}
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_verify_reports_what_differs_with_exit_code_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def launch(*arguments: Any) -> Iterator[Ranks]:
        with launch_in_process(*arguments) as ranks:
            read = ranks.read
            zeros = np.zeros(3, np.float32)
            monkeypatch.setattr(ranks, "read", lambda name: zeros if name == "layer1.bias" else read(name))
            yield ranks

    monkeypatch.setattr("partc.compiler.commands.verify.verify", partial(verify, launcher=launch))

    answer = partc("verify", folder / "out", "--steps", "1")

    assert (answer.code, answer.error) == (1, "")
    assert "NOT EQUAL: 2 ranks against one device" in answer.out
    assert "1 of 4 variables differ (layer1.bias), first in step 1" in answer.out


def test_a_plan_learns_from_a_file_and_from_a_function(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = folder / "out"
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.normal(size=(40, 6)).astype(np.float32), labels=rng.integers(0, 3, 40))
    Path("own_data.py").write_text(
        "import itertools\nimport numpy as np\n\n\ndef batches():\n"
        "    arrays = np.load('data.npz')\n"
        "    return itertools.repeat({'x': arrays['x'][:8], 'labels': arrays['labels'][:8]})\n"
    )
    for data in ("data.npz", "own_data:batches"):
        assert "verified: " in done("verify", out, "--steps", "2", "--data", data)


@pytest.mark.parametrize(
    ("command", "where"),
    [
        ("model mlp -o never.onnx", "model.build_model"),
        ("search OUT/train.onnx -c CLUSTER -o never.json", "search.search"),
        ("verify OUT", "verify.verify"),
        ("checkpoint ls OUT", "checkpoint.steps_in"),
    ],
)
def test_an_interrupted_command_says_so_with_the_code_of_the_signal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, where: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"partc.compiler.commands.{where}", interrupt)

    words = command.replace("OUT", str(folder / "out")).replace("CLUSTER", PAIR).split()
    answer = partc(*words)

    assert (answer.code, answer.error.splitlines()[-1:]) == (130, ["partc: interrupted"])


INTERRUPTED_IMPORT = """
import os, signal, sys
from partc.__main__ import main

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
interrupted, sys.argv[1:] = sys.argv[1], ["--version"]
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["partc.compiler.commands.cli", "typer", "partc.runtime.errors"])
def test_an_interrupt_while_a_command_begins_shows_no_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "partc: interrupted\n")


def test_what_the_list_of_commands_says_is_what_each_command_says() -> None:
    for name, line in COMMANDS.items():
        app = app_for(name)
        of_group = [group.typer_instance.info.help for group in app.registered_groups]
        told = [c.callback.__doc__ for c in app.registered_commands if c.name == name and c.callback]
        assert [*of_group, *told] == [line]


def test_help_imports_nothing_that_only_commands_need() -> None:
    script = (
        "import sys; from partc.compiler.commands.cli import main; main(['--help']); "
        "sys.exit(str({'numpy', 'onnx', 'onnxruntime', 'ortools', 'networkx', 'msgspec'} & {*sys.modules}))"
    )

    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert ran.stderr.strip() == "set()"
