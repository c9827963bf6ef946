"""Take a model out of training: nothing is dropped, batches are normalised by running statistics.

before   centred ── BatchNormalization (scale, bias, 0, variance of the batch)     running' = m running + ...
after    x ──────── BatchNormalization (scale, bias, running mean, running variance)
"""

from collections.abc import Mapping

import onnx

_SHAPING = ("Reshape", "Unsqueeze", "Cast")


def leave_training(model: onnx.ModelProto, state: Mapping[str, str]) -> None:
    """Let a step's forward part compute as in evaluation, in place. `state`: variable -> its next value.

    The statistics of a batch are known by the variables that they renew (rules/normalization.py).
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    renewed = _renewed(makers, state)
    for node in model.graph.node:
        if node.op_type == "Dropout":
            del node.input[1:]
        elif node.op_type == "BatchNormalization":
            _normalise_as_before(node, makers, renewed)


def _normalise_as_before(
    node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], renewed: Mapping[str, str]
) -> None:
    """Let a normalisation read running statistics, which it or nodes beside it renew."""
    for attribute in node.attribute:
        if attribute.name == "training_mode":
            attribute.i = 0
    del node.output[1:]
    centred, variance = makers.get(node.input[0]), renewed.get(node.input[4])
    if centred is None or variance is None or centred.op_type != "Sub":
        return
    mean = centred.input[1]
    while mean not in renewed and mean in makers and makers[mean].op_type in _SHAPING:
        mean = makers[mean].input[0]
    if mean in renewed:
        node.input[0] = centred.input[0]
        node.input[3:] = [renewed[mean], variance]


def _renewed(makers: Mapping[str, onnx.NodeProto], state: Mapping[str, str]) -> dict[str, str]:
    """Return statistic -> the variable that is a running average of it: m variable + (1 - m) statistic."""
    renewed: dict[str, str] = {}
    for variable, following in state.items():
        total = makers.get(following)
        if total is None or total.op_type != "Add":
            continue
        terms = [makers[name] for name in total.input if name in makers and makers[name].op_type == "Mul"]
        if len(terms) == 2 and variable in terms[0].input:
            renewed[terms[1].input[0]] = variable
    return renewed
