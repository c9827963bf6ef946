"""Gradients that are rounded to 16 bits before they are sent: half the bytes, and near the exact sums."""

import json
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Optimizer
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.compiler.verification import reference
from partc.compiler.verification.ranks import launch_in_process
from partc.compiler.verification.verify import verify
from partc.cost.strategy import MESH_STRATEGY_FORMAT, STRATEGY_FORMAT
from partc.models.catalogue import build_model
from partc.runtime.errors import Diverged
from partc.runtime.execution.in_process import RanksInProcess, train_in_process
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Start, rounding_of
from tests.builders.plans.compiled_steps import cluster_of, random_batches
from tests.checks.command_line import CLUSTER, done, make_mlp, refused
from tests.sampling import sampled

WAYS = [("2x2", "allreduce"), ("1x3", "allreduce"), ("3x1", "ps"), ("2x2", "ps")]


def compiled(
    folder: Path,
    cluster: str,
    strategy: str,
    rounding: str,
    optimizer: Optimizer | None = None,
    width: int = 50,
) -> PlanFolder:
    forward = build_model("mlp", sizes=[40, width, width, 5], batch=6)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=optimizer or SGD(0.1))
    options = Options(strategy=strategy, round_sums=rounding)  # type: ignore[arg-type]
    compile_graph(import_training_graph(step), cluster_of(cluster), folder, options)
    return read_plan_folder(folder)


@pytest.mark.parametrize(("cluster", "strategy"), WAYS)
@pytest.mark.parametrize("rounding", ["float16", "bfloat16"])
def test_rounded_sums_are_near_exact_ones_and_half_as_long(
    tmp_path: Path, cluster: str, strategy: str, rounding: str
) -> None:
    exact = compiled(tmp_path / "exact", cluster, strategy, "")
    rounded = compiled(tmp_path / "rounded", cluster, strategy, rounding)
    batches = random_batches(exact.plan, 1)

    expected = train_in_process(exact, batches)
    result = train_in_process(rounded, batches)

    relative = 2.0**-9 if rounding == "bfloat16" else 2.0**-12
    start = train_in_process(exact, []).variables
    off = 0
    for name, value in expected.variables.items():
        change = np.abs(value - start[name]).max()
        error = np.abs(result.variables[name] - value).max()
        assert error <= 4 * relative * change + 1e-7, name
        off += error > 0
    assert off
    assert result.disagreeing == ()
    kinds = {i.kind for i in rounded.plan.instructions if isinstance(i, Start) and i.rounds_to}
    assert kinds == ({"all_reduce"} if strategy == "allreduce" else {"reduce_scatter"})
    sent, of_exact = (sum(rank.values_sent for rank in r.exchanged.values()) for r in (result, expected))
    assert sent < of_exact


@pytest.mark.parametrize(("rounding", "is_lost"), [("float16", True), ("bfloat16", False)])
def test_a_sum_beyond_float16_is_blamed_on_its_rounding(tmp_path: Path, rounding: str, is_lost: bool) -> None:
    plan = compiled(tmp_path / "out", "1x3", "allreduce", rounding)
    start = train_in_process(plan, []).variables
    beyond = {name: value * (1e6 if value.ndim > 1 else 1) for name, value in start.items()}
    ranks = RanksInProcess(plan, beyond)
    ranks.step(random_batches(plan.plan, 1)[0])

    if not is_lost:
        ranks.check_variables(1)
        return
    with pytest.raises(Diverged, match="is not finite after step 1") as refusal:
        ranks.check_variables(1)
    assert refusal.value.fix.startswith("compile without `--round-sums float16`")


@pytest.mark.parametrize(("cluster", "strategy"), [("1x3", "allreduce"), ("3x1", "ps")])
def test_what_is_rounded_takes_half_the_bytes_as_planned_and_as_counted(
    tmp_path: Path, cluster: str, strategy: str
) -> None:
    exact = compiled(tmp_path / "exact", cluster, strategy, "")
    rounded = compiled(tmp_path / "rounded", cluster, strategy, "bfloat16")
    batches = random_batches(exact.plan, 2)
    kind = "all_reduce" if strategy == "allreduce" else "reduce_scatter"

    def planned(folder: PlanFolder) -> tuple[int, int]:
        """Return the bytes of what is rounded, and of what is not."""
        starts = [i for i in folder.plan.instructions if isinstance(i, Start) and i.kind == kind]
        rounded_bytes = sum(start.payload_bytes for start in starts if start.rounds_to)
        return rounded_bytes, sum(start.payload_bytes for start in starts) - rounded_bytes

    short, others = planned(rounded)
    _, long = planned(exact)
    assert short * 2 + others == long
    assert short > 0
    for rank in rounded.plan.ranks:
        if kind in (sent := train_in_process(rounded, batches).payload_bytes[rank.rank]):
            assert sent[kind] == 2 * (short + others)


