"""Real steps, each group of operators on any devices and divided in any way: the single device's result.

Every intermediate tensor is held against the single device's, and no device computes more than its part.
"""

from math import prod
from pathlib import Path

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.passes.rules.sharding_rules import rule_of
from tests.builders.graphs.attention_block import attention_step
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches, verified
from tests.builders.plans.random_soap import random_soap
from tests.checks.oracle import Oracle

BATCHES = ("global", "per-replica")


def translation() -> onnx.ModelProto:
    sizes = {"source_vocab": 24, "target_vocab": 24, "source_steps": 2, "target_steps": 2}
    layers = {"encoder_layers": 2, "decoder_layers": 1, "cells": 4, "embedding": 4}
    forward = build_model("nmt", dtype="float64", batch=8, **sizes, **layers)
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.3))


MODELS = {
    "mlp": lambda: onnx.ModelProto.FromString(training_model("mlp, adagrad")),
    "attention": lambda: attention_step(Adam(0.01)),
    "tied": lambda: onnx.ModelProto.FromString(training_model("tied embedding")),
    "lm": lambda: onnx.ModelProto.FromString(training_model("lm, adagrad, clipped")),
    "convolutions": lambda: onnx.ModelProto.FromString(training_model("convolutions, float32")),
    "attention, clipped": lambda: attention_step(Momentum(0.1), clip_global_norm=0.1),
    "translation": translation,
}
CLASSES = {"attention": 3, "attention, clipped": 3, "mlp": 5}


def check(model: str, seed: int, folder: Path) -> None:
    batch = BATCHES[seed % 2]
    training = import_training_graph(MODELS[model]())
    oracle = Oracle(training)
    sizes = [e.shape[e.sample_axis] for e in training.data_inputs.values() if e.sample_axis is not None]
    samples = sizes[0]
    assert isinstance(samples, int)
    cluster, strategy = random_soap(training, batch, samples, seed)

    compiled = compile_step(training, folder / "out", cluster, strategy, batch)
    batches = random_batches(compiled.plan, 2, seed, high=CLASSES.get(model, 2))

    rtol = 1e-4 if model == "convolutions" else 1e-9
    assert oracle.first_wrong(compiled, batches[0], rtol) is None, oracle.first_wrong(
        compiled, batches[0], rtol
    )
    report = verified(compiled, batches)
    assert {check.verdict for check in report.variables} == {"equal"}, report.summary()
    assert not report.disagreeing
    check_work(compiled)


def check_work(compiled: Compiled) -> None:
    """Each device computes its part of an operator, and of all micro-batches one."""
    lowered, facts = compiled.compilation.lowered, compiled.compilation.analysis.facts
    nodes = {node.name: node for node in compiled.compilation.training.graph.nodes}
    for config in compiled.compilation.strategy.ops:
        rule = rule_of(nodes[config.op], facts) if config.op in nodes else None
        copies = [
            c for c, original in lowered.original.items() if original == config.op and c in lowered.flops
        ]
        parts = [int(size) for dimension, size in (config.split or {}).items() if dimension != "batch"]
        if rule is not None and copies:
            assert min(lowered.flops[copy] for copy in copies) <= rule.flops // prod(parts)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_any_degrees_on_any_devices_train_as_one(model: str, seed: int, tmp_path: Path) -> None:
    check(model, seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 290))
@pytest.mark.parametrize("model", MODELS)
def test_many_degrees_on_any_devices_train_as_one(model: str, seed: int, tmp_path: Path) -> None:
    check(model, seed, tmp_path)
