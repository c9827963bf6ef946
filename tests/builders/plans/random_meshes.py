"""Random strategies on meshes: any split of any variable and any op that the rules allow."""

import numpy as np
import onnx_graphsurgeon as gs

from partc.cost.cluster.cluster import ranks_of
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.passes.graph.facts import Facts, infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import (
    AxisDecision,
    decide_axes,
    decide_by_wish,
    divides,
    whole_axis,
)
from partc.passes.layouts.layouts import Layout, Mesh, Split
from partc.passes.roles.find_roles import find_roles
from partc.passes.roles.find_zeros import find_zeros
from partc.passes.rules.sharding_rules import rule_of
from tests.builders.plans.compiled_steps import cluster_of

MESHES: tuple[tuple[str, dict[str, int]], ...] = (
    ("1x2", {"data": 2}),
    ("1x2", {"data": 1, "tensor": 2}),
    ("2x2", {"data": 2, "tensor": 2}),
    ("2x2", {"data": 4, "tensor": 1}),
    ("2x2", {"data": 1, "tensor": 4}),
    ("1x3", {"data": 1, "tensor": 3}),
    ("2x4", {"data": 2, "tensor": 2, "sequence": 2}),
    ("2x4", {"data": 1, "tensor": 2, "sequence": 4}),
)


def random_mesh_strategy(training: TrainingGraph, batch: str, seed: int) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy for it that splits what may be split at random."""
    rng = np.random.default_rng(seed)
    cluster, sizes = MESHES[int(rng.integers(len(MESHES)))]
    mesh = Mesh("worker", tuple(sizes.items()))
    variables = {name: random_home(mesh, v.shape, rng) for name, v in training.variables.items()}
    facts = infer_facts(training, {}, sizes["data"])
    zeros = find_zeros(training.graph, facts)
    asked = rng.random() < 0.7
    ops = [
        OpConfig(node.name, random_split(node, facts, zeros, sizes, batch, rng))
        for node in training.graph.nodes
        if asked and rng.random() < 0.6
    ]
    homes = {name: splits for name, splits in variables.items() if splits}
    strategy = Strategy(MESH_STRATEGY_FORMAT, batch, {}, mesh=sizes, variables=homes, ops=tuple(ops))  # type: ignore[arg-type]
    return cluster, strategy


def random_home(mesh: Mesh, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, AxisSplit]:
    home, splits = Layout("worker"), {}
    for axis, (name, _) in enumerate(mesh.axes):
        place = Split(int(rng.integers(len(shape) + 1)), int(rng.integers(1, 3)))
        if place.axis < len(shape):
            place = mesh.cut(axis, place.axis, place.outer, shape[place.axis] // place.outer)
        if place.axis < len(shape) and mesh.divides(home.with_along(axis, place), shape):
            home, splits[name] = home.with_along(axis, place), AxisSplit(place.axis, place.outer)
    return splits


def random_split(
    node: gs.Node,
    facts: Facts,
    zeros: frozenset[str],
    sizes: dict[str, int],
    batch: str,
    rng: np.random.Generator,
) -> dict[str, int | str]:
    split: dict[str, int | str] = {}
    mesh, asked = Mesh("worker", tuple(sizes.items())), [whole_axis(node) for _ in sizes]
    for number, (axis, size) in enumerate(sizes.items()):
        if axis == "data" and batch == "per-replica":
            split["batch"] = axis
            continue
        free = {d: how for d, how in dimensions_of(node, facts, zeros, size).items() if d not in split}
        if not free or rng.random() > 0.8:
            continue
        dimension = str(rng.choice(list(free)))
        tried = [*asked[:number], free[dimension], *asked[number + 1 :]]
        if divides(mesh, node, decide_axes("worker", tried), facts):
            split[dimension], asked = axis, tried
    return split


def dimensions_of(node: gs.Node, facts: Facts, zeros: frozenset[str], parts: int) -> dict[str, AxisDecision]:
    """Return the dimensions of an op that may be split into so many parts."""
    rule = rule_of(node, facts)
    if rule is None:
        return {}
    found: dict[str, AxisDecision] = {}
    for operand, dims in [(None, rule.outputs[0]), *enumerate(rule.inputs)]:
        for axis, factors in enumerate(dims or ()):
            if operand is not None and not rule.combine.keys() & set(factors):
                continue
            for outer in (1, 2):
                decision = decide_by_wish(node, rule, Wish(Split(axis, outer), operand), parts, zeros)
                if decision is not None:
                    place = f"out:{axis}" if operand is None else f"in:{operand}:{axis}"
                    found[place if outer == 1 else f"{place}/{outer}"] = decision
    return found


SHARED: tuple[tuple[str, dict[str, int]], ...] = (
    ("1x2", {"data": 2}),
    ("1x3", {"data": 3}),
    ("2x2", {"data": 4}),
    ("2x2", {"data": 2, "tensor": 2}),
    ("2x4", {"data": 4, "tensor": 2}),
)


def random_shares(training: TrainingGraph, batch: str, samples: int, seed: int) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy for it whose ranks share most parameters, along any axes of these.

    `samples`: of the graph's batch. Some strategies share slots otherwise than their parameters.
    """
    rng = np.random.default_rng(seed)
    fitting = [n for n in range(len(SHARED)) if batch == "per-replica" or samples % SHARED[n][1]["data"] == 0]
    cluster, sizes = SHARED[int(rng.choice(fitting))]
    mesh = Mesh("worker", tuple(sizes.items()))
    listed = training.variables.keys() if rng.random() < 0.2 else training.gradients.keys()
    homes = {name: random_home(mesh, training.variables[name].shape, rng) for name in listed}
    return cluster, Strategy(
        MESH_STRATEGY_FORMAT,
        batch,  # type: ignore[arg-type]
        {},
        mesh=sizes,
        variables={name: splits for name, splits in homes.items() if splits},
    )


