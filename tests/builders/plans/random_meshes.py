"""Random strategies on meshes: any split of any variable and any op that the rules allow."""

import msgspec
import numpy as np
import onnx_graphsurgeon as gs

from partc.cost.cluster.cluster import ranks_of
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.passes.graph.facts import Facts
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import decide_by_wish
from partc.passes.layouts.decisions import AxisDecision, decide_axes, divides, whole_axis
from partc.passes.layouts.layouts import Layout, Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.roles.find_roles import find_roles
from partc.passes.roles.find_zeros import find_zeros
from partc.passes.rules.sharding_rules import node_facts
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


NESTED = tuple((cluster, sizes) for cluster, sizes in MESHES if sum(size > 1 for size in sizes.values()) > 1)


def random_mesh_strategy(
    training: TrainingGraph, batch: str, seed: int, nests: bool = False
) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy for it that splits what may be split at random.

    `nests`: mesh axes often split one dimension together.
    """
    rng = np.random.default_rng(seed)
    meshes = NESTED if nests else MESHES
    cluster, sizes = meshes[int(rng.integers(len(meshes)))]
    mesh = Mesh("worker", tuple(sizes.items()))
    variables = {name: random_home(mesh, v.shape, rng, nests) for name, v in training.variables.items()}
    facts = infer_facts(training, {}, sizes["data"])
    zeros = find_zeros(training.graph, facts)
    asked = rng.random() < 0.7
    ops = [
        OpConfig(node.name, random_split(node, facts, zeros, sizes, batch, rng, nests))
        for node in training.graph.nodes
        if asked and rng.random() < 0.6
    ]
    homes = {name: splits for name, splits in variables.items() if splits}
    strategy = Strategy(MESH_STRATEGY_FORMAT, batch, {}, mesh=sizes, variables=homes, ops=tuple(ops))  # type: ignore[arg-type]
    return cluster, strategy


def random_home(
    mesh: Mesh, shape: tuple[int, ...], rng: np.random.Generator, nests: bool = False
) -> dict[str, AxisSplit]:
    home, splits = Layout("worker"), {}
    for axis, (name, _) in enumerate(mesh.axes):
        place = Split(int(rng.integers(len(shape) + 1)), int(rng.integers(1, 3)))
        if nests and splits and rng.random() < 0.5:
            before = next(iter(splits.values()))
            place = Split(before.axis, before.outer)
        if place.axis >= len(shape) or shape[place.axis] % place.outer:
            continue
        tried = home.with_along(axis, place)
        if mesh.divides(mesh.nest_splits(tried, shape), shape):
            home, splits[name] = tried, AxisSplit(place.axis, place.outer)
    return splits


def random_split(
    node: gs.Node,
    facts: Facts,
    zeros: frozenset[str],
    sizes: dict[str, int],
    batch: str,
    rng: np.random.Generator,
    nests: bool = False,
) -> dict[str, int | str]:
    """Return what an op splits along which axis, or along which axes together where `nests`."""
    split: dict[str, int | str] = {}
    mesh, asked = Mesh("worker", tuple(sizes.items())), [whole_axis(node) for _ in sizes]
    for number, (axis, size) in enumerate(sizes.items()):
        if axis == "data" and batch == "per-replica":
            split["batch"] = axis
            continue
        found = dimensions_of(node, facts, zeros, size)
        free = [d for d in found if d not in split or (nests and d != "batch")]
        if not free or rng.random() > 0.8:
            continue
        shared = [d for d in free if d in split]
        dimension = str(rng.choice(shared if shared and rng.random() < 0.7 else free))
        tried = [*asked[:number], found[dimension], *asked[number + 1 :]]
        if divides(mesh, node_facts(node, facts), decide_axes(mesh, tried)):
            split[dimension] = f"{split[dimension]}*{axis}" if dimension in split else axis
            asked = tried
    return split


def dimensions_of(node: gs.Node, facts: Facts, zeros: frozenset[str], parts: int) -> dict[str, AxisDecision]:
    """Return the dimensions of an op that may be split into so many parts: of a constant's none."""
    known = node_facts(node, facts, zeros)
    rule = known.rule
    if rule is None or all(facts.fixed_value(tensor.name) is not None for tensor in node.outputs):
        return {}
    found: dict[str, AxisDecision] = {}
    for operand, dims in [(None, rule.outputs[0]), *enumerate(rule.inputs)]:
        for axis, factors in enumerate(dims or ()):
            if operand is not None and not rule.combine.keys() & set(factors):
                continue
            for outer in (1, 2):
                decision = decide_by_wish(known, Wish(Split(axis, outer), operand), parts)
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


