"""Batch normalisations of a module in training: by their own batch, whose statistics are kept.

The exporter writes them as those of one in evaluation, and folds these into convolutions.
"""

import re
from collections import Counter
from functools import partial

import onnx
from onnx import helper

from partc.compiler.differentiation.operations.operation_rewriting import OperationRewriting
from partc.compiler.differentiation.parameters.exporter_facts import UNOPTIMISED, operation_of
from partc.passes.graph.operation_builder import OperationBuilder
from partc.runtime.errors import UnsupportedModel

# Its arguments are tensors, whether the batch's own statistics count, and the share that they are given.
_OF_BATCH = re.compile(r"batch_norm\w*\.(?!no_stats)\w+\]\(args = \((?:(?:%\w+|None), )+True, ([^,]+), ")


def train_normalisations(graph: onnx.GraphProto) -> dict[int, OperationRewriting]:
    """Return how nodes at places become normalisations in training. Raises UnsupportedModel."""
    momentum = {
        place: 1 - float(found[1])
        for place, node in enumerate(graph.node)
        if (found := _OF_BATCH.search(operation_of(node))) is not None
    }
    normalising = {p: graph.node[p] for p in momentum if graph.node[p].op_type == "BatchNormalization"}
    _check_kept(graph, momentum, {operation_of(node) for node in normalising.values()})
    readers = Counter(name for node in graph.node for name in node.input)
    waiting = {place: node for place, node in normalising.items() if not _is_training(node)}
    for node in waiting.values():
        _check_own_statistics(node, readers)
    return {place: partial(_train, momentum=momentum[place]) for place in waiting}


def _is_training(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute)


def _check_kept(graph: onnx.GraphProto, places: dict[int, float], kept: set[str]) -> None:
    for node in (graph.node[place] for place in places):
        if operation_of(node) not in kept:
            raise UnsupportedModel(
                "the exporter folded a batch normalisation of a module in training into the layer before it",
                at=f"node {node.name!r} ({node.op_type})",
                fix=f"{UNOPTIMISED}, or the module after eval() if it is to be trained without normalisation",
            )


def _check_own_statistics(node: onnx.NodeProto, readers: Counter[str]) -> None:
    shared = [name for name in node.input[3:5] if readers[name] > 1]
    if shared:
        raise UnsupportedModel(
            f"several batch normalisations in training have the running statistics {shared[0]!r}",
            at=f"node {node.name!r} (BatchNormalization)",
            fix=f"{UNOPTIMISED}, which keeps those of each module apart; use each module once",
        )


def _train(node: onnx.NodeProto, names: OperationBuilder, momentum: float) -> list[onnx.NodeProto]:
    kept = [each for each in node.attribute if each.name not in ("training_mode", "momentum")]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(
        (helper.make_attribute("training_mode", 1), helper.make_attribute("momentum", momentum))
    )
    statistics = node.input[len(node.output) + 2 : 5]
    node.output.extend(names.fresh(f"{statistic}.next") for statistic in statistics)
    return [node]
