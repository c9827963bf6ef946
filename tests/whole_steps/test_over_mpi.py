"""Strategies on meshes as `partc verify` runs them: daemons over MPI, on one machine and between hosts."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import onnx
import pytest

from benchmarks.namespaces import Network, namespace_hosts
from partc.compiler import api
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.verify import verify
from partc.cost.cluster.cluster import Cluster
from partc.models.catalogue import build_model
from tests.builders.graphs.soap_models import OPTIMIZED, soap_model
from tests.builders.plans.compiled_steps import cluster_of, compile_as_allowed
from tests.builders.plans.random_soap import random_soap, samples_of
from tests.checks.command_line import done

BITS_PER_S = 1e9
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"

pytestmark = pytest.mark.long


def _block(name: str) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(soap_model(name))


def _resnet() -> onnx.ModelProto:
    forward = build_model("resnet50", batch=4, width=8, image=96, classes=10)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.01))


def _alexnet() -> onnx.ModelProto:
    forward = onnx.load(LIGHT / "light_bvlc_alexnet.onnx")
    return build_training_graph(
        forward, loss="softmax_cross_entropy", optimizer=Momentum(0.01), batch_size=8, reinit=0
    )


def _translation() -> onnx.ModelProto:
    sizes = {"source_vocab": 53, "target_vocab": 47, "embedding": 16, "cells": 16}
    forward = build_model("nmt", batch=8, source_steps=5, target_steps=4, dtype="float64", **sizes)
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.3))


def _language_model() -> onnx.ModelProto:
    forward = build_model("rnnlm", batch=8, steps=4, vocab=50, embedding=16, cells=16, dtype="float64")
    return build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1))


def _perceptron() -> onnx.ModelProto:
    forward = build_model("mlp", sizes=[12, 24, 24, 24, 24, 10], batch=16, dtype="float64")
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "gpt2": lambda: _block("gpt2"),
    "bert": lambda: _block("bert"),
    "resnet50": _resnet,
    "alexnet": _alexnet,
    "nmt": _translation,
    "rnnlm": _language_model,
    "mlp": _perceptron,
}

# model, hosts, devices of each, strategy; between hosts, as many of one device each where hosts is 1.
CASES = (
    ("gpt2", 1, 4, "tensor=4"),
    ("bert", 1, 4, "tensor=4"),
    ("resnet50", 1, 2, "spatial=2"),
    ("resnet50", 1, 4, "spatial=4"),
    ("alexnet", 1, 4, "one-weird-trick"),
    ("nmt", 2, 2, "layerwise"),
    ("gpt2", 1, 4, "fsdp"),
    ("mlp", 1, 2, "pipeline=2,microbatches=4"),
    ("mlp", 1, 2, "pipeline=2,microbatches=8"),
    ("mlp", 1, 4, "pipeline=4,microbatches=4"),
    ("mlp", 1, 4, "pipeline=4,microbatches=8"),
    ("mlp", 2, 2, "data=2,pipeline=2,microbatches=4"),
    ("mlp", 2, 2, "data=2,pipeline=2,microbatches=8"),
    ("gpt2", 2, 2, "tensor=2,pipeline=2,microbatches=4"),
    ("gpt2", 1, 4, "pipeline=4,microbatches=8"),
    ("gpt2", 2, 2, "data=2,tensor=2"),
    ("rnnlm", 1, 4, "tensor=4"),
)


@contextmanager
def _machine(hosts: int, devices: int) -> Iterator[Cluster]:
    yield cluster_of(f"{hosts}x{devices}")


@contextmanager
def _namespaces(hosts: int, devices: int) -> Iterator[Cluster]:
    apart = (devices, 1) if hosts == 1 else (hosts, devices)
    with namespace_hosts(*apart, BITS_PER_S, Network("pom", "10.213.13")) as cluster:
        yield cluster


HOSTS = (
    pytest.param(_machine, id="machine"),
    pytest.param(
        _namespaces,
        id="namespaces",
        marks=pytest.mark.skipif(
            os.geteuid() != 0 or not shutil.which("ip"),
            reason="making network namespaces needs root and iproute2",
        ),
    ),
)


@pytest.mark.parametrize("hosts_of", HOSTS)
@pytest.mark.parametrize(("model", "hosts", "devices", "strategy"), CASES)
def test_ranks_train_as_one_device(
    model: str,
    hosts: int,
    devices: int,
    strategy: str,
    hosts_of: Callable[[int, int], AbstractContextManager[Cluster]],
    tmp_path: Path,
) -> None:
    train, out = tmp_path / "train.onnx", tmp_path / "out"
    onnx.save(MODELS[model](), train)
    with hosts_of(hosts, devices) as cluster:
        api.compile(train, cluster, out, strategy=strategy, batch="global")
        verified = done("verify", out, "--steps", 2 if model != "alexnet" else 1)

    assert f"verified: {hosts * devices} ranks" in verified


IN_FLOAT64 = (
    *("mlp", "lm", "clipped attention", "translation", "tied embedding", "tied translation"),
    *OPTIMIZED,
)


@pytest.mark.parametrize("seed", range(40))
def test_any_degrees_on_any_devices_train_as_one(seed: int, tmp_path: Path) -> None:
    """Every model without ops that onnxruntime lacks in float64 in turn, both readings of the batch."""
    step = onnx.ModelProto.FromString(soap_model(IN_FLOAT64[seed % len(IN_FLOAT64)]))
    training, batch = import_training_graph(step), ("global", "per-replica")[seed // 2 % 2]
    samples = samples_of(training)
    cluster, strategy = random_soap(training, batch, samples, 7000 + seed, are_equal=seed % 3 != 2)

    folder = compile_as_allowed(step, tmp_path / "out", cluster, strategy, batch).folder

    report = verify(folder, steps=2)
    assert report.passed, report.summary()
