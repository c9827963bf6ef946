"""Plans on a GPU: the result of one device, in this process with all workers on one GPU, and by daemons.

The reference is plain ONNX Runtime on the CPU, so kernels of both kinds are held against each other.
"""

import json
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.verify import launch_in_process, verify
from partc.models.catalogue import build_model
from partc.runtime.execution.device import ExecutionDevice
from partc.runtime.plan.program import Rank
from tests.builders.plans.compiled_steps import compile_step, random_batches
from tests.checks.command_line import done
from tests.checks.gpus import NEEDS_A_GPU

pytestmark = [pytest.mark.gpu, NEEDS_A_GPU]

SIZES = {
    "mlp": {"sizes": (6, 8, 4), "batch": 8},
    "lm": {"vocab": 60, "embedding": 8, "cells": 8, "projection": 8, "steps": 3, "samples": 16, "batch": 8},
    "resnet50": {"width": 4, "image": 32, "classes": 10, "batch": 8},
}
LOSSES = {"lm": "loss"}
OPTIMIZERS = {"lm": "adagrad"}


def hosts_of_one_gpu(count: int, environment: Mapping[str, str]) -> dict[str, object]:
    """A cluster of this machine under so many names: ranks that share its first GPU.

    NCCL joins ranks of one GPU where it takes them for those of several hosts.
    """
    hosts = [
        {
            "name": f"host{number}",
            "address": "localhost",
            "environment": {**environment, "NCCL_HOSTID": f"host{number}"},
            "memory_bytes": 2**34,
            "devices": [{"name": f"host{number}/gpu0", "kind": "gpu", "profile": "titan-xp"}],
        }
        for number in range(count)
    ]
    links = [
        {"ends": ["host0", f"host{number}"], "bytes_per_s": 1e9, "latency_s": 1e-5}
        for number in range(1, count)
    ]
    return {"format": "partc-cluster/1", "name": "one GPU", "hosts": hosts, "links": links}


def on_one_gpu(rank: Rank) -> ExecutionDevice:
    """Put every worker on the first GPU, and what only serves on the CPU."""
    return ExecutionDevice("cpu" if rank.replica is None else "gpu", 0, rank.threads)


@pytest.mark.parametrize(
    ("model", "cluster", "strategy"),
    [
        *((model, "2x2s", strategy) for model in SIZES for strategy in ("allreduce", "hybrid", "ps")),
        *(("mlp", "1x2s", strategy) for strategy in ("tensor=2", "fsdp=2", "pipeline=2,microbatches=2")),
        ("resnet50", "1x2s", "spatial=2"),
    ],
)
def test_workers_on_a_gpu_train_as_one_device(
    tmp_path: Path, model: str, cluster: str, strategy: str
) -> None:
    optimizer = Adagrad(0.1, initial_accumulator=1e-6) if model == "lm" else Momentum(0.1)
    forward = build_model(model, **SIZES[model])
    step = build_training_graph(forward, loss=LOSSES.get(model, "softmax_cross_entropy"), optimizer=optimizer)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", cluster, strategy, "global")
    batches = random_batches(compiled.plan, 2)

    launcher = partial(launch_in_process, device_of=on_one_gpu)
    report = verify(compiled.folder, steps=2, data=batches, launcher=launcher)

    assert report.passed, f"{report.summary()}\n{report.variables}\n{report.losses}"
    assert all(check.max_change > 0 for check in report.variables), report.variables


def make_plan(folder: Path, model: str, ranks: int, strategy: str, environment: Mapping[str, str]) -> Path:
    cluster, forward, train, out = (
        folder / name for name in ("cluster.json", "forward.onnx", "train.onnx", "out")
    )
    cluster.write_text(json.dumps(hosts_of_one_gpu(ranks, environment)))
    sizes = [
        part
        for name, size in SIZES[model].items()
        for part in ("--set", f"{name}={str(size).strip('()').replace(' ', '')}")
    ]
    done("model", model, *sizes, "-o", forward)
    loss = LOSSES.get(model, "softmax_cross_entropy")
    done("grad", forward, "--loss", loss, "--optimizer", OPTIMIZERS.get(model, "momentum"), "-o", train)
    done("compile", train, "-c", cluster, "--strategy", strategy, "--batch", "global", "-o", out)
    return out


@pytest.mark.parametrize("strategy", ["allreduce", "ps", "hybrid"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_daemons_on_a_gpu_train_as_one_device(tmp_path: Path, ranks: int, strategy: str) -> None:
    out = make_plan(tmp_path, "lm", ranks, strategy, {})

    done("run", out, "--data", "synthetic", "--steps", "5")
    verified = done("verify", out, "--steps", "2")

    assert "variables equal" in verified


@pytest.mark.skipif(find_spec("nccl") is None, reason="no NCCL")
@pytest.mark.parametrize(
    ("model", "ranks", "strategy"),
    [
        ("lm", 2, "allreduce"),
        ("mlp", 4, "allreduce"),
        ("mlp", 3, "fsdp"),
        ("mlp", 2, "tensor=2"),
        ("mlp", 2, "pipeline=2,microbatches=4"),
        ("mlp", 4, "data=2,tensor=2"),
        ("mlp", 4, "data=2,pipeline=2,microbatches=2"),
        ("resnet50", 2, "spatial=2"),
    ],
)
def test_gpus_communicate_by_nccl(tmp_path: Path, model: str, ranks: int, strategy: str) -> None:
    told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.%p")}
    out = make_plan(tmp_path, model, ranks, strategy, told)

    verified = done("verify", out, "--steps", "3")

    assert "variables equal" in verified
    logs = [path.read_text() for path in tmp_path.glob("nccl.*")]
    assert len(logs) == ranks
    assert all("Init COMPLETE" in log for log in logs)
