"""The gradient rule of Dropout: it reuses the forward pass's mask, which normalising the graph saw to."""

from collections.abc import Mapping

from partc.compiler.training.rules.forward_node import ForwardNode, Gradients, Rule, of_first_output


def _dropout(at: ForwardNode, dy: str) -> Gradients:
    """dx = mask dy / (1 - ratio); a Dropout that is told at run time not to train drops nothing."""
    scaled = at.op("Mul", dy, _scale(at))
    training = at.x(2)
    if training and training not in at.constants:
        scaled = at.op("Where", training, scaled, dy)
    return {0: at.op("Where", at.y(1), scaled, at.scalar(0, like=at.x(0)))}


def _scale(at: ForwardNode) -> str:
    x, ratio = at.x(0), at.x(1)
    if ratio and ratio not in at.constants:
        kept = at.op("Sub", at.scalar(1, like=ratio), ratio)
        scale = at.op("Reciprocal", kept)
        same = at.types[ratio].element == at.types[x].element
        return scale if same else at.op("Cast", scale, to=at.types[x].element)
    kept_share = 1 - float(at.constants[ratio].item()) if ratio else 0.5
    return at.scalar(1 / kept_share if kept_share else 0.0, like=x)


RULES: Mapping[str, Rule] = {"Dropout": of_first_output(_dropout)}
