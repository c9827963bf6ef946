"""Random configurations as FlexFlow's space has them (section 4): per group any degrees, any devices.

What is drawn: devices of a group's own, in any order; a grid of up to three axes, once or once per stage, any
group at any of these; any dimension of any group cut by any of these, into equal parts or others; where
variables are kept; micro-batches.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.cost.cluster.cluster import ranks_of
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.passes.graph.facts import Facts
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.decisions import decide_axes, divides, whole_axis
from partc.passes.layouts.meshes import Mesh
from partc.passes.roles.find_roles import find_roles
from partc.passes.roles.find_zeros import find_zeros
from partc.passes.rules.sharding_rules import node_facts
from partc.passes.search.operators.find_groups import find_groups
from tests.builders.plans.compiled_steps import cluster_of
from tests.builders.plans.random_meshes import dimensions_of, random_home, random_split

CLUSTERS = {"1x2": 0.3, "1x3": 0.25, "2x2": 0.25, "2x4": 0.2}  # 2, 3, 4 and 8 workers: how often
SPLIT, WHOLE = 0.6, 0.2  # of groups on a grid: whose dimensions are drawn; of which nothing is said


def random_soap(
    training: TrainingGraph,
    batch: str,
    samples: int,
    seed: int,
    are_equal: bool = True,
    may_clash: bool = False,
) -> tuple[str, Strategy]:
    """Return a cluster, and a strategy for it. `samples`: of the graph's batch.

    `are_equal`: micro-batches are, and mesh axes that cut one dimension together make equal parts of it; else
    there are micro-batches more often than not, and axes that do not. `may_clash`: dimensions are drawn that
    cannot be cut where samples are, which are refused.
    """
    rng = np.random.default_rng(seed)
    cluster = str(rng.choice(list(CLUSTERS), p=list(CLUSTERS.values())))
    devices = [rank.device for rank in ranks_of(cluster_of(cluster)) if rank.replica is not None]
    form = str(rng.choice(["devices", "grid", "both"], p=[0.45, 0.3, 0.25]))
    stages, grid = (1, {}) if form == "devices" else _random_grid(len(devices), batch, samples, rng)
    replicas = grid["data"] if grid else _samples_parts(len(devices), batch, samples, rng)
    own = samples if batch == "per-replica" else samples // replicas
    divides_equally = batch == "per-replica" or samples % replicas == 0
    counts = [n for n in (1, 1, 1, 2, 4) if own % n == 0 and (divides_equally or n == 1)]
    if not are_equal:
        counts = [n for n in (1, 2, 3, 4, 5) if n <= own]
    microbatches = int(rng.choice(counts))
    facts = infer_facts(training, {}, replicas)
    draw = _Draw(
        rng,
        batch,
        samples,
        replicas,
        batch == "per-replica" or microbatches > 1,
        facts,
        find_zeros(training.graph, facts),
        grid,
        stages,
        [[str(name) for name in rng.permutation(devices)] for _ in range(int(rng.integers(1, 4)))],
        microbatches,
        are_equal,
        may_clash,
    )
    nodes = {node.name: node for node in training.graph.nodes}
    groups = [nodes[group.node] for group in find_groups(training, facts, find_roles(training).main)]
    on_devices = {"devices": 1.0, "grid": 0.0, "both": 0.5}[form]
    ops = [
        draw.on_devices(node) if rng.random() < on_devices else draw.on_grid(node, form == "grid")
        for node in groups
        if on_devices == 1 or rng.random() > WHOLE
    ]
    if form == "both" and not any(op.devices for op in ops):
        ops.append(draw.on_devices(groups[0]))
    mesh = Mesh("worker", tuple(grid.items())) if grid else None
    homes = {
        name: random_home(mesh, variable.shape, rng)
        for name, variable in training.variables.items()
        if mesh is not None and form == "grid" and rng.random() < 0.4  # of that shape, wherever it is kept
    }
    return cluster, Strategy(
        MESH_STRATEGY_FORMAT,
        batch,  # type: ignore[arg-type]
        {},
        mesh=grid,
        variables={name: splits for name, splits in homes.items() if splits},
        ops=tuple(ops),
        stages=stages,
        microbatches=microbatches,
    )


def samples_of(training: TrainingGraph) -> int:
    """Return how many samples the graph's batch has, a number."""
    sizes = [e.shape[e.sample_axis] for e in training.data_inputs.values() if e.sample_axis is not None]
    assert isinstance(sizes[0], int)
    return sizes[0]


def _samples_parts(most: int, batch: str, samples: int, rng: np.random.Generator) -> int:
    """Draw how many parts the samples have; of a global batch some are of different sizes."""
    equal = [n for n in range(1, most + 1) if batch == "per-replica" or samples % n == 0]
    any_number = range(1, min(most, samples) + 1) if batch == "global" else equal
    return int(rng.choice(any_number if rng.random() < 0.2 else equal))


