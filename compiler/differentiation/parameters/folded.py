"""Decide an initializer that the exporter folded: computed from others, which are gone.

    from constants alone                                masks, rotary tables, eye         constant
    a parameter as its own operation wants it           transposed for MatMul             trained
    a parameter's elements, moved but each still once   permuted, sliced, viewed          trained
    the same, but some may be in other tensors too      w[:3] and w[1:] without w         undecided
    rows of a table, no two of them equal               positions 0 .. n - 1              trained
    anything else of a parameter                        1 + w, exp(A), a row repeated     undecided

Training 1 + w as a variable is not training w: it decays towards another value, and a row that is repeated
for every sample would become one row per sample.
"""

import re
from collections.abc import Collection
from pathlib import Path

import onnx

from partc.compiler.differentiation.parameters.decision import ParameterDecision, constant, trained, undecided
from partc.compiler.differentiation.parameters.exporter_facts import ExporterFacts
from partc.compiler.differentiation.parameters.value_patterns import values_of
from partc.compiler.differentiation.parameters.views import COPYING, PERMUTING, RESHAPING, SLICING

# The exporter names a tensor after the PyTorch operation that makes it, and numbers equal names.
_OPERATION = re.compile(r"^(.*?)(?:_\d+)?$")
_STEP = re.compile(r"^val_\d+$")  # a step of an operation's own translation
REARRANGING_OPERATIONS = RESHAPING | PERMUTING | COPYING | SLICING - {"embedding"}
RECURRENT = frozenset({"GRU", "LSTM", "RNN"})  # their inputs stack the parameters of directions and gates
SINUSOIDS = "parameters to the exporter, but with a sinusoid's values, as frozen position tables have"
SHARED = "copies or parts of one parameter, by values that do not tell which: trained, each goes its own way"
MERGED = "one tensor for parameters, or parts of one, that were equal: trained, they would be tied"
REARRANGED = "parameters, as the exporter stored them: transposed, reordered or in part"


def decide_folded(facts: ExporterFacts, tensor: onnx.TensorProto, folder: Path | None) -> ParameterDecision:
    """Decide a tensor that was folded from others, all of which are known by name."""
    sources = facts.folded_from[tensor.name]
    parameters = facts.parameters_in(sources)
    if not parameters:
        return constant("folded by the exporter from constants alone")
    source = ", ".join(parameters)
    if not is_rearranged(facts, tensor, parameters, folder):
        return undecided(
            "computed by the exporter from parameters: training these is not training those", source
        )
    if values_of(tensor, folder).is_sinusoids:
        return undecided(SINUSOIDS, source)
    if tensor.name in facts.undecided:
        return undecided(facts.undecided[tensor.name], source)
    return trained(REARRANGED, source)


def is_rearranged(
    facts: ExporterFacts, tensor: onnx.TensorProto, parameters: Collection[str], folder: Path | None
) -> bool:
    """Tell whether each element is one of the parameters', and no element of those is there twice."""
    others = facts.folded_from[tensor.name].difference(parameters)
    is_own = facts.read_beside(tensor.name).issuperset(parameters)  # the operation reads the parameters
    if is_own and facts.readers[tensor.name] <= RECURRENT:
        return True
    is_step = all(map(_STEP.match, (tensor.name, *others)))
    if is_own and is_step and len(parameters) == 1:
        return True
    if len(parameters) > 1:
        return False
    if {_operation(name) for name in (tensor.name, *others)} - {""} <= REARRANGING_OPERATIONS and not is_step:
        return True
    return _operation(tensor.name) == "embedding" and not values_of(tensor, folder).has_equal_rows


def operations_of(facts: ExporterFacts, name: str) -> frozenset[str]:
    """Return the PyTorch operations between a parameter and what was folded from it alone.

    Empty where some are not known: where the tensor is itself a step of a translation.
    """
    if _STEP.match(name):
        return frozenset()
    sources = facts.folded_from.get(name, frozenset())
    made = sources.difference(facts.parameters_in(sources))
    return frozenset(_operation(tensor) for tensor in (name, *made)) - {""}


def is_view_name(name: str) -> bool:
    """Tell whether the exporter gives this name to what an operation only rearranges."""
    return _operation(name) in RESHAPING | PERMUTING | SLICING


def _operation(name: str) -> str:
    """Return the PyTorch operation that a tensor is named after, empty for a step of a translation."""
    if _STEP.match(name):
        return ""
    match = _OPERATION.match(name)
    assert match is not None
    return match.group(1)
