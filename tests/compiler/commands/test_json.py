"""--json: one document on stdout, which decodes into the command's record; progress on stderr."""

import json
import re
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from partc.compiler.commands import simulate as simulate_module
from partc.compiler.commands.cli import COMMANDS
from partc.compiler.commands.results.machines import (
    ClusterWritten,
    Diagnosis,
    ExampleList,
    ExamplesCopied,
    Profiled,
    SchemaList,
)
from partc.compiler.commands.results.models import Inspected, ModelList, ModelWritten, OpList, StepWritten
from partc.compiler.commands.results.plans import (
    Compiled,
    Decided,
    Materialised,
    Sealed,
    Simulated,
    StrategyFound,
    Verified,
)
from partc.compiler.commands.results.schemas import RESULTS, Failure
from partc.compiler.commands.results.trainings import CheckpointList, Exported, Trained
from partc.compiler.verification.ranks import launch_in_process
from partc.compiler.verification.verify import verify
from partc.cost.simulation.timeline import Measured
from partc.runtime.jobs.job import JOB_FILE
from partc.runtime.plan.record import Record
from tests.builders.plans.compiled_reports import plain
from tests.checks.command_line import EXAMPLES, MLP, done, make_mlp, partc
from tests.checks.trace_event_rules import read_trace

