"""Aggregated gradients as outputs: what the update consumed, on every worker, under every strategy."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from partc.cost.strategy import MESH_STRATEGY_FORMAT, Strategy
from partc.runtime.errors import BadStrategy, BadUsage
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.program import Aggregation
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)
from tests.whole_steps.test_distributed_numerics import imported

RATE = 0.5  # of training_models.py: plain SGD, so the change of a variable tells its gradient
CLUSTERS = ("2x2", "3x1", "2x2s", "1x1")
STRATEGIES = ("ps", "allreduce", "hybrid")
MODELS = ("mlp, sgd", "lm, sgd")


def fetching(name: str, folder: Path, cluster: str, strategy: str, batch: str) -> Compiled:
    training = imported(name)
    fetched = Aggregation(fetched=tuple(training.variables))
    return compile_step(training, folder / "out", cluster, strategy, batch, aggregation=fetched)


def dense_of(outputs: dict[str, np.ndarray], name: str, like: np.ndarray) -> np.ndarray:
    if f"{name}.aggregated" in outputs:
        return outputs[f"{name}.aggregated"]
    gradient = np.zeros_like(like)
    ids = outputs[f"{name}.aggregated.ids"]
    assert list(ids) == sorted(set(ids))
    gradient[ids] = outputs[f"{name}.aggregated.rows"]
    return gradient


CASES = list(product(MODELS, CLUSTERS, STRATEGIES, ("per-replica", "global")))


@pytest.mark.parametrize(("name", "cluster", "strategy", "batch"), CASES[::9])
def test_the_fetched_gradient_is_what_moved_the_variable(
    name: str, cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    done = fetching(name, tmp_path, cluster, strategy, batch)

    result = train_in_process(done.folder, random_batches(done.plan, 2, high=7), read_after=(1, 2))

    before, after = result.variables_after[1], result.variables_after[2]
    for variable, value in after.items():
        moved = (before[variable] - value) / RATE
        found = dense_of(result.outputs[1], variable, value)
        np.testing.assert_allclose(found, moved, rtol=1e-9, atol=1e-12)
        assert np.abs(moved).max() > 0


@pytest.mark.long
@pytest.mark.parametrize(("name", "cluster", "strategy", "batch"), CASES)
def test_every_fetched_gradient(name: str, cluster: str, strategy: str, batch: str, tmp_path: Path) -> None:
    test_the_fetched_gradient_is_what_moved_the_variable(name, cluster, strategy, batch, tmp_path)


def test_fetching_changes_no_update(tmp_path: Path) -> None:
    done = fetching("lm, sgd", tmp_path, "2x2", "hybrid", "per-replica")

    assert_trains_as_one_device(done, random_batches(done.plan, 3, high=7))


def test_workers_read_what_owners_summed_and_do_not_sum_again(tmp_path: Path) -> None:
    plain = compile_step(imported("mlp, sgd"), tmp_path / "plain", "2x2", "ps")
    done = fetching("mlp, sgd", tmp_path, "2x2", "ps", "per-replica")

    assert len(done.started("reduce_scatter")) == len(plain.started("reduce_scatter"))
    assert len(done.started("all_reduce")) == len(plain.started("all_reduce"))


def test_a_gradient_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="name parameters among"):
        compile_step(imported("mlp, sgd"), tmp_path / "out", aggregation=Aggregation(fetched=("nobody",)))


def test_a_strategy_file_may_name_a_gradient_twice(tmp_path: Path) -> None:
    training = imported("mlp, sgd")
    name = next(iter(training.gradients))

    done = compile_step(training, tmp_path / "out", strategy=fetched_by_file(name, name))

    assert [output.name for output in done.plan.outputs].count(f"{name}.aggregated") == 1
    assert_trains_as_one_device(done, random_batches(done.plan, 2))


def test_a_gradient_that_a_strategy_file_names_and_is_not_there_is_refused_there(tmp_path: Path) -> None:
    with pytest.raises(BadStrategy, match="name parameters among") as refusal:
        compile_step(imported("mlp, sgd"), tmp_path / "out", strategy=fetched_by_file("nobody"))

    assert refusal.value.at == "aggregation: fetched"


def fetched_by_file(*names: str) -> Strategy:
    return Strategy(MESH_STRATEGY_FORMAT, "per-replica", {}, aggregation=Aggregation(fetched=names))
