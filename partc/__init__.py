"""partc: compile one training step on one device into the ONNX subgraphs of a whole cluster.

plan = partc.compile("train.onnx", "cluster.json", "out")
result = partc.Runner(plan).train("synthetic", steps=100)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partc import torch
    from partc.compiler.api import (
        build_model,
        build_training_graph,
        compile,
        get_partitioner,
        inspect,
        search,
        verify,
    )
    from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad, Momentum
    from partc.compiler.importing.shard_inputs import create_num_shards_and_shard_id
    from partc.compiler.options import GraphOptions, Options, Partitioner, Sample, SearchOptions
    from partc.compiler.parallax_api import get_runner, parallel_run, shard
    from partc.compiler.parallax_config import (
        CheckpointConfig,
        CommunicationConfig,
        MPIConfig,
        ParallaxConfig,
        ProfileConfig,
        PSConfig,
        SessionConfig,
    )
    from partc.runtime.errors import PartcError
    from partc.runtime.jobs.runner import Runner

__all__ = [
    "SGD",
    "Adagrad",
    "CheckpointConfig",
    "CommunicationConfig",
    "GraphOptions",
    "MPIConfig",
    "Momentum",
    "Options",
    "PSConfig",
    "ParallaxConfig",
    "PartcError",
    "Partitioner",
    "ProfileConfig",
    "Runner",
    "Sample",
    "SearchOptions",
    "SessionConfig",
    "build_model",
    "build_training_graph",
    "compile",
    "create_num_shards_and_shard_id",
    "get_partitioner",
    "get_runner",
    "inspect",
    "parallel_run",
    "search",
    "shard",
    "torch",
    "verify",
]

# Loaded when first used: an executor needs the runtime alone, not the compiler and its solver.
_HOME = {
    "Adagrad": "partc.compiler.differentiation.updates.optimizers",
    "GraphOptions": "partc.compiler.options",
    "Momentum": "partc.compiler.differentiation.updates.optimizers",
    "CheckpointConfig": "partc.compiler.parallax_config",
    "CommunicationConfig": "partc.compiler.parallax_config",
    "MPIConfig": "partc.compiler.parallax_config",
    "PSConfig": "partc.compiler.parallax_config",
    "ProfileConfig": "partc.compiler.parallax_config",
    "SessionConfig": "partc.compiler.parallax_config",
    "ParallaxConfig": "partc.compiler.parallax_config",
    "SGD": "partc.compiler.differentiation.updates.optimizers",
    "Options": "partc.compiler.options",
    "PartcError": "partc.runtime.errors",
    "Partitioner": "partc.compiler.options",
    "Runner": "partc.runtime.jobs.runner",
    "Sample": "partc.compiler.options",
    "SearchOptions": "partc.compiler.options",
    "build_model": "partc.compiler.api",
    "build_training_graph": "partc.compiler.api",
    "compile": "partc.compiler.api",
    "create_num_shards_and_shard_id": "partc.compiler.importing.shard_inputs",
    "get_partitioner": "partc.compiler.planning.choose_partitions",
    "get_runner": "partc.compiler.parallax_api",
    "inspect": "partc.compiler.api",
    "parallel_run": "partc.compiler.parallax_api",
    "search": "partc.compiler.api",
    "shard": "partc.compiler.parallax_api",
    "verify": "partc.compiler.api",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # a quarter of what `partc --help` takes to begin

        return version("partc")
    if name == "torch":
        return import_module("partc.torch")
    if name not in _HOME:
        raise AttributeError(f"module 'partc' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