def test_half_the_bytes_are_priced(tmp_path: Path) -> None:
    exact, rounded = (
        compiled(tmp_path / f"out{rounding}", "2x1", "allreduce", rounding, width=1500)
        for rounding in ("", "bfloat16")
    )

    assert rounded.plan.predicted_step_s < 0.9 * exact.plan.predicted_step_s


@pytest.mark.parametrize(
    ("cluster", "strategy"), sampled([("2x1", "allreduce"), ("3x1", "ps"), ("2x2", "allreduce")], range(2))
)
def test_daemons_sum_rounded_values_as_one_process_does(tmp_path: Path, cluster: str, strategy: str) -> None:
    folder = compiled(tmp_path / "out", cluster, strategy, "bfloat16")
    batches = random_batches(folder.plan, 3)

    actual = Runner(folder).train(batches, 3)

    expected = train_in_process(folder, batches)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[name], value, rtol=1e-5, atol=1e-6)
    assert actual.disagreeing == ()
    assert actual.payload_bytes == expected.payload_bytes


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.01)], ids=["sgd", "adam"])
def test_a_rounded_plan_is_verified_within_its_type_and_not_as_an_exact_one(
    tmp_path: Path, optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiled(tmp_path / "out", "2x2", "allreduce", "bfloat16", optimizer)

    assert verify(folder, steps=3, launcher=launch_in_process).passed
    monkeypatch.setattr(reference, "rounding_of", lambda plan: "")
    assert not verify(folder, steps=3, launcher=launch_in_process).passed


@pytest.mark.reports
def test_only_who_asks_for_it_gets_it_and_is_warned(tmp_path: Path) -> None:
    done("model", "mlp", "--set", "sizes=40,50,5", "-o", tmp_path / "forward.onnx")
    loss = ("--loss", "softmax_cross_entropy")
    done("grad", tmp_path / "forward.onnx", *loss, "-o", tmp_path / "train.onnx")
    common = ("compile", tmp_path / "train.onnx", "-c", CLUSTER, "-o", tmp_path / "out", "--force")

    assert "rounded" not in done(*common)
    assert rounding_of(read_plan_folder(tmp_path / "out").plan) == ""
    told = done(*common, "--strategy", "allreduce", "--round-sums", "bfloat16")
    assert "warning: gradients are rounded to bfloat16 before they are sent" in told
    assert "Dense gradients are rounded to bfloat16" in (tmp_path / "out" / "report.html").read_text()
    for other in (("--asynchronous",), ("--strategy", "data=2,tensor=2"), ("--strategy", "fsdp")):
        refused(*common, *other, "--round-sums", "float16", at="--round-sums", fix="leave it out, or compile")


def test_a_strategy_file_rounds_what_the_option_does(tmp_path: Path) -> None:
    done("model", "mlp", "--set", "sizes=40,50,5", "-o", tmp_path / "forward.onnx")
    done("grad", tmp_path / "forward.onnx", "--loss", "softmax_cross_entropy", "-o", tmp_path / "train.onnx")
    common = ("compile", tmp_path / "train.onnx", "-c", CLUSTER, "-o", tmp_path / "out", "--force")
    file = tmp_path / "rounded.json"
    own_devices = [{"op": "layer0", "devices": ["host0/cpu0"]}]

    for more in ({"mesh": {"data": 2, "tensor": 2}}, {"mesh": {"tensor": 4}}, {"ops": own_devices}):
        asked = {"format": MESH_STRATEGY_FORMAT, "batch": "global", "round_sums": "float16", **more}
        file.write_text(json.dumps(asked))
        refused(*common, "--strategy", file, at=f"{file}: round_sums", fix="leave it out, or compile")
    file.write_text(json.dumps({"format": STRATEGY_FORMAT, "batch": "per-replica", "round_sums": "float16"}))
    assert "rounded to float16" in done(*common, "--strategy", file)
    refused(*common, "--strategy", file, "--asynchronous", at="round_sums", fix="leave it out, or compile")


def test_whoever_asks_to_round_what_is_short_is_told_that_nothing_is(tmp_path: Path) -> None:
    train = make_mlp(tmp_path) / "train.onnx"

    told = done("compile", train, "-c", CLUSTER, "-o", tmp_path / "out", "--round-sums", "float16")

    assert "warning: no gradient is rounded to float16" in told
