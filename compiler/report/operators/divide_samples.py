"""Which nodes divide samples along the axis of replicas, and which another dimension of theirs.

    x (samples) ── Conv ──> samples ── ... ── Gemm, out:1 along data ──> columns ── Relu ──> columns

Who divides samples there has its variables whole. So what reads a part of a variable divides something else,
and so does what reads a tensor in parts that such a node makes or reads.
"""

from collections.abc import Collection, Iterable, Mapping

import onnx_graphsurgeon as gs

from partc.passes.layouts.decide_layouts import Decision
from partc.passes.layouts.layouts import REPLICAS, Split


def nodes_without_samples(
    nodes: Iterable[gs.Node], decisions: Mapping[str, Decision], variables: Collection[str]
) -> frozenset[str]:
    """Return the names of the nodes, in an order in which they can run, that divide no samples there."""
    names: set[str] = set()
    others: set[tuple[str, Split]] = set()  # tensors and how they are split, where that is of no samples
    for node in nodes:
        decision = decisions.get(node.name)
        if decision is None or not decision.axes:
            continue
        along = decision.axes[REPLICAS]
        read, made = (
            {
                (tensor.name, place)
                for tensor, place in zip(tensors, places, strict=False)
                if type(place) is Split
            }
            for tensors, places in ((node.inputs, along.inputs), (node.outputs, along.outputs))
        )
        if any(name in variables or (name, place) in others for name, place in read):
            names.add(node.name)
            others |= read | made
    return frozenset(names)
