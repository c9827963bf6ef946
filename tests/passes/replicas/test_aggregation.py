"""Gradients that are summed over replicas, not averaged: dense ones, sparse ones, or both."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.errors import BadUsage
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Aggregation
from tests.builders.graphs.foreign_steps import parse, with_zeros
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.checks.command_line import PAIR, done, make_mlp
from tests.whole_steps.test_distributed_numerics import imported

SUMS = (Aggregation(False, True), Aggregation(True, False), Aggregation(False, False))
CASES = list(
    product(("lm, sgd", "foreign, clipped"), ("2x2", "1x3", "2x2s"), ("ps", "allreduce", "hybrid"), SUMS)
)


@pytest.mark.parametrize(("name", "cluster", "strategy", "aggregation"), CASES[::11])
def test_sums_match_one_device(
    name: str, cluster: str, strategy: str, aggregation: Aggregation, tmp_path: Path
) -> None:
    made = compile_step(imported(name), tmp_path / "out", cluster, strategy, aggregation=aggregation)

    assert made.plan.aggregation == made.compilation.strategy.aggregation == aggregation
    assert_trains_as_one_device(made, random_batches(made.plan, 4, high=7))


@pytest.mark.long
@pytest.mark.parametrize(("name", "cluster", "strategy", "aggregation"), CASES)
def test_every_sum(name: str, cluster: str, strategy: str, aggregation: Aggregation, tmp_path: Path) -> None:
    test_sums_match_one_device(name, cluster, strategy, aggregation, tmp_path)


# dW is the sum of x's rows; the gradient of B does not depend on the data, or not even on B. Both begin at 0.
TWO_GRADIENTS = """
step (double[4,3] x, double[3] W, double[3] B) => (double loss, double[3] W_next, double[3] B_next)
<double[3] dB = {1.0, 2.0, 3.0}, double zero = {0.0}, int64[1] samples = {0}> {
    d = Mul (x, W)
    moved = Mul (B, dB)
    all = Add (d, moved)
    loss = ReduceMean <keepdims = 0> (all)
    dW = ReduceSum <keepdims = 0> (x, samples)
    W_next = Sub (W, dW)
    grown = Add (dB, OTHER)
    B_next = Sub (B, grown)
}
"""


@pytest.mark.parametrize(("strategy", "other"), [("ps", "B"), ("allreduce", "B"), ("allreduce", "zero")])
@pytest.mark.parametrize(("averages", "factor"), [(True, 1), (False, 4)])
def test_what_no_data_changes_is_summed_too(
    strategy: str, other: str, averages: bool, factor: int, tmp_path: Path
) -> None:
    model = with_zeros(parse(TWO_GRADIENTS.replace("OTHER", other)), "W", "B")
    bindings = Bindings(
        state={"W": "W_next", "B": "B_next"},
        loss="loss",
        gradients={"W": GradientTensors(dense="dW"), "B": GradientTensors(dense="grown")},
        sample_axes={"x": 0},
    )
    write_bindings(model, bindings)
    made = compile_step(
        import_training_graph(model), tmp_path / "out", "2x2", strategy, aggregation=Aggregation(averages)
    )

    (batch,) = random_batches(made.plan, 1)
    after = train_in_process(made.folder, [batch]).variables

    np.testing.assert_allclose(after["B"], -factor * np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(after["W"], -factor * batch["x"].sum(axis=0) / 4)


def test_one_batch_for_all_has_nothing_to_sum(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="leave --batch out"):
        compile_step(
            imported("mlp, sgd"),
            tmp_path / "out",
            batch="global",
            aggregation=Aggregation(average_dense=False),
        )


@pytest.mark.reports
def test_the_command_line_sums_and_fetches_and_a_strategy_file_remembers(tmp_path: Path) -> None:
    folder = make_mlp(tmp_path)
    asked = ("--sum-dense", "--fetch-gradients", "layer0.weight,layer1.bias")
    done("compile", folder / "train.onnx", "-c", PAIR, *asked, "-o", folder / "out")

    again = ("--strategy", folder / "out" / "strategy.json", "-o", folder / "again")
    done("compile", folder / "train.onnx", "-c", PAIR, *again)

    assert "dense ones summed" in (folder / "out" / "report.html").read_text()
    plan = read_plan_folder(folder / "again").plan
    assert plan.aggregation == Aggregation(False, True, ("layer0.weight", "layer1.bias"))
    assert {"layer0.weight.aggregated", "layer1.bias.aggregated"} <= {o.name for o in plan.outputs}
    done("verify", folder / "again", "--steps", 2)
