"""Random graphs under random splits on random meshes: every tensor of every rank is the single device's."""

from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.layouts.layouts import Split
from partc.passes.rules.sharding_rules import rule_of
from partc.runtime.plan.boxes import local_shape
from tests.builders.graphs.random_steps import random_step
from tests.builders.plans.compiled_steps import Compiled, compile_as_allowed, random_batches, verified
from tests.builders.plans.random_meshes import on_some_devices, random_mesh_strategy
from tests.checks.oracle import Oracle
from tests.checks.work_of_parts import most_flops
from tests.sampling import sampled

BATCHES = ("global", "per-replica")
UNEVEN = (5, 7, 6, 9)  # sizes that meshes do not divide


def check(
    seed: int, folder: Path, samples: int = 8, width: int = 4, nests: bool = False, of_some: bool = False
) -> None:
    batch = BATCHES[seed % 2]
    model = random_step(seed, samples=samples, width=width)
    training = import_training_graph(model)
    oracle = Oracle(training)
    cluster, strategy = random_mesh_strategy(training, batch, seed, nests)
    if of_some:
        cluster, strategy = on_some_devices(cluster, strategy, seed)

    compiled = compile_as_allowed(model, folder / "out", cluster, strategy, batch)
    batches = random_batches(compiled.plan, 2, seed)

    assert oracle.first_wrong(compiled, batches[0]) is None
    report = verified(compiled, batches)
    assert {check.verdict for check in report.variables} == {"equal"}, report.summary()
    assert not report.disagreeing
    check_held(compiled)
    check_work(compiled)


def check_held(compiled: Compiled) -> None:
    """No rank keeps more of a variable than its home says."""
    compilation = compiled.compilation
    for rank in compiled.plan.ranks:
        for piece in rank.pieces:
            shape = compilation.training.variables[piece.variable].shape
            sizes = list(shape)
            for name, split in compilation.strategy.variables.get(piece.variable, {}).items():
                each = split.outer * parts_of(compiled, [name])
                sizes[split.axis] = -(-sizes[split.axis] // each) * split.outer
            assert all(np.less_equal(local_shape(shape, piece.box), sizes))
    for variable in compilation.training.variables.values():
        held_entries = [
            prod(local_shape(variable.shape, piece.box))
            for rank in compiled.plan.ranks
            for piece in rank.pieces
            if piece.variable == variable.name
        ]
        parts = parts_of(compiled, compilation.strategy.variables.get(variable.name, ()))
        assert sum(held_entries) * parts == prod(variable.shape) * len(held_entries)


def check_work(compiled: Compiled) -> None:
    """What an op was asked to split it splits, and a rank computes its part alone."""
    lowered, facts = compiled.compilation.lowered, compiled.compilation.analysis.facts
    nodes = {node.name: node for node in compiled.compilation.training.graph.nodes}
    for config in compiled.compilation.strategy.ops:
        split = {d: str(axes).split("*") for d, axes in (config.split or {}).items()}
        parts = {d: parts_of(compiled, axes) for d, axes in split.items() if d != "batch"}
        if all(facts.fixed_value(tensor.name) is not None for tensor in nodes[config.op].outputs):
            continue  # it is computed when compiled
        copies = [copy for copy, original in lowered.original.items() if original == config.op]
        rule = rule_of(nodes[config.op], facts)
        if copies and parts and rule is not None:
            assert min(lowered.flops[copy] for copy in copies) <= most_flops(rule, parts)
        for dimension, axis in ((d, axis) for d, axes in split.items() for axis in axes):
            if dimension.startswith("out:") and parts_of(compiled, [axis]) > 1:
                place, _, outer = dimension.removeprefix("out:").partition("/")
                layout = lowered.native[nodes[config.op].outputs[0].name]
                found = layout.along(number_of(compiled, axis))
                assert isinstance(found, Split)
                assert (found.axis, found.outer) == (int(place), int(outer or 1))


def parts_of(compiled: Compiled, axes: Iterable[str | int]) -> int:
    mesh = compiled.compilation.lowered.meshes.each[0]
    return prod(mesh.size(number_of(compiled, axis)) for axis in axes)


def number_of(compiled: Compiled, name: str | int) -> int:
    return [axis for axis, _ in compiled.compilation.lowered.meshes.each[0].axes].index(str(name))


@pytest.mark.parametrize("seed", sampled(range(10), range(0, 10, 3)))
def test_a_random_split_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 2014))
def test_many_random_splits_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.parametrize("seed", sampled(range(20), range(0, 20, 4)))
def test_a_mesh_of_some_devices_trains_as_one(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, 7 if BATCHES[seed % 2] == "global" and seed % 3 == 0 else 8, of_some=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 520))
def test_many_meshes_of_some_devices_train_as_one(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, 7 if BATCHES[seed % 2] == "global" and seed % 3 == 0 else 8, of_some=True)


def check_uneven(seed: int, folder: Path) -> None:
    """Draw sizes that do not divide: of samples too where a global batch is divided."""
    samples = 7 if BATCHES[seed % 2] == "global" else 8
    check(seed, folder, samples, UNEVEN[seed // 2 % len(UNEVEN)])


@pytest.mark.parametrize(
    "seed", sampled([*range(20), 337], range(2, 21, 3))
)  # 337 cut a sum before it was scattered
def test_a_random_uneven_split_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_uneven(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 1020))
def test_many_random_uneven_splits_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_uneven(seed, tmp_path)


def check_nested(seed: int, folder: Path) -> None:
    """Let axes of the mesh split one dimension together, of sizes that none or only some of them divide."""
    samples = 7 if BATCHES[seed % 2] == "global" and seed % 3 else 8
    check(seed, folder, samples, (*UNEVEN, 10)[seed // 2 % 5], nests=True)


@pytest.mark.parametrize("seed", sampled(range(20), range(1, 20, 3)))
def test_axes_that_split_one_dimension_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_nested(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 1020))
def test_many_axes_that_split_one_dimension_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_nested(seed, tmp_path)
