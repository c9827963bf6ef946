"""Sparse gradients among those that a training graph names itself.

before   W: dense = ScatterND (zeros, ids, rows)      after   W: dense, ids, rows
"""

from partc.passes.analysis.find_indexed_slices import find_indexed_slices
from partc.passes.drop_unread_nodes import drop_unread_nodes
from partc.passes.training_graph import Gradient, TrainingGraph


def find_recorded_slices(training: TrainingGraph) -> None:
    """Let every recorded gradient that is rows scattered into zeros be indexed slices too."""
    tensors = training.graph.tensors()
    for name, gradient in training.gradients.items():
        assert gradient.dense is not None
        slices = find_indexed_slices(training.graph, tensors[gradient.dense], training.variables[name])
        ids, rows = slices or (None, None)
        training.gradients[name] = Gradient(name, gradient.dense, ids, rows)
    training.graph.toposort()
    drop_unread_nodes(training.graph)