def _random_grid(
    workers: int, batch: str, samples: int, rng: np.random.Generator
) -> tuple[int, dict[str, int]]:
    """Draw stages, and the parts of the grid's axes, which take all workers."""
    stages = int(
        rng.choice([n for n in range(1, workers + 1) if workers % n == 0 and (n == 1 or rng.random() < 0.6)])
    )
    rest, sizes = workers // stages, []
    for _ in range(2):
        sizes.append(int(rng.choice([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= sizes[-1]
    sizes.append(rest)
    is_even = batch == "per-replica" or samples % sizes[0] == 0
    if not is_even and rng.random() < 0.5:
        sizes[0], sizes[1] = sizes[1], sizes[0]
    if batch == "global" and sizes[0] > samples:
        sizes[0], sizes[1] = 1, sizes[0] * sizes[1]
    names = ("data", "tensor", "sequence")
    return stages, {n: s for n, s in zip(names, sizes, strict=True) if s > 1 or n == "data"}


@dataclass
class _Draw:
    """What entries for ops are drawn from."""

    rng: np.random.Generator
    batch: str
    samples: int
    replicas: int
    is_bound: bool  # all meshes divide samples alike
    facts: Facts
    zeros: frozenset[str]
    grid: dict[str, int]
    stages: int
    orders: list[list[str]]  # of devices; operators take the first so many of one
    microbatches: int
    are_equal: bool
    may_clash: bool

    def on_grid(self, node: gs.Node, is_alone: bool) -> OpConfig:
        """Draw a stage, and what the axes of the grid divide.

        `is_alone`: there is no other grid, so that an entry without a stage means the sizes of this one.
        """
        rng = self.rng
        is_named = rng.random() < 0.6 if is_alone else True
        stage = int(rng.integers(self.stages)) if is_named and (self.stages > 1 or not is_alone) else None
        if rng.random() > SPLIT and stage is not None:
            return OpConfig(node.name, stage=stage)
        batch = "per-replica" if self.is_bound else self.batch
        split = random_split(node, self.facts, self.zeros, self.grid, batch, rng, nests=not self.are_equal)
        kept = {
            dimension: along
            for dimension, along in split.items()
            if not self.clashes(dimension, self.replicas, self.grid_parts(dimension, str(along)))
        }
        return OpConfig(node.name, kept, stage=stage)

    def clashes(self, dimension: str, parts: int, size: int = 1) -> bool:
        """Tell whether a dimension may be one that cannot be cut where samples are, in so many parts.

        An inner factor of axis 0, or the axis itself where samples are cut unevenly, or there are too few.
        """
        place, _, outer = dimension.partition("/")
        if self.may_clash or place not in ("out:0", "in:0:0"):
            return False
        if self.are_equal:
            return bool(outer or self.samples % (parts * size))
        return bool(outer) or self.samples < parts * size * self.microbatches

    def grid_parts(self, dimension: str, along: str) -> int:
        """Return into how many parts axes of the grid cut a dimension, where that is asked."""
        return (
            1
            if self.are_equal or dimension == "batch"
            else prod(map(self.grid.__getitem__, along.split("*")))
        )

    def on_devices(self, node: gs.Node) -> OpConfig:
        """Draw devices, and degrees that multiply to as many: of samples, and of two dimensions besides."""
        rng = self.rng
        order = self.orders[int(rng.integers(len(self.orders)))]
        parts = self.replicas if self.is_bound else _samples_parts(len(order), self.batch, self.samples, rng)
        split: dict[str, int | str] = {"batch": parts}
        axes, decisions = [("data", parts)], [whole_axis(node)]
        for _ in range(2):
            room = len(order) // prod(size for _, size in axes)
            if room < 2 or rng.random() < 0.3:
                continue
            size = int(rng.integers(2, room + 1))
            found = dimensions_of(node, self.facts, self.zeros, size)
            mesh = Mesh("worker", (*axes, (f"axis{len(axes)}", size)))
            fitting = [
                dimension
                for dimension, how in found.items()
                if dimension not in split
                and not self.clashes(dimension, parts, size)
                and divides(mesh, node_facts(node, self.facts), decide_axes(mesh, [*decisions, how]))
            ]
            if fitting:
                space = [d for d in fitting if node.op == "Conv" and d[:5] in ("out:2", "out:3")]
                dimension = str(rng.choice(space if space and rng.random() < 0.5 else fitting))
                split[dimension] = size
                axes.append(mesh.axes[-1])
                decisions.append(found[dimension])
        return OpConfig(node.name, split, devices=tuple(order[: prod(size for _, size in axes)]))


# ---------------------------------------------------------------- what was drawn


def describe(training: TrainingGraph, strategy: Strategy) -> Counter[str]:
    """Count what a strategy asks for: entries of ops by what they divide, and traits of the whole."""
    nodes = {node.name: node for node in training.graph.nodes}
    facts = infer_facts(training, {}, 1)
    found: Counter[str] = Counter({"plans": 1, strategy.batch: 1, "entries": len(strategy.ops)})
    found["with devices of their own"] = any(op.devices for op in strategy.ops)
    found["with a grid"] = bool(strategy.mesh)
    found["with stages"] = strategy.stages > 1
    found["with micro-batches"] = strategy.microbatches > 1
    found["with variables in parts"] = bool(strategy.variables)
    for op in strategy.ops:
        for dimension, along in (op.split or {}).items():
            names = [] if isinstance(along, int) else along.split("*")
            parts = along if isinstance(along, int) else prod(strategy.mesh[name] for name in names)
            if parts == 1:
                continue
            kind = "samples" if dimension == "batch" else "sums" if dimension[0] == "i" else "outputs"
            found[f"entries: {kind}"] += 1
            if kind == "outputs" and nodes[op.op].op == "Conv" and dimension[4] in "23":
                found["entries: space"] += 1
            if kind == "outputs":
                axis, _, outer = dimension[4:].partition("/")
                size = facts.shape(nodes[op.op].outputs[0].name)[int(axis)] // int(outer or 1)
                found["entries: uneven"] += bool(size % parts)
    return found
