"""The default plan is the quickest that is known: held against every other mode, each compiled whole."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from partc.compiler.compilation import Compilation
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.cost.assignment.search_strategy import TIE
from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.timeline import simulate
from partc.cost.strategy import Strategy
from partc.passes.graph.training_graph import TrainingGraph
from tests.builders.graphs.random_steps import random_step
from tests.builders.plans.random_clusters import random_cluster, random_table_step
from tests.sampling import sampled

OTHERS = ("hybrid", "allreduce", "ps")


def compiled(
    model: onnx.ModelProto, cluster: Cluster, out: Path, strategy: str | Strategy, seed: int
) -> Compilation:
    recompute = 10**9 if seed % 7 == 0 else None
    training = import_training_graph(model)
    batch = "global" if seed % 3 == 0 and divides(training, cluster_workers(cluster)) else "per-replica"
    without = frozenset({"local-aggregation"}) if seed % 5 == 0 else frozenset()
    options = Options(strategy=strategy, batch=batch, without=without, recompute_bytes=recompute)
    return compile_graph(training, cluster, out, options)


def divides(training: TrainingGraph, workers: int) -> bool:
    """Tell whether a batch can be shared out among the workers, whatever its symbolic sizes."""
    inputs = training.data_inputs.values()
    sizes = [data.shape[data.sample_axis] for data in inputs if data.sample_axis is not None]
    return workers in (1, 2, 4) and all(isinstance(size, str) or size % workers == 0 for size in sizes)


def cluster_workers(cluster: Cluster) -> int:
    return sum(len(host.devices) for host in cluster.hosts)


def check(make: Callable[[int], onnx.ModelProto], seed: int, folder: Path) -> None:
    """Hold auto's plan against the others' plans, and its price against its own plan."""
    model, cluster = make(seed), random_cluster(seed)

    auto = compiled(model, cluster, folder / "auto", "auto", seed)

    assert auto.timeline.step_s == simulate(auto.plan, cluster).step_s
    for mode in OTHERS:
        other = compiled(model, cluster, folder / mode, mode, seed)
        assert auto.timeline.step_s <= other.timeline.step_s * (1 + TIE), mode
        told = [tried.step_s for tried in auto.costs.tried if mode in tried.names]
        assert told in ([], [other.timeline.step_s])  # what the report says of a mode is its plan's time


@pytest.mark.parametrize("seed", sampled(range(4), (2, 3)))
def test_auto_is_never_simulated_slower_than_another_mode(seed: int, tmp_path: Path) -> None:
    check(random_table_step, seed, tmp_path)


@pytest.mark.parametrize("seed", sampled(range(4), (0, 1)))
def test_nor_is_it_for_any_graph(seed: int, tmp_path: Path) -> None:
    check(random_step, seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 300))
def test_auto_is_never_slower_on_many_clusters(seed: int, tmp_path: Path) -> None:
    check(random_table_step if seed % 4 else random_step, seed, tmp_path)
