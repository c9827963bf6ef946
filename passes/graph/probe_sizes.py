"""See whether what is fixed at two sizes is so at others.

    min(N / 8, 1)      1 at N = 8 and at 16, and 0.5 at 4
    max(1, N // 16)    1 at N = 8 and at 16, and 4 at 64

Facts take for fixed what is equal at the assumed sizes and at twice these. Ops that may hide a size, where
they read one, are reason to look at half of the assumed size, and at one more than five hundred times it.
"""

from collections.abc import Mapping

import numpy as np

from partc.passes.graph.facts import Facts
from partc.passes.graph.fix_sizes import open_sizes
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import UnsupportedModel

_MAY_HIDE = frozenset(
    {
        *("Min", "Max", "Clip", "Relu", "ReduceMin", "ReduceMax", "ArgMin", "ArgMax", "TopK", "Where"),
        *("Div", "Mod", "Floor", "Ceil", "Round", "Sign", "Abs", "Pow", "Cast"),
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor"),
    }
)


def is_fixed_at_other_sizes(
    training: TrainingGraph, facts: Facts, sizes: Mapping[str, int], replicas: int
) -> bool:
    """Tell whether values and shapes that are fixed by `facts`, of the assumed sizes, are so at others."""
    left_open = open_sizes(training) - training.fixed_sizes.keys()
    if not left_open or not _hides_sizes(training, facts):
        return True
    half = {n: max(1, size // 2) if n in left_open else size for n, size in sizes.items()}
    large = {n: 500 * size + 1 if n in left_open else size for n, size in sizes.items()}
    return all(_agree(training, facts, other, replicas) for other in (half, large))


def _hides_sizes(training: TrainingGraph, facts: Facts) -> bool:
    """Tell whether an op reads what follows a size, and may make something that does not."""
    return any(
        tensor.name in facts.values and tensor.name not in facts.fixed_values
        for node in training.graph.nodes
        if node.op in _MAY_HIDE
        for tensor in node.inputs
    )


def _agree(training: TrainingGraph, facts: Facts, sizes: Mapping[str, int], replicas: int) -> bool:
    try:
        other = infer_facts(training, sizes, replicas)
    except UnsupportedModel:  # a size at which there is no step
        return True
    shapes = all(
        other.shapes.get(name, facts.shape(name)) == facts.shape(name) for name in facts.fixed_shapes
    )
    return shapes and all(
        np.array_equal(other.values.get(name, facts.values[name]), facts.values[name])
        for name in facts.fixed_values
    )
