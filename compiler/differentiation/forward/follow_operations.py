"""Hold nodes against the PyTorch operations that they came from, as metadata of dynamo=True tells.

    operation   _native_batch_norm_legit_functional(x, %scale, %bias, %mean, %var, True, 0.1, 1e-05)
    node        y = BatchNormalization (x, scale, bias, mean, var)      by the statistics of batches before
    becomes     y, mean', var' = BatchNormalization <training_mode = 1, momentum = 0.9> (...)

PyTorch 2.13 exports the batch normalisations of a module in training as those of one in evaluation, folds
them into convolutions, and leaves out label smoothing. What is left of the first can be mended; of the
others there is too little.
"""

import re
from collections import Counter

import onnx
from onnx import helper

from partc.compiler.differentiation.forward.expand_ops import names_in
from partc.compiler.differentiation.parameters.exporter_facts import operation_of
from partc.passes.graph.operation_builder import OperationBuilder
from partc.runtime.errors import UnsupportedModel

# Its arguments are tensors, whether the batch's own statistics count, and the share that they are given.
_OF_BATCH = re.compile(r"batch_norm\w*\.(?!no_stats)\w+\]\(args = \((?:(?:%\w+|None), )+True, ([^,]+), ")
_ENTROPY = re.compile(r"\.cross_entropy_loss\.\w+\]\(args = \((.*)\), kwargs = \{(.*)\}\)")
_SMOOTHING = 5  # which of its arguments
_EXPORT = "export with torch.onnx.export(..., optimize=False)"


def follow_operations(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with batch normalisations that train as they do in PyTorch; else itself.

    Raises UnsupportedModel where the file computes something else than the module, and does not tell enough.
    """
    _check_smoothing(model.graph)
    momentum = {
        place: 1 - float(found[1])
        for place, node in enumerate(model.graph.node)
        if (found := _OF_BATCH.search(operation_of(node))) is not None
    }
    if not momentum:
        return model
    training = onnx.ModelProto()
    training.CopyFrom(model)
    graph = training.graph
    normalising = {p: graph.node[p] for p in momentum if graph.node[p].op_type == "BatchNormalization"}
    _check_kept(graph, momentum, {operation_of(node) for node in normalising.values()})
    readers = Counter(name for node in graph.node for name in node.input)
    names = OperationBuilder(names_in(graph))
    for place, node in normalising.items():
        if not any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute):
            _train(node, momentum[place], readers, names)
    return training


def _check_kept(graph: onnx.GraphProto, places: dict[int, float], kept: set[str]) -> None:
    for node in (graph.node[place] for place in places):
        if operation_of(node) not in kept:
            raise UnsupportedModel(
                "the exporter folded a batch normalisation of a module in training into the layer before it",
                at=f"node {node.name!r} ({node.op_type})",
                fix=f"{_EXPORT}, or the module after eval() if it is to be trained without normalisation",
            )


def _train(node: onnx.NodeProto, momentum: float, readers: Counter[str], names: OperationBuilder) -> None:
    shared = [name for name in node.input[3:5] if readers[name] > 1]
    if shared:
        raise UnsupportedModel(
            f"several batch normalisations in training have the running statistics {shared[0]!r}",
            at=f"node {node.name!r} (BatchNormalization)",
            fix=f"{_EXPORT}, which keeps those of each module apart; use each module once",
        )
    kept = [each for each in node.attribute if each.name not in ("training_mode", "momentum")]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(
        (helper.make_attribute("training_mode", 1), helper.make_attribute("momentum", momentum))
    )
    statistics = node.input[len(node.output) + 2 : 5]
    node.output.extend(names.fresh(f"{statistic}.next") for statistic in statistics)


def _check_smoothing(graph: onnx.GraphProto) -> None:
    """Refuse a cross-entropy whose operation smooths labels: the node cannot."""
    of_operation = Counter(operation_of(node) for node in graph.node)
    for node in graph.node:
        if node.op_type != "SoftmaxCrossEntropyLoss" or of_operation[operation_of(node)] > 1:
            continue
        smoothing = _smoothing_of(operation_of(node))
        if smoothing:
            raise UnsupportedModel(
                f"the exporter left out a label smoothing of {smoothing:g}",
                at=f"node {node.name!r} (SoftmaxCrossEntropyLoss)",
                fix=f"write it out: {1 - smoothing:g} * nll_loss(p, labels) - {smoothing:g} * p.mean() "
                "with p = log_softmax(logits, -1)",
            )


def _smoothing_of(operation: str) -> float:
    found = _ENTROPY.search(operation)
    if found is None:
        return 0.0
    arguments, named = found[1].split(", "), re.search(r"label_smoothing: ([^,]+)", found[2])
    return float(named[1] if named else arguments[_SMOOTHING] if len(arguments) > _SMOOTHING else 0)
