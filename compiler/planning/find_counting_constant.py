"""Find a constant in a loss that may stand for 1 / the number of samples: nothing in a graph tells.

    loss = 0.025 * sum(squares [8, 5])          1 / 40, so a mean; or a weight, whatever the batch

A weight of 0.01 is 1 / (batch x a whole number) for batches of 2, 4, 5, 10, 20, 25, 50 and 100, and half a
sum is its mean for a batch of 2: so the constant decides nothing, and is shown to the user, who knows.
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.rules.sharding_rules import rule_of

TOLERANCE = 1e-5  # of the constant, which may be of float32, and a product of several


@dataclass(frozen=True, slots=True)
class CountingConstant:
    """What multiplies the sum over samples that is the loss: `factor` = 1 / `count`."""

    factor: float
    count: int

    def describe(self, samples: int) -> str:
        """Return what the user may know better, as a part of a sentence."""
        return f"if {self.factor:.6g} stands for 1 / {self.count} of a batch of {samples}, it is a mean"


def find_counting_constant(training: TrainingGraph, facts: Facts, samples: int) -> CountingConstant | None:
    """Return the constants of the loss, multiplied, where they are 1 / a multiple of `samples`.

    Needs: the batch is of fixed size, and the loss a sum over its samples.
    """
    factor = 1.0
    tensor = training.graph.tensors().get(training.loss or "")
    while isinstance(tensor, gs.Variable) and tensor.inputs:
        operand = _leading_operand(tensor.inputs[0], facts)
        if operand is None:
            break
        tensor, constant = operand
        factor *= constant
    count = round(1 / factor) if factor > 0 else 0
    is_count = count > 1 and count % samples == 0 and abs(factor * count - 1) < TOLERANCE
    return CountingConstant(factor, count) if is_count else None


def _leading_operand(node: gs.Node, facts: Facts) -> tuple[gs.Tensor, float] | None:
    """Return the operand that a node's result is proportional to, and what it is multiplied with."""
    rule = rule_of(node, facts)
    if rule is None or len(rule.terms) != 1:
        return None
    factor, others = 1.0, []
    for index in rule.terms[0]:
        value = _number(node.inputs[index], facts)
        if value is None:
            others.append(index)
        elif value:
            factor *= 1 / value if index in rule.divides else value
    if len(others) != 1 or others[0] in rule.divides or others[0] not in rule.linear:
        return None
    return node.inputs[others[0]], factor


def _number(tensor: gs.Tensor, facts: Facts) -> float | None:
    """Return a constant that is one number."""
    value = tensor.values if isinstance(tensor, gs.Constant) else facts.value(tensor.name)
    return float(np.reshape(value, ())) if value is not None and np.size(value) == 1 else None
