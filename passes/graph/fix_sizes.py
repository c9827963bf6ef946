"""Give a step's symbolic sizes numbers, for plans that are made for one size alone."""

from collections.abc import Mapping

import msgspec

from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.data.batches import symbolic_sizes
from partc.runtime.data.step_draws import evaluate_size


def open_sizes(training: TrainingGraph) -> set[str]:
    """Return the symbolic sizes of what is fed."""
    return symbolic_sizes(training.data_inputs.values())


def fix_sizes(training: TrainingGraph, sizes: Mapping[str, int]) -> None:
    """Write numbers for the symbolic sizes of what is fed and drawn. `sizes`: a value for every one."""
    training.fixed_sizes = {**training.fixed_sizes, **{name: sizes[name] for name in open_sizes(training)}}
    for fed in (training.data_inputs, training.drawn_inputs):
        for name, entry in fed.items():
            shape = tuple(evaluate_size(size, sizes) for size in entry.shape)
            fed[name] = msgspec.structs.replace(entry, shape=shape)  # type: ignore[assignment]
    for tensor in training.graph.inputs:
        if tensor.shape is not None:
            tensor.shape = [evaluate_size(size, sizes) for size in tensor.shape]
