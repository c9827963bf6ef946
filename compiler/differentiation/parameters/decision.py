"""What is decided about one float tensor of a forward graph, and why."""

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Whether a gradient updates a tensor."""

    TRAINED = "trained"
    CONSTANT = "constant"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class ParameterDecision:
    """A verdict. Tensors of one `reason` are told together; `source` is what this one was made from."""

    verdict: Verdict
    reason: str
    source: str = ""


def trained(reason: str, source: str = "") -> ParameterDecision:
    """Return the decision to train."""
    return ParameterDecision(Verdict.TRAINED, reason, source)


def constant(reason: str, source: str = "") -> ParameterDecision:
    """Return the decision to leave a tensor as it is."""
    return ParameterDecision(Verdict.CONSTANT, reason, source)


def undecided(reason: str, source: str = "") -> ParameterDecision:
    """Return that nothing in the file tells: whoever made it must."""
    return ParameterDecision(Verdict.UNDECIDED, reason, source)
