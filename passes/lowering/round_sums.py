"""Let sums of gradients be rounded to 16 bits before they are sent.

before   dW ── AllReduce ── dW                        after   dW ── AllReduce <rounds_to = bfloat16> ── dW
         dV ── Push ── dV, owned                              dV ── Push <rounds_to = bfloat16> ── dV, owned

A sum is a gradient's where what is made of its terms, until they are added up, ends in gradients alone, or
is made of these. A batch's statistics, sums of activations, losses and norms are none, whatever
their shape; nor is a gradient that the backward pass reads on. Of small ones rounding would save nothing.
"""

from collections.abc import Collection
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.reachability import readers_of
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.layouts import REPLICAS, WORKER, Partial
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.runtime.plan.program import Rounding

LEAST_ELEMENTS = 1024


def round_sums(
    lowered: LoweredGraph, training: TrainingGraph, facts: Facts, main: Collection[str], rounding: Rounding
) -> None:
    """Mark the sums of gradients float32[shape]. Needs `native` and `decisions`. `main`: as roles tell."""
    gradients = _terms_of_gradients(lowered, training, main)
    for node in lowered.nodes:
        if node.op not in ("AllReduce", "Push") or node.attrs.get("site", WORKER) != WORKER:
            continue
        tensor, _ = lowered.meanings.get(node.outputs[0].name, (None, None))
        is_sum = (node.attrs.get("reduction") or "sum") == "sum"
        if tensor not in gradients or tensor not in facts.fixed_shapes or not is_sum:
            continue
        if np.dtype(node.inputs[0].dtype) == np.float32 and prod(facts.shape(tensor)) >= LEAST_ELEMENTS:
            node.attrs["rounds_to"] = rounding


def _terms_of_gradients(
    lowered: LoweredGraph, training: TrainingGraph, main: Collection[str]
) -> frozenset[str]:
    """Return the gradients, what becomes nothing else before it is summed, and what is made of these."""
    nodes = training.graph.nodes
    dense = {gradient.dense for gradient in training.gradients.values()}
    readers = readers_of(nodes)
    found: set[str] = set()

    def ends_in_gradients(name: str) -> bool:
        behind = [nodes[place] for place in readers.get(name, ())]
        if name in dense:
            behind = [reader for reader in behind if reader.name in main]
        elif not behind or name in training.results:
            return False
        made = {result.name for reader in behind for result in reader.outputs}
        return made <= found and all(
            name in _terms_read(lowered, reader) or _adds(reader, name) for reader in behind
        )

    for node in reversed(nodes):
        found.update(result.name for result in node.outputs if ends_in_gradients(result.name))
    for node in nodes:
        terms = _terms_read(lowered, node)
        if node.name not in main and terms and found.issuperset(terms):
            found.update(result.name for result in node.outputs)
    return frozenset(found)


def _terms_read(lowered: LoweredGraph, node: gs.Node) -> set[str]:
    """Return the operands that a node takes partial."""
    return {
        tensor.name
        for tensor, layout in zip(node.inputs, lowered.decisions[node.name].inputs, strict=True)
        if isinstance(layout.along(REPLICAS), Partial)
    }


def _adds(node: gs.Node, name: str) -> bool:
    """Tell whether a node adds others to a tensor, summed as it is: rows to a tied table's dense gradient."""
    if node.op == "ScatterND":
        return bool(node.attrs.get("reduction") == "add" and node.inputs[0].name == name)
    return node.op in ("Add", "Sum")
