"""Expand CastLike to Cast: its second operand lends its type alone, not its place in the cluster.

before   y = CastLike (x, batch)        after   y = Cast <to = type of batch> (x)
"""

from onnx import helper

from partc.passes.analysis.facts import Facts
from partc.passes.training_graph import TrainingGraph


def expand_casts(training: TrainingGraph, facts: Facts) -> None:
    """Replace every CastLike of the graph."""
    for node in training.graph.nodes:
        if node.op == "CastLike":
            node.op = "Cast"
            node.attrs = {"to": helper.np_dtype_to_tensor_dtype(facts.dtypes[node.outputs[0].name])}
            node.inputs = [node.inputs[0]]
