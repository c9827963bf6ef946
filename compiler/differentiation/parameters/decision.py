"""What is decided about each float tensor of a forward graph and why, and what a user is told of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from partc.compiler.differentiation.tensor_types import Types, element_count
from partc.compiler.report.units import count, first_words, plural, size


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


MAX_NAMES = 4  # that a line lists
PLAIN = str.maketrans({"\u00a0": " "})  # a terminal breaks no line here


def describe_choice(types: Types, decisions: Mapping[str, ParameterDecision]) -> list[str]:
    """Return lines about the tensors that move the loss."""
    lines = []
    for verdict, noun in ((Verdict.TRAINED, "parameter"), (Verdict.CONSTANT, "tensor")):
        matching = {name: d for name, d in decisions.items() if d.verdict is verdict}
        if not matching:
            continue
        sizes = [_elements(types, name) for name in matching]
        stored_bytes = sum(n * types[name].dtype.itemsize for n, name in zip(sizes, matching, strict=True))
        total = f"{plural(len(matching), noun)}, {plural(sum(sizes), 'element')}, {size(stored_bytes)}"
        lines.append(f"{verdict.value}: {total}")
        lines += [
            f"  {count(len(names))} {reason}: {first_words(names, MAX_NAMES)}"
            for reason, names in _groups(matching)
        ]
    return [line.translate(PLAIN) for line in lines]


def _groups(decisions: Mapping[str, ParameterDecision]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        groups.setdefault(decision.reason, []).append(_with_source(name, decision))
    return list(groups.items())


def _with_source(name: str, decision: ParameterDecision) -> str:
    return f"{name} (of {decision.source})" if decision.source else name


def _elements(types: Types, name: str) -> int:
    return element_count(n if isinstance(n, int) else 0 for n in types[name].shape or ())
