"""The task graph of a step agrees with its compiled plan, and a move of it with building it anew."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.api import compile_step
from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.search.operators.own_space import make_tasks, strategy_of
from partc.compiler.search.operators.walk_tasks import random_state
from partc.compiler.search.whole_steps import WholeSteps
from partc.compiler.task_graphs import step_tasks
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.simulation.memory import memory_of
from partc.models.catalogue import build_model
from partc.passes.search.operators.find_groups import OperatorGroup, find_groups
from partc.passes.search.operators.operator_space import (
    OperatorConfig,
    OperatorSpace,
    data_parallel_config,
    kinds_of,
)
from partc.passes.search.operators.read_configs import read_configs
from tests.builders.graphs.attention_block import attention_step
from tests.builders.plans.compiled_steps import cluster_of
from tests.sampling import sampled

GLOBAL = Options(batch="global", strategy="allreduce")
WORKERS = 4


def mlp() -> onnx.ModelProto:
    forward = build_model("mlp", sizes=(256, 1024, 512, 64), batch=32)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


def words() -> onnx.ModelProto:
    sizes = {"vocab": 4000, "embedding": 64, "cells": 128, "projection": 64, "steps": 6, "samples": 64}
    return build_training_graph(build_model("lm", batch=16, **sizes), loss="loss", optimizer=Adagrad(0.1))


def images() -> onnx.ModelProto:
    forward = build_model("resnet50", batch=8, width=8, image=64, classes=16, blocks=(1, 2, 1, 1))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


STEPS = {"mlp": mlp, "words": words, "images": images, "attention": lambda: attention_step(SGD(0.1))}


@cache
def step(name: str) -> onnx.ModelProto:
    return STEPS[name]()


GPUS = tuple(
    Host(host, tuple(Device(f"{host}/gpu{n}", "gpu", "titan-xp", index=n) for n in range(2)), 2**38)
    for host in ("host0", "host1")
)
CLUSTERS = {
    "cpus": cluster_of("2x2"),
    "gpus": Cluster(CLUSTER_FORMAT, "2 x 2 GPUs", GPUS, (), (Link(("host0", "host1"), 12.5e9, 5e-6),)),
}


class Priced:
    """A step, its task graph, and its price as a whole plan."""

    def __init__(self, name: str, cluster: str = "cpus") -> None:
        self.whole = WholeSteps(lambda: import_training_graph(step(name)), CLUSTERS[cluster], GLOBAL)
        self.whole("allreduce", "allreduce")
        self.first: Compilation = self.whole.first
        analysis = self.first.analysis
        self.groups: tuple[OperatorGroup, ...] = find_groups(analysis.training, analysis.facts, analysis.main)
        self.tasks: StepTasks = make_tasks(self.first, self.groups)
        self.space = OperatorSpace(kinds_of(self.groups), WORKERS, 8)
        self.start = (data_parallel_config(WORKERS),) * len(self.groups)

    def whole_s(self, configs: tuple[OperatorConfig, ...]) -> float | None:
        strategy = strategy_of(configs, self.groups, self.first.worker_names, "global")
        priced = self.whole("own", strategy)
        return None if priced is None else priced.step_s


@cache
def priced(name: str, cluster: str = "cpus") -> Priced:
    return Priced(name, cluster)


@pytest.mark.parametrize(
    ("name", "cluster", "within"),
    sampled([(name, *on) for name in STEPS for on in (("cpus", 0.15), ("gpus", 0.1))], (0, 3, 5, 6)),
)
def test_data_parallelism_takes_as_long_as_its_plan(name: str, cluster: str, within: float) -> None:
    of = priced(name, cluster)

    assert of.tasks.begin(of.start) == pytest.approx(of.whole_s(of.start), rel=within)


@pytest.mark.parametrize("seed", sampled(range(2), range(1)))
@pytest.mark.parametrize("name", STEPS)
def test_any_configurations_take_about_as_long_as_their_plan(name: str, seed: int) -> None:
    of = priced(name)
    state = random_state(of.tasks, of.space, of.start, np.random.default_rng(seed), moves=3)
    whole_s = of.whole_s(state)
    if whole_s is None:
        pytest.skip("this strategy has no plan")

    assert of.tasks.begin(state) == pytest.approx(whole_s, rel=0.25)


@pytest.mark.parametrize(
    ("name", "strategy", "within"),
    [
        ("mlp", "tensor=4", 0.05),
        ("mlp", "data=2,tensor=2", 0.05),
        ("images", "one-weird-trick", 0.05),
        ("words", "tensor=4", 0.2),
        ("words", "layerwise", 0.2),
        ("images", "layerwise", 0.05),
        ("attention", "layerwise", 0.1),
    ],
)
def test_what_experts_write_takes_about_as_long_as_its_plan(name: str, strategy: str, within: float) -> None:
    """Sums are scattered to those who want parts of them, and parts are gathered by all at once."""
    of = priced(name, "gpus")
    named = of.whole(strategy, strategy)
    assert named is not None
    state = read_configs(of.first.analysis, named.strategy, of.groups)

    assert of.tasks.begin(state) == pytest.approx(of.whole_s(state), rel=within)


@pytest.mark.parametrize("name", STEPS)
def test_a_move_is_what_building_anew_makes_and_can_be_undone(name: str) -> None:
    of, rng = priced(name), np.random.default_rng(7)
    state = list(of.start)
    before_s = of.tasks.begin(state)
    for _ in range(12):
        number = int(rng.integers(len(of.groups)))
        _, config = of.space.draw(rng)
        step_s = of.tasks.move({number: config})
        if step_s is None:
            assert of.tasks.graph.full() == before_s, "a refused move changes nothing"
        elif rng.random() < 0.5:
            of.tasks.undo()
            assert of.tasks.graph.full() == before_s
        else:
            state[number], before_s = config, step_s
            other = make_tasks(of.first, of.groups)
            assert other.begin(state) == step_s


def test_what_is_forgotten_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    of, rng = priced("words"), np.random.default_rng(5)
    changes = [{int(rng.integers(len(of.groups))): of.space.draw(rng)[1]} for _ in range(12)]

    def steps(tasks: StepTasks) -> list[tuple[float | None, float]]:
        found = [(tasks.begin(of.start), tasks.sent_bytes)]
        for change in changes:
            found.append((tasks.move(change), tasks.sent_bytes))
        return found

    expected = steps(make_tasks(of.first, of.groups))
    monkeypatch.setattr(step_tasks, "MOST_TEMPLATES", 1)

    assert steps(make_tasks(of.first, of.groups)) == expected
    assert len({step_s for step_s, _ in expected}) > 6


def test_a_group_that_moves_alone_is_written_as_where_all_were_written_with_it() -> None:
    """Alike groups share templates, and who reads from them waits for other tasks."""
    of = priced("words")
    kind = max(of.space.kinds, key=lambda kind: len(kind.groups))
    alone, spread = OperatorConfig((("batch", 1),), (3,)), OperatorConfig((("batch", 2),), (1, 2))
    state = list(of.start)
    of.tasks.begin(state)
    for group, config in zip(kind.groups[:3], (alone, spread, alone), strict=True):
        state[group] = config
        step_s = of.tasks.move({group: config})
        other = make_tasks(of.first, of.groups)
        assert other.begin(state) == step_s
        assert other.graph.dependencies == of.tasks.graph.dependencies
        assert (other.sent_bytes, other.computing_s) == (of.tasks.sent_bytes, of.tasks.computing_s)


def test_variables_that_do_not_fit_are_refused() -> None:
    of = priced("mlp")
    of.tasks.begin(of.start)
    alone = OperatorConfig((("batch", 1),), (0,))
    small = np.full(WORKERS, 3.0 * sum(4 * size for size in (256 * 1024, 1024 * 512, 512 * 64)) / 2)
    limits = of.tasks.prices.limits_bytes
    try:
        of.tasks.prices.limits_bytes = small
        everything = dict.fromkeys(range(len(of.groups)), alone)
        assert of.tasks.move(everything) is None
    finally:
        of.tasks.prices.limits_bytes = limits
    assert of.tasks.graph.full() == of.tasks.begin(of.start)


@pytest.mark.parametrize("name", STEPS)
def test_variables_take_no_more_than_plans_keep(name: str, tmp_path: Path) -> None:
    of, cluster = priced(name), CLUSTERS["cpus"]
    states = [random_state(of.tasks, of.space, of.start, np.random.default_rng(seed), 8) for seed in range(3)]
    compared = 0
    for state in ((OperatorConfig((("batch", 1),), (1,)),) * len(of.groups), *states):
        if of.whole_s(state) is None:
            continue
        strategy = strategy_of(state, of.groups, of.first.worker_names, "global")
        plan = compile_step(step(name), cluster, tmp_path / str(compared), Options(strategy=strategy)).plan
        compared += 1

        of.tasks.begin(state)
        memory = memory_of(plan, cluster)
        assert (of.tasks.kept_bytes <= [need.certain_bytes for need in memory]).all()
        assert of.tasks.kept_bytes.max() > 0.5 * max(need.variables_bytes for need in memory)
    assert compared > 1
