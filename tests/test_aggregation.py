"""Gradients that are summed over replicas, not averaged: dense ones, sparse ones, or both."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.errors import BadUsage
from partc.runtime.program import Aggregation
from tests.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.test_distributed_numerics import imported

SUMS = (Aggregation(False, True), Aggregation(True, False), Aggregation(False, False))
CASES = list(
    product(("lm, sgd", "foreign, clipped"), ("2x2", "1x3", "2x2s"), ("ps", "allreduce", "hybrid"), SUMS)
)


@pytest.mark.parametrize(("name", "cluster", "strategy", "aggregation"), CASES[::7])
def test_sums_match_one_device(
    name: str, cluster: str, strategy: str, aggregation: Aggregation, tmp_path: Path
) -> None:
    done = compile_step(imported(name), tmp_path / "out", cluster, strategy, aggregation=aggregation)

    assert done.plan.aggregation == done.compilation.strategy.aggregation == aggregation
    assert_trains_as_one_device(done, random_batches(done.plan, 4, high=7))


@pytest.mark.long
@pytest.mark.parametrize(("name", "cluster", "strategy", "aggregation"), CASES)
def test_every_sum(name: str, cluster: str, strategy: str, aggregation: Aggregation, tmp_path: Path) -> None:
    test_sums_match_one_device(name, cluster, strategy, aggregation, tmp_path)


# dW is the sum of x's rows; the gradient of B does not depend on the data.
TWO_GRADIENTS = """
step (double[4,3] x, double[3] W, double[3] B) => (double loss, double[3] W_next, double[3] B_next)
<double[3] dB = {1.0, 2.0, 3.0}, int64[1] samples = {0}> {
    d = Mul (x, W)
    moved = Mul (B, dB)
    all = Add (d, moved)
    loss = ReduceMean <keepdims = 0> (all)
    dW = ReduceSum <keepdims = 0> (x, samples)
    W_next = Sub (W, dW)
    grown = Add (dB, zero)
    B_next = Sub (B, grown)
}
"""


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize(("averages", "factor"), [(True, 1), (False, 4)])
def test_what_no_data_changes_is_summed_too(
    strategy: str, averages: bool, factor: int, tmp_path: Path
) -> None:
    from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
    from partc.compiler.importing.import_training import import_training_graph
    from partc.runtime.in_process import train_in_process
    from tests.foreign_steps import parse, with_zeros

    model = with_zeros(
        parse(TWO_GRADIENTS.replace("int64[1] samples", "double zero = {0.0}, int64[1] samples")), "W", "B"
    )
    bindings = Bindings(
        state={"W": "W_next", "B": "B_next"},
        loss="loss",
        gradients={"W": GradientTensors(dense="dW"), "B": GradientTensors(dense="grown")},
        sample_axes={"x": 0},
    )
    write_bindings(model, bindings)
    done = compile_step(
        import_training_graph(model), tmp_path / "out", "2x2", strategy, aggregation=Aggregation(averages)
    )

    (batch,) = random_batches(done.plan, 1)
    after = train_in_process(done.folder, [batch]).variables

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
