"""Tell whether the way forward makes something of a whole batch, such as a batch normalisation's means.

Windows over the samples' axis are such: micro-batches have no neighbours whose entries they could read.

    micro-batch 0   Conv ──┐
    micro-batch 1   Conv ──┴── mean ── Sub of 0, Sub of 1      none goes ahead of the others

Micro-batches wait for each other there, so that a pipeline's stages do too: dividing a batch hides nothing.
"""

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.layouts.decide_layouts import decide_by_rule
from partc.passes.layouts.layouts import Placement, Replicate, Split
from partc.passes.layouts.place_nodes import find_mixed
from partc.passes.rules.sharding_rules import node_facts
from partc.passes.search.operators.forward_nodes import forward_nodes

HALVES = 2  # any number of micro-batches tells it


def is_batch_wide(analysis: Analysis) -> bool:
    """Tell whether parts of what layers make are read forward together with what is made of all of it."""
    forward = forward_nodes(analysis.training, analysis.main)
    layers = find_mixed(forward, analysis.training)
    of_all: set[str] = set()  # tensors that are made of a whole batch, by layers
    for node, parts, wholes in _read(analysis, forward):
        made = [tensor for tensor in wholes if tensor.inputs and tensor.inputs[0].name in layers]
        if made or any(tensor.name in of_all for tensor in node.inputs):
            if parts:
                return True
            of_all.update(tensor.name for tensor in node.outputs)
    return False


def _read(
    analysis: Analysis, forward: list[gs.Node]
) -> Iterator[tuple[gs.Node, list[gs.Tensor], list[gs.Tensor]]]:
    """Yield nodes, what each makes in parts, and what it reads whole of what there is in parts."""
    placed: dict[str, Placement] = {
        entry.name: Split(entry.sample_axis)
        for entry in analysis.training.data_inputs.values()
        if entry.sample_axis is not None
    }
    for node in forward:
        read = [placed.get(tensor.name, Replicate()) for tensor in node.inputs]
        facts = node_facts(node, analysis.facts, analysis.zeros)
        decision = decide_by_rule(facts, read, HALVES)
        placed.update(
            (tensor.name, placement) for tensor, placement in zip(node.outputs, decision.outputs, strict=True)
        )
        operands = zip(node.inputs, read, decision.inputs, strict=True)
        wholes = [
            tensor
            for tensor, own, wanted in operands
            if isinstance(wanted, Replicate) and not isinstance(own, Replicate)
        ]
        yield node, [t for t in node.outputs if isinstance(placed[t.name], Split)], wholes
