"""Configurations that are read out of a strategy are those that it was written from."""

import numpy as np
import pytest

from partc.compiler.search.operators.own_space import strategy_of
from partc.compiler.search.operators.walk_tasks import random_state
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.passes.configure import configure
from partc.passes.distribute import lay_out
from partc.passes.layouts.configuration import data_parallel
from partc.passes.search.operators.operator_space import OperatorConfig
from partc.passes.search.operators.read_configs import read_configs, read_grids
from tests.compiler.task_graphs.test_step_tasks import WORKERS, Priced, priced


def of_no_samples(of: Priced) -> set[str]:
    """Return the operators on zeros, such as a recurrence's first state, which nothing divides by samples."""
    analysis = of.first.analysis
    alone = lay_out(analysis, {}, data_parallel(2))
    return {group.node for group in of.groups if alone.decisions[group.node].axes[0].is_whole}


def working(config: OperatorConfig) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return what a configuration divides into more than one part."""
    return {dimension: parts for dimension, parts in config.split if parts > 1}, config.workers


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["mlp", "words"])
def test_what_was_written_is_read(name: str, seed: int) -> None:
    of = priced(name)
    state = random_state(of.tasks, of.space, of.start, np.random.default_rng(seed), moves=4)
    strategy = strategy_of(state, of.groups, of.first.worker_names, "global")

    read = read_configs(of.first.analysis, strategy, of.groups)

    for group, found, written in zip(of.groups, read, state, strict=True):
        if group.node not in of_no_samples(of):
            assert working(found) == working(written), group.node


def test_one_weird_trick_divides_columns_of_dense_layers() -> None:
    of = priced("images")
    named = of.whole("x", "one-weird-trick")
    assert named is not None

    *convolutions, dense = read_configs(of.first.analysis, named.strategy, of.groups)

    assert {config.split for config in convolutions} == {(("batch", WORKERS),)}
    assert dense.split == (("out:1", WORKERS),)


def test_what_has_no_samples_is_where_its_devices_are() -> None:
    """The product of a first state of zeros: all of them have it, and gradients of its weight are there."""
    of = priced("words")
    own = OperatorConfig((("batch", 2),), (1, 3))
    strategy = strategy_of((own,) * len(of.groups), of.groups, of.first.worker_names, "global")
    assert of_no_samples(of)

    assert set(read_configs(of.first.analysis, strategy, of.groups)) == {own}


def test_parts_stand_with_samples_first_and_name_all_that_do_the_same() -> None:
    of = priced("mlp")
    analysis = of.first.analysis
    node = of.groups[1].node
    ops = (OpConfig(node, {"out:1": "data", "out:0": "tensor"}),)
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh={"data": 2, "tensor": 2}, ops=ops)
    graph = lay_out(analysis, {}, configure(analysis, strategy))

    first, second, _ = read_grids(analysis, graph.decisions, graph.meshes, of.groups)

    assert first.split == (("batch", 2),)
    assert first.workers == ((0, 1), (2, 3)), "along `tensor` they do the same"
    assert second.split == (("batch", 2), ("out:1", 2))
    assert second.workers == ((0,), (2,), (1,), (3,)), "samples along `tensor`, columns along `data`"
