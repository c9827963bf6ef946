"""Refuse what a file lost of the PyTorch module, where its metadata tells that, and no more than that."""

import re
from collections.abc import Iterator

import onnx

from partc.compiler.differentiation.operations.operation_rewriting import (
    nodes_by_operation,
    number_given,
)
from partc.compiler.differentiation.parameters.exporter_facts import (
    UNOPTIMISED,
    exporter_facts,
    operation_of,
    tensors_read,
)
from partc.runtime.errors import UnsupportedModel

_BY_FREQUENCY = re.compile(r"\.embedding\.\w+\]\(args = \(%\w+, %\w+, -?\d+, True")
_RENORMALISED = ".embedding_renorm."
_DRAWN = re.compile(
    r"^(bernoulli|multinomial|normal|poisson|rand|randn|rand_like|randn_like|uniform)(_\d+)?$"
)


def refuse_lost(graph: onnx.GraphProto) -> None:
    """Raise UnsupportedModel for what a module does in training, and the file does not."""
    for node, what, fix in _lost(graph):
        raise UnsupportedModel(what, at=f"node {node.name!r} ({node.op_type})", fix=fix)


def refuse_lost_buffers(model: onnx.ModelProto) -> None:
    """Raise UnsupportedModel for a buffer that the module renews at every step, and the file does not."""
    for name in exporter_facts(model).lost_buffers:
        raise UnsupportedModel(
            f"the module renews its buffer {name!r} at every step, which the exporter left out",
            at=f"the signature of the exported program: BUFFER_MUTATION of {name!r}",
            fix=f"{UNOPTIMISED}; if that has lost it, too, give the buffer what is not detached, and detach "
            "it where it is read",
        )


def _lost(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, str, str]]:
    """Yield nodes, what they lost, and what can be done."""
    stored = {tensor.name for tensor in graph.initializer}
    of_operation = {text: len(places) for text, places in nodes_by_operation(graph).items()}
    for node in graph.node:
        operation = operation_of(node)
        is_alone = of_operation.get(operation, 1) == 1
        if (
            node.op_type == "SoftmaxCrossEntropyLoss"
            and is_alone
            and (share := number_given(operation, "cross_entropy_loss", 5, "label_smoothing"))
        ):
            yield (
                node,
                f"the exporter left out a label smoothing of {share:g}",
                f"write it out: {1 - share:g} * nll_loss(p, labels) - {share:g} * p.mean() "
                "with p = log_softmax(logits, -1)",
            )
        if _BY_FREQUENCY.search(operation):
            yield (
                node,
                "the gradient of an embedding is to be divided by how often a step reads each row, "
                "which ONNX does not say",
                "export it without scale_grad_by_freq",
            )
        if _RENORMALISED in operation:
            yield (
                node,
                "rows of an embedding are to be scaled down to max_norm where they are stored, "
                "which the exporter left out",
                "export it without max_norm; write the scaling of what is read out, if it is to be trained",
            )
        drawn = [name for name in tensors_read(node) if _DRAWN.match(name) and name in stored]
        if drawn:
            yield node, f"the exporter drew {drawn[0]!r} once, and stored it", UNOPTIMISED
