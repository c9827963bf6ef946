"""partc: compile one training step on one device into the ONNX subgraphs of a whole cluster.

plan = partc.compile("train.onnx", "cluster.json", "out")
result = partc.Runner(plan).train("synthetic", steps=100)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partc.compiler.api import build_training_graph, compile, get_partitioner, inspect, verify
    from partc.compiler.importing import torch_step as torch
    from partc.compiler.training.optimizers import SGD, Adagrad, Momentum
    from partc.models.catalogue import build_model
    from partc.runtime.errors import PartcError
    from partc.runtime.runner import Runner

__all__ = [
    "SGD",
    "Adagrad",
    "Momentum",
    "PartcError",
    "Runner",
    "build_model",
    "build_training_graph",
    "compile",
    "get_partitioner",
    "inspect",
    "torch",
    "verify",
]

# Loaded when first used: an executor needs the runtime alone, not the compiler and its solver.
_HOME = {
    "Adagrad": "partc.compiler.training.optimizers",
    "Momentum": "partc.compiler.training.optimizers",
    "SGD": "partc.compiler.training.optimizers",
    "PartcError": "partc.runtime.errors",
    "Runner": "partc.runtime.runner",
    "build_model": "partc.models.catalogue",
    "build_training_graph": "partc.compiler.api",
    "compile": "partc.compiler.api",
    "get_partitioner": "partc.compiler.choose_partitions",
    "inspect": "partc.compiler.api",
    "verify": "partc.compiler.api",
}
_MODULES = {"torch": "partc.compiler.importing.torch_step"}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'partc' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
