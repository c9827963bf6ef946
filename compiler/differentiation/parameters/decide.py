"""Decide which float tensors of a forward graph are parameters and which are constants.

The first line that knows something decides. What none knows is undecided: whoever made the file must say.

    exporter       its signature: PARAMETER, BUFFER; what an initializer was folded from
    kind of file   TorchScript stores parameters and buffers by name, and numbers as nodes
    values         infinite or huge: a mask
    structure      where it meets data: as a layer's weight, or merely beside it
                   - unless its values look like none that a weight starts from
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from partc.compiler.differentiation.parameters.decision import ParameterDecision, constant, trained, undecided
from partc.compiler.differentiation.parameters.exporter_facts import (
    FOLDED_BY_TORCHSCRIPT,
    ExporterFacts,
    exporter_facts,
    is_torchscript,
)
from partc.compiler.differentiation.parameters.find_parameters import MAKERS
from partc.compiler.differentiation.parameters.folded import SINUSOIDS, decide_folded
from partc.compiler.differentiation.parameters.places import DataUse, DataUses
from partc.compiler.differentiation.parameters.value_patterns import TensorValues, values_of
from partc.compiler.differentiation.tensor_types import TensorType, Types, element_count


@dataclass(frozen=True)
class _Evidence:
    """What there is to decide by."""

    facts: ExporterFacts
    places: DataUses
    folder: Path | None
    is_torchscript: bool


def decide_parameters(
    forward: onnx.ModelProto,
    graph: onnx.GraphProto,
    types: Types,
    candidates: Collection[str],
    folder: Path | None = None,
) -> dict[str, ParameterDecision]:
    """Decide each candidate, a float tensor that comes from no input.

    `forward` is the model as the exporter wrote it, `graph` its normalised graph, with `types`; external
    data lies in `folder`.
    """
    facts = exporter_facts(forward)
    uses = DataUses(graph, types, candidates)
    evidence = _Evidence(facts, uses, folder, is_torchscript(forward, facts))
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    candidate_names = frozenset(candidates)
    makers = {name: node for node in graph.node for name in node.output if name in candidate_names}
    return {
        name: _decide_initializer(evidence, initializers[name])
        if name in initializers
        else _decide_generated(evidence, makers[name], types[name], name)
        for name in candidates
    }


def _decide_initializer(evidence: _Evidence, tensor: onnx.TensorProto) -> ParameterDecision:
    """Decide an initializer."""
    if (decision := _by_exporter(evidence, tensor)) is not None:
        return decision
    values, uses = values_of(tensor, evidence.folder), evidence.places.of(tensor.name)
    is_number = element_count(tensor.dims) == 1 and DataUse.WEIGHT not in uses
    if evidence.is_torchscript and is_number and not tensor.name.startswith(FOLDED_BY_TORCHSCRIPT):
        # As numbers they would be nodes: these are attributes of the module, which may be buffers.
        return undecided("single numbers that the module holds: parameters or buffers")
    if not tensor.dims:
        return constant("numbers without axes")
    if values.is_mask:
        return constant("masks: infinite or huge values")
    return _decide_by_place(uses, values)


def _by_exporter(evidence: _Evidence, tensor: onnx.TensorProto) -> ParameterDecision | None:
    """Return what the exporter's metadata says; None if nothing."""
    facts, name = evidence.facts, tensor.name
    kind = facts.kinds.get(name, "")
    if kind == "PARAMETER":
        is_table = len(tensor.dims) == 2 and values_of(tensor, evidence.folder).is_sinusoids
        return undecided(SINUSOIDS) if is_table else trained("parameters, as the exporter says")
    if kind:
        return constant("buffers and constants, as the exporter says")
    if name in facts.folded_from:
        return decide_folded(facts, tensor, evidence.folder)
    if name in facts.undecided:
        return undecided(facts.undecided[name])
    return None


def _decide_generated(
    evidence: _Evidence, maker: onnx.NodeProto, type_: TensorType, name: str
) -> ParameterDecision:
    """Decide what a node makes of nothing: partc's models and old ones draw their parameters so."""
    assert maker.op_type in MAKERS
    if not evidence.facts.is_silent or evidence.is_torchscript:
        return constant("made by nodes: PyTorch's exporter stores parameters")
    if maker.op_type != "ConstantOfShape":
        return trained("drawn by nodes")
    fill = next((attribute.t for attribute in maker.attribute if attribute.name == "value"), None)
    value = 0.0 if fill is None else float(numpy_helper.to_array(fill).item())
    shape = tuple(size if isinstance(size, int) else 0 for size in type_.shape or ())
    values = TensorValues(np.full(1, value), shape)
    if values.is_mask:
        return constant("masks: infinite or huge values")
    return _decide_by_place(evidence.places.of(name), values)


def _decide_by_place(uses: frozenset[DataUse], values: TensorValues) -> ParameterDecision:
    """Decide by where a tensor meets data, and by what its values look like."""
    is_weight = not uses.isdisjoint((DataUse.WEIGHT, DataUse.BIAS))
    is_bias = DataUse.BIAS in uses and len(values.shape) == 1
    pattern = "" if is_bias else values.weight_pattern if is_weight else values.pattern
    if pattern:
        return undecided(f"values like {pattern}: constants, or a parameter's start")
    if is_weight:
        return trained("read as weights, tables, scales or biases")
    if DataUse.VECTOR in uses:
        return trained("as wide as one axis of what layers made, like scales and biases")
    if DataUse.ARRAY in uses or DataUse.JOINED in uses:
        if values.are_distinct:
            return trained("of distinct values, beside what layers made")
        return undecided("of repeated values, beside what layers made: constants, or parameters")
    if DataUse.PER_SAMPLE in uses:
        return undecided("with an entry for every sample: targets or weights of samples, or parameters")
    if DataUse.RAW in uses:
        return undecided("beside data that no layer has touched: its normalisation, or parameters")
    return undecided("read as parameters and constants are alike")