Answered = TypeVar("Answered", bound=Record)
ALONE = str(EXAMPLES / "cluster-2x2.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny perceptron, compiled into out/ and trained for two steps, each saved."""
    folder = make_mlp(tmp_path_factory.mktemp("json"))
    done("compile", folder / "train.onnx", "-c", ALONE, "-o", folder / "out")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    run = ("run", folder / "out", "--steps", "2", "--save-every", "1", "--metrics-port", "0", "--quiet")
    answer = partc(*run, "--json")
    trained = msgspec.json.decode(answer.out, type=Trained)
    assert answer.error == f"metrics: {trained.metrics_url}\n"  # which port it is, nobody else says in time
    return trained


def answered(kind: type[Answered], *arguments: object) -> Answered:
    """Run a command with --json, and decode what it answers as strictly as its record is."""
    answer = partc(*arguments, "--json")
    assert answer.code == 0, answer.error
    return msgspec.json.decode(answer.out, type=kind)


def test_a_rank_that_takes_more_than_its_device_has_is_warned_of(folder: Path, tmp_path: Path) -> None:
    roomy = msgspec.json.decode(Path(ALONE).read_bytes())
    small = roomy | {"hosts": [host | {"memory_bytes": 2 * 60_000_000} for host in roomy["hosts"]]}
    (tmp_path / "small.json").write_bytes(msgspec.json.encode(small))

    compiled = (
        answered(Compiled, "compile", folder / "train.onnx", "-c", cluster, "-o", tmp_path / name)
        for cluster, name in ((ALONE, "roomy"), (tmp_path / "small.json", "small"))
    )

    assert [[plain(w) for w in each.warnings if "at its fullest" in w] for each in compiled] == [
        [],
        ["rank 0 is predicted to take 98.0 MB at its fullest, host0/cpu0 has 60.0 MB"],
    ]


def test_models_and_steps_answer(folder: Path, tmp_path: Path) -> None:
    assert answered(ModelWritten, "model", "mlp", *MLP, "-o", tmp_path / "f.onnx").nodes > 4
    listed = answered(ModelList, "model", "list").models
    assert {"mlp", "lm"} <= {model.name for model in listed}
    step = answered(StepWritten, "grad", tmp_path / "f.onnx", "--loss", "mse", "-o", tmp_path / "t.onnx")
    assert any("trained: 4 parameters" in line for line in step.decisions)
    inspected = answered(Inspected, "inspect", folder / "train.onnx")
    assert "layer0.weight" in {v.name for v in inspected.variables if v.role == "parameter"}
    assert len(inspected.groups) == 2 and inspected.loss == "loss"
    assert {"rule", "none"} <= {op.how for op in answered(OpList, "ops").ops}


def test_compile_answers_and_says_nothing_else_on_stdout(folder: Path, tmp_path: Path) -> None:
    answer = partc("compile", folder / "train.onnx", "-c", ALONE, "-o", tmp_path / "out", "--json")

    compiled = msgspec.json.decode(answer.out, type=Compiled)
    assert (compiled.ranks, compiled.replicas, compiled.batch) == (4, 4, "per-replica")
    assert set(compiled.methods.values()) == {"all_reduce"} and len(compiled.methods) == 4
    assert compiled.predicted_step_s > 0 and "search" not in compiled.phases_s
    assert [m.device for m in compiled.memory] == [r["device"] for r in _plan(tmp_path)["ranks"]]
    assert "data input x: samples on axis 0" in answer.error


def _plan(folder: Path) -> dict[str, list[dict[str, str]]]:
    plan: dict[str, list[dict[str, str]]] = json.loads((folder / "out" / "plan.json").read_bytes())
    return plan


def test_decisions_and_what_is_made_of_them_answer(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compile_step = ("compile", folder / "train.onnx", "-c", ALONE, "-o", out)
    assert answered(Decided, *compile_step, "--decisions-only").parameters == 4
    files = (
        "--model",
        out / "train.onnx",
        "--strategy",
        out / "strategy.json",
        "--cluster",
        out / "cluster.json",
    )
    made = answered(Materialised, "executor", "--materialise", *files, "--rank", "1", "-o", tmp_path / "one")
    assert made.rank == 1 and all((tmp_path / "one" / file).exists() for file in made.files)


def test_simulate_answers(folder: Path) -> None:
    simulated = answered(Simulated, "simulate", folder / "out")

    assert [rank.rank for rank in simulated.ranks] == [0, 1, 2, 3]
    assert [host.host for host in simulated.hosts] == ["host0", "host1"]
    assert simulated.links[0].busy_s == max(link.busy_s for link in simulated.links)
    assert f"{simulated.step_s * 1e6:.0f}" in partc("simulate", folder / "out").out.splitlines()[0].replace(
        ",", ""
    )


def test_what_was_measured_beside_the_segments_is_told_as_well(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing a batch makes a step longer: of ranks, in the table and in the trace, not in the step alone."""
    monkeypatch.setattr(simulate_module, "measure_segments", lambda folder: Measured(beside_s=0.25))
    measure, trace = ("simulate", folder / "out", "--measure"), tmp_path / "trace.json"

    simulated = answered(Simulated, *measure, "--trace", trace)

    assert all(rank.draws_s >= 0.25 for rank in simulated.ranks)
    assert {e["ts"] for e in read_trace(trace) if e["name"] == "draw its batch"} == {0.0}
    assert "draws" in done(*measure)  # heading a column, which may be narrow
    assert "draws" not in done("simulate", folder / "out")


def test_search_and_profile_answer(folder: Path, tmp_path: Path) -> None:
    step = (folder / "train.onnx", "-c", ALONE, "--batch", "global")
    found = answered(StrategyFound, "search", *step, "--proposals", "2", "-o", tmp_path / "s.json")
    assert found.data_parallel_s is not None and found.step_s <= found.data_parallel_s
    profiled = answered(Profiled, "profile", *step, "--budget", "0.2s", "-o", tmp_path / "p.json")
    assert profiled.devices[0].profile == "cpu-core"


def test_a_training_answers(trained: Trained) -> None:
    assert (trained.requested_steps, trained.first_step, trained.steps, trained.stopped_by) == (2, 0, 2, 0)
    assert trained.loss is not None and trained.step_s is not None
    assert trained.waited.keys() == {"0", "1", "2", "3"}
    assert Path(trained.variables).is_file() and Path(trained.model).is_file()


def test_checkpoints_answer(trained: Trained, folder: Path, tmp_path: Path) -> None:
    listed = answered(CheckpointList, "checkpoint", "ls", folder / "out")
    assert [entry.step for entry in listed.checkpoints] == [1, 2]
    verified = answered(CheckpointList, "checkpoint", "verify", folder / "out", "--step", "2")
    assert verified.checkpoints == listed.checkpoints[1:]
    exported = answered(Exported, "checkpoint", "export", folder / "out", "-o", tmp_path / "m.onnx")
    assert exported.step == 2


def test_verify_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partc.compiler.commands.verify.verify", partial(verify, launcher=launch_in_process))

    verified = answered(Verified, "verify", folder / "out", "--steps", "1")

    assert verified.passed and len(verified.variables) == 4 and verified.losses[0].equal


def test_plans_and_examples_answer(folder: Path, tmp_path: Path) -> None:
    assert answered(Sealed, "seal", folder / "out").changed == ()
    assert "cluster-2x2.json" in {entry.name for entry in answered(ExampleList, "examples").examples}
    copied = answered(ExamplesCopied, "examples", "copy", "cluster-2x2.json", tmp_path / "mine")
    assert Path(copied.files[0]).read_bytes() == (EXAMPLES / "cluster-2x2.json").read_bytes()


def test_cluster_init_and_doctor_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = answered(ClusterWritten, "cluster", "init", "--workers", "2", "-o", tmp_path / "c.json")
    assert (written.hosts, written.devices) == (1, 2)
    monkeypatch.setattr("partc.compiler.machines.diagnose._CHECKS", {})
    assert answered(Diagnosis, "doctor").healthy


def test_a_rank_of_a_job_has_no_results_and_refuses_json(tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_text("{}")

    answer = partc("executor", tmp_path, "--json")

    assert answer.code == 2 and "`partc run --json`" in json.loads(answer.out)["fix"]


def test_a_failure_answers_with_its_three_parts(tmp_path: Path) -> None:
    answer = partc("inspect", tmp_path / "none.onnx", "--json")

    failure = msgspec.json.decode(answer.out, type=Failure)
    assert answer.code == 2 and (failure.error, failure.what) == ("BadModel", "no such file")
    assert answer.error.startswith(f"partc: {failure.what}\n  at:  {failure.at}\n  fix: {failure.fix}")
    misspelt = msgspec.json.decode(partc("compile", "--jsn", "--json").out, type=Failure)
    assert misspelt.error == "BadUsage"


def test_every_command_has_a_schema() -> None:
    with_commands = {"checkpoint", "cluster", "examples"}
    assert {name.partition(" ")[0] for name in RESULTS} == {*COMMANDS, "failure"}
    assert {name.partition(" ")[0] for name in RESULTS if " " in name} == with_commands
    for name in RESULTS:
        schema = json.loads(done("schema", *name.split()))
        assert "$defs" in schema and ("$ref" in schema or "anyOf" in schema)
    assert answered(SchemaList, "schema").commands == tuple(RESULTS)
    assert done("schema").split("\n")[:-1] == list(RESULTS)


def test_quiet_leaves_results(folder: Path, tmp_path: Path) -> None:
    shown = done("compile", folder / "train.onnx", "-c", ALONE, "-o", tmp_path / "out", "-q")

    assert len(shown.splitlines()) == 1 and "ms/step predicted" in shown


def test_verbose_tells_phases_with_their_times_on_stderr(folder: Path, tmp_path: Path) -> None:
    arguments = ("compile", folder / "train.onnx", "-c", ALONE, "-o", tmp_path / "out")
    loud, usual = partc(*arguments, "-v"), partc(*arguments, "--force")

    assert loud.out.splitlines()[:4] == usual.out.splitlines()[:4]
    assert "layer0.weight: all_reduce." in loud.error and re.search(
        r"^compiling: [\d.]+ s$", loud.error, re.M
    )
    assert usual.error == ""


def test_quiet_and_verbose_at_once_are_refused() -> None:
    answer = partc("model", "list", "-q", "-v")

    assert answer.code == 2 and "leave one of the two out" in answer.error
