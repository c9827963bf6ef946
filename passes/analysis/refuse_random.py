"""Refuse what would draw random numbers inside a distributed step.

ONNX Runtime's generators continue their stream from run to run and draw alike on replicas that share
a segment, so neither would N ranks draw what one device draws, nor replicas differ.
"""

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from partc.passes.analysis.facts import Facts
from partc.passes.training_graph import TrainingGraph
from partc.runtime.errors import UnsupportedModel

RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)


def refuse_random(training: TrainingGraph, facts: Facts) -> None:
    """Raise UnsupportedModel at the first node that draws random numbers."""
    for node in training.graph.nodes:
        if node.op in RANDOM or (node.op == "Dropout" and _drops(node, facts.values)):
            raise UnsupportedModel(
                "random numbers drawn inside the step: ranks would not draw what one device draws",
                at=f"node {node.name!r} ({node.op})",
                fix="draw them outside and feed them as a data input, or export the model without dropout",
            )


def _drops(node: gs.Node, values: Mapping[str, object]) -> bool:
    """Tell whether a Dropout is in training mode, as far as is known."""
    if len(node.inputs) < 3 or not node.inputs[2].name:
        return False
    mode = values.get(node.inputs[2].name)
    return mode is None or bool(mode)
