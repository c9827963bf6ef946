"""Random graphs, any node on any devices and split in any way: what is trained is the single device's."""

from pathlib import Path

import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.rules.sharding_rules import rule_of
from tests.builders.graphs.random_steps import random_step
from tests.builders.plans.compiled_steps import Compiled, compile_as_allowed, random_batches, verified
from tests.builders.plans.random_meshes import random_devices
from tests.checks.oracle import Oracle
from tests.checks.work_of_parts import most_flops
from tests.sampling import sampled

BATCHES = ("global", "per-replica")


def check(seed: int, folder: Path, samples: int = 8, are_equal: bool = True) -> None:
    batch = BATCHES[seed % 2]
    model = random_step(seed, samples=samples)
    training = import_training_graph(model)
    oracle = Oracle(training)
    sizes = [e.shape[e.sample_axis] for e in training.data_inputs.values() if e.sample_axis is not None]
    assert sizes == [samples] * len(sizes)
    cluster, strategy = random_devices(training, batch, samples, seed, are_equal)

    compiled = compile_as_allowed(model, folder / "out", cluster, strategy, batch)
    batches = random_batches(compiled.plan, 2, seed)
    assert oracle.first_wrong(compiled, batches[0]) is None
    report = verified(compiled, batches)
    check_work(compiled)

    assert {check.verdict for check in report.variables} == {"equal"}, report.summary()
    assert not report.disagreeing


def check_work(compiled: Compiled) -> None:
    """What an op was asked to divide among its devices, each computes a part of."""
    lowered, facts = compiled.compilation.lowered, compiled.compilation.analysis.facts
    nodes = {node.name: node for node in compiled.compilation.training.graph.nodes}
    for config in compiled.compilation.strategy.ops:
        if config.op not in nodes:  # it was said in primitives
            continue
        node = nodes[config.op]
        parts = {d: int(number) for d, number in (config.split or {}).items() if d != "batch"}
        copies = [
            c for c, original in lowered.original.items() if original == config.op and c in lowered.flops
        ]
        rule = rule_of(node, facts)
        is_known = all(facts.fixed_value(tensor.name) is not None for tensor in node.outputs)
        if copies and parts and rule is not None and not is_known:
            assert min(lowered.flops[copy] for copy in copies) <= most_flops(rule, parts)


@pytest.mark.parametrize("seed", sampled(range(12), range(1, 12, 3)))
def test_a_random_choice_of_devices_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


def check_uneven(seed: int, folder: Path) -> None:
    """Draw micro-batches of which earlier ones have one sample more."""
    check(seed, folder, (7, 10, 6)[seed // 2 % 3], are_equal=False)


@pytest.mark.parametrize("seed", sampled(range(12), range(0, 12, 3)))
def test_devices_of_micro_batches_of_any_sizes_train_as_one(seed: int, tmp_path: Path) -> None:
    check_uneven(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 400))
def test_many_devices_of_micro_batches_of_any_sizes_train_as_one(seed: int, tmp_path: Path) -> None:
    check_uneven(seed, tmp_path)