def random_devices(
    training: TrainingGraph, batch: str, samples: int, seed: int, are_equal: bool = True
) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy for it whose ops have any devices of their own, and any splits.

    Some strategies have a grid of all workers besides, some micro-batches, or all where these need not be
    equal.
    """
    rng = np.random.default_rng(seed)
    cluster = str(rng.choice(list(CLUSTERS)))
    names = [rank.device for rank in ranks_of(cluster_of(cluster)) if rank.replica is not None]
    replicas = int(rng.choice([n for n in (1, 2, 4) if len(names) % n == 0]))
    own = samples if batch == "per-replica" else samples // replicas
    counts = [n for n in (1, 1, 2, 4) if own % n == 0] if are_equal else [n for n in (2, 3, 4) if n <= own]
    microbatches = int(rng.choice(counts or [1]))
    grid = {"data": replicas, "tensor": len(names) // replicas} if rng.random() < 0.4 else {}
    are_bound = batch == "per-replica" or microbatches > 1
    facts = infer_facts(training, {}, replicas)
    zeros, main = find_zeros(training.graph, facts), find_roles(training).main
    ops: list[OpConfig] = []
    share = rng.choice([0.2, 0.6])
    for node in training.graph.nodes:
        if node.name in main and rng.random() < share:
            shares = replicas if are_bound else int(rng.choice([1, replicas]))
            most = len(names) // shares if are_equal else min(len(names), samples) // shares
            ops.append(_on_devices(node, facts, zeros, names, shares, most, rng))
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


def on_some_devices(cluster: str, strategy: Strategy, seed: int) -> tuple[str, Strategy]:
    """Return a cluster of as many workers or more, and a mesh's strategy on some of them, in any order."""
    rng = np.random.default_rng(seed)
    count = CLUSTERS[cluster]
    other = str(rng.choice([name for name, workers in CLUSTERS.items() if workers >= count]))
    names = [rank.device for rank in ranks_of(cluster_of(other)) if rank.replica is not None]
    devices = tuple(map(str, rng.permutation(names)[:count]))
    return other, msgspec.structs.replace(strategy, devices=devices)


def _on_devices(
    node: gs.Node,
    facts: Facts,
    zeros: frozenset[str],
    names: list[str],
    samples: int,
    most: int,
    rng: np.random.Generator,
) -> OpConfig:
    """Return an op on devices drawn in any order, split as its rule allows.

    `samples`: into how many parts these are split, another dimension into `most` at most.
    """
    split: dict[str, int | str] = {"batch": samples}
    parts = int(rng.choice([n for n in (1, 2, 3, 4) if n <= most]))
    found = dimensions_of(node, facts, zeros, parts)
    meshes = Mesh("worker", (("data", samples), ("axis1", parts)))
    fitting = [
        dimension
        for dimension, how in found.items()
        if divides(meshes, node_facts(node, facts), decide_axes(meshes, [whole_axis(node), how]))
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


def random_pipeline(
    training: TrainingGraph, batch: str, samples: int, seed: int, are_equal: bool = True
) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy for it of any stages, of any nodes there, and of any micro-batches.

    `are_equal`: micro-batches have equally many samples; else more than one, of which earlier ones may have
    one more.
    """
    rng = np.random.default_rng(seed)
    cluster, sizes, stages = PIPELINES[int(rng.integers(len(PIPELINES)))]
    own = samples if batch == "per-replica" else samples // sizes["data"]
    counts = [count for count in range(1, own + 1) if (own % count == 0 if are_equal else count > 1)]
    microbatches = int(rng.choice(counts))
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