CLUSTERS = {"1x2": 2, "1x3": 3, "2x2": 4, "2x4": 8}  # workers


def random_devices(training: TrainingGraph, batch: str, samples: int, seed: int) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy for it whose ops have any devices of their own, and any splits.

    Some strategies have a grid of all workers besides, some micro-batches.
    """
    rng = np.random.default_rng(seed)
    cluster = str(rng.choice(list(CLUSTERS)))
    names = [rank.device for rank in ranks_of(cluster_of(cluster)) if rank.replica is not None]
    replicas = int(rng.choice([n for n in (1, 2, 4) if len(names) % n == 0]))
    own = samples if batch == "per-replica" else samples // replicas
    microbatches = int(rng.choice([count for count in (1, 1, 2, 4) if own % count == 0]))
    grid = {"data": replicas, "tensor": len(names) // replicas} if rng.random() < 0.4 else {}
    are_bound = batch == "per-replica" or microbatches > 1
    facts = infer_facts(training, {}, replicas)
    zeros, main = find_zeros(training.graph, facts), find_roles(training).main
    ops: list[OpConfig] = []
    share = rng.choice([0.2, 0.6])
    for node in training.graph.nodes:
        if node.name in main and rng.random() < share:
            samples = replicas if are_bound else int(rng.choice([1, replicas]))
            ops.append(_on_devices(node, facts, zeros, names, samples, rng))
    if not ops:
        first = next(node for node in training.graph.nodes if node.name in main)
        ops.append(OpConfig(first.name, {"batch": replicas}, devices=tuple(names[:replicas])))
    strategy = Strategy(
        MESH_STRATEGY_FORMAT,
        batch,  # type: ignore[arg-type]
        {},
        mesh=grid,
        ops=tuple(ops),
        microbatches=microbatches,
    )
    return cluster, strategy


def _on_devices(
    node: gs.Node,
    facts: Facts,
    zeros: frozenset[str],
    names: list[str],
    samples: int,
    rng: np.random.Generator,
) -> OpConfig:
    """Return an op on devices drawn in any order, split as its rule allows."""
    split: dict[str, int | str] = {"batch": samples}
    parts = int(rng.choice([n for n in (1, 2, 3, 4) if n * samples <= len(names)]))
    found = dimensions_of(node, facts, zeros, parts)
    meshes = Mesh("worker", (("data", samples), ("axis1", parts)))
    fitting = [
        dimension
        for dimension, how in found.items()
        if divides(meshes, node, decide_axes("worker", [whole_axis(node), how]), facts)
    ]
    if parts > 1 and fitting:
        split[str(rng.choice(fitting))] = parts
    else:
        parts = 1
    devices = rng.permutation(names)[: samples * parts]
    return OpConfig(node.name, split, devices=tuple(str(device) for device in devices))


PIPELINES: tuple[tuple[str, dict[str, int], int], ...] = (  # cluster, mesh of every stage, stages
    ("1x2", {"data": 1}, 2),
    ("1x3", {"data": 1}, 3),
    ("2x2", {"data": 2}, 2),
    ("2x2", {"data": 1, "tensor": 2}, 2),
    ("2x4", {"data": 2, "tensor": 2}, 2),
    ("2x4", {"data": 2}, 4),
    ("1x2", {"data": 2}, 1),
    ("2x2", {"data": 2, "tensor": 2}, 1),
)


def random_pipeline(training: TrainingGraph, batch: str, samples: int, seed: int) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy for it of any stages, of any nodes there, and of any micro-batches."""
    rng = np.random.default_rng(seed)
    cluster, sizes, stages = PIPELINES[int(rng.integers(len(PIPELINES)))]
    own = samples if batch == "per-replica" else samples // sizes["data"]
    microbatches = int(rng.choice([count for count in range(1, own + 1) if own % count == 0]))
    mesh = Mesh("worker", tuple(sizes.items()))
    variables = {name: random_home(mesh, v.shape, rng) for name, v in training.variables.items()}
    main = find_roles(training).main
    share = rng.choice([0.0, 0.05, 0.5])
    ops = [
        OpConfig(node.name, stage=int(rng.integers(stages)))
        for node in training.graph.nodes
        if stages > 1 and node.name in main and rng.random() < share
    ]
    homes = {name: splits for name, splits in variables.items() if splits and rng.random() < 0.5}
    strategy = Strategy(
        MESH_STRATEGY_FORMAT,
        batch,  # type: ignore[arg-type]
        {},
        mesh=sizes,
        variables=homes,
        ops=tuple(ops),
        stages=stages,
        microbatches=microbatches,
    )
    return cluster, strategy
