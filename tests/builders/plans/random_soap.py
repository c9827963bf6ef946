"""Random configurations as FlexFlow's space has them (section 4): per group any degrees, any devices."""

from math import prod

import numpy as np

from partc.cost.cluster.cluster import ranks_of
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.passes.graph.facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.roles.find_roles import find_roles
from partc.passes.search.find_groups import OperatorGroup, find_groups
from tests.builders.plans.compiled_steps import cluster_of

CLUSTERS = ("1x2", "1x3", "2x2", "2x4")  # 2, 3, 4 and 8 workers


def random_soap(training: TrainingGraph, batch: str, samples: int, seed: int) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy that gives every group of operators degrees and devices at random.

    `samples`: of the graph's batch. There are at most three sets of devices, some of which may overlap.
    """
    rng = np.random.default_rng(seed)
    cluster = str(rng.choice(CLUSTERS))
    devices = [rank.device for rank in ranks_of(cluster_of(cluster)) if rank.replica is not None]
    degrees = [n for n in range(1, len(devices) + 1) if batch == "per-replica" or samples % n == 0]
    replicas = int(rng.choice(degrees))
    own = samples if batch == "per-replica" else samples // replicas
    microbatches = int(rng.choice([n for n in (1, 1, 2, 4) if own % n == 0]))
    is_bound = batch == "per-replica" or microbatches > 1
    orders = [[str(name) for name in rng.permutation(devices)] for _ in range(int(rng.integers(1, 4)))]
    facts = infer_facts(training, {}, replicas)
    ops: list[OpConfig] = []
    for group in find_groups(training, facts, find_roles(training).main):
        order = orders[int(rng.integers(len(orders)))]
        divided = replicas if is_bound else int(rng.choice([n for n in degrees if replicas % n == 0]))
        ops.append(_random_config(group, divided, order, is_bound, rng))
    return cluster, Strategy(
        MESH_STRATEGY_FORMAT,
        batch,  # type: ignore[arg-type]
        {},
        ops=tuple(ops),
        microbatches=microbatches,
    )


def _random_config(
    group: OperatorGroup, samples: int, order: list[str], is_bound: bool, rng: np.random.Generator
) -> OpConfig:
    """Divide samples, and up to two dimensions besides."""
    split: dict[str, int | str] = {"batch": samples}
    room = len(order) // samples
    for dimension, most in rng.permutation(list(group.splits.items())).tolist():
        allowed = [n for n in range(2, room + 1) if int(most) % n == 0]
        is_sample_axis = dimension in ("out:0", "in:0:0")  # which the samples may be
        if allowed and len(split) < 3 and not is_sample_axis and rng.random() < 0.5:
            split[dimension] = int(rng.choice(allowed))
            room //= int(split[dimension])
    return OpConfig(group.node, split, devices=tuple(order[: prod(map(int, split.values()))]))
