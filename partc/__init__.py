"""partc: compile one training step on one device into the ONNX subgraphs of a whole cluster.

plan = partc.compile("train.onnx", "cluster.json", "out")
result = partc.Runner(plan).train("synthetic", steps=100)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partc.compiler.api import build_training_graph, compile, inspect, verify
    from partc.models.catalogue import build_model
    from partc.runtime.errors import PartcError
    from partc.runtime.runner import Runner

__all__ = ["PartcError", "Runner", "build_model", "build_training_graph", "compile", "inspect", "verify"]

# Loaded when first used: an executor needs the runtime alone, not the compiler and its solver.
_HOME = {
    "PartcError": "partc.runtime.errors",
    "Runner": "partc.runtime.runner",
    "build_model": "partc.models.catalogue",
    "build_training_graph": "partc.compiler.api",
    "compile": "partc.compiler.api",
    "inspect": "partc.compiler.api",
    "verify": "partc.compiler.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'partc' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
