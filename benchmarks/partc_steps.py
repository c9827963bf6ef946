"""The three works in partc: grad, compile for one CPU, then the runtime in this process, one thread."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from sizes import GPT2, LM, RESNET50, batch_of

from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Device, Host
from partc.models.catalogue import build_model
from partc.runtime.execution.device import device_of
from partc.runtime.execution.in_process import RanksInProcess

MEMORY_BYTES = 64 * 2**30
PROFILES = {"cpu": "cpu-core", "gpu": "titan-xp"}  # what it predicts is not asked


def prepare_plan(work: str, folder: Path, kind: Literal["cpu", "gpu"]) -> None:
    """Write the work's plan for one device into a folder."""
    compile_for_one_device(write_training_step(work, folder), folder / "plan", kind)


def write_training_step(work: str, folder: Path, replicas: int = 1) -> Path:
    """Write the work's training graph into a folder, with the batches of so many replicas as one."""
    from partc.compiler.differentiation.build import build_training_graph
    from partc.compiler.differentiation.updates.optimizers import Adagrad, AdamW, Momentum

    optimizer, loss = {
        "resnet50": (Momentum(RESNET50["lr"], RESNET50["momentum"]), "softmax_cross_entropy"),
        "gpt2": (AdamW(GPT2["lr"], weight_decay=GPT2["weight_decay"]), "loss"),
        "lm": (Adagrad(LM["lr"]), "loss"),
    }[work]
    forward = _forward(work, folder, replicas)
    train = build_training_graph(forward, loss=loss, optimizer=optimizer, folder=folder)
    onnx.save(train, folder / "train.onnx")
    return folder / "train.onnx"


def compile_for_one_device(
    train: Path, out: Path, kind: Literal["cpu", "gpu"] = "cpu", recompute_bytes: int | None = None
) -> None:
    """Write a plan for one device into a folder, at most so many bytes of values at once."""
    from partc.compiler.api import compile_step
    from partc.compiler.options import Options

    device = Device("device0", kind, PROFILES[kind], memory_bytes=MEMORY_BYTES)
    host = Host("localhost", (device,), memory_bytes=MEMORY_BYTES)
    cluster = Cluster("partc-cluster/1", f"one {kind}", (host,))
    compile_step(train, cluster, out, Options(recompute_bytes=recompute_bytes))


def _forward(work: str, folder: Path, replicas: int) -> onnx.ModelProto:
    if work == "resnet50":
        return build_model("resnet50", batch=RESNET50["batch"] * replicas)
    if work == "lm":
        sizes = ("vocab", "embedding", "cells", "projection", "steps", "samples")
        return build_model("lm", batch=LM["batch"] * replicas, **{name: LM[name] for name in sizes})
    from torch_steps import export_gpt2

    batch = [np.concatenate([array] * replicas) for array in batch_of("gpt2").values()]
    export_gpt2(str(folder / "forward.onnx"), batch)
    return onnx.load(folder / "forward.onnx", load_external_data=False)


def partc_step(folder: Path) -> Callable[[Mapping[str, np.ndarray]], float]:
    """Return a function that trains one step on a batch and returns the loss."""
    ranks = RanksInProcess(folder / "plan", device_of=device_of)

    def step(batch: Mapping[str, np.ndarray]) -> float:
        return float(ranks.step(batch)["loss"])

    return step
