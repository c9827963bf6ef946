"""What torch.onnx.export(dynamo=True) says of a graph's tensors in metadata.

    graph          the signature of the exported program: PARAMETER, BUFFER, .. and its name in the module
    value_info     of an initializer: what kind of input it was, or what it was folded from
    node           the PyTorch operation that it came from, with the parameters that this one reads; detach

Older exporters, and those of other frameworks, say none of it.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_OPERATION = "pkg.torch.onnx.fx_node"
# "p_head_weight: PARAMETER target='head.weight'", one line per input of the exported program
_INPUT = re.compile(r"^(\w+): (\w+) target='([^']*)'", re.MULTILINE)
_DETACH = "torch.ops.aten.detach."
_DETACHED = re.compile(r"^detach(_\d+)?$")
_READ = re.compile(r"%(\w+)")


@dataclass(frozen=True, slots=True)
class ExporterFacts:
    """What an exporter said. All maps are empty where it said nothing."""

    kinds: Mapping[str, str]  # initializer -> PARAMETER, BUFFER, CONSTANT_TENSOR
    folded_from: Mapping[str, frozenset[str]]  # initializer -> all tensors that it was computed from
    targets: Mapping[str, str]  # a parameter's name inside the exported program -> in the module
    operations: Mapping[
        str, tuple[str, ...]
    ]  # initializer -> what the operations that read it read, in order
    readers: Mapping[str, frozenset[str]]  # initializer -> the types of the nodes that read it
    detached: frozenset[str]  # tensors that no gradient passes
    lost_detached: Mapping[str, tuple[str, ...]]  # of those that are gone: which nodes' outputs read them

    @property
    def is_silent(self) -> bool:
        """Tell whether the exporter left no signature."""
        return not self.targets and not self.kinds

    def parameters_in(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of the names that are parameters of the module."""
        parameters = set(self.targets.values()) | {n for n, kind in self.kinds.items() if kind == "PARAMETER"}
        return tuple(sorted(parameters.intersection(names)))

    def read_beside(self, name: str) -> frozenset[str]:
        """Return the parameters that the operations read which read this initializer now."""
        return frozenset(self.targets[x] for x in self.operations.get(name, ()) if x in self.targets)


def exporter_facts(model: onnx.ModelProto) -> ExporterFacts:
    """Read the metadata of a forward model, as it came from the exporter."""
    graph = model.graph
    signature = _entry(graph.metadata_props, _SIGNATURE)
    inputs = _INPUT.findall(signature)
    initializers = {tensor.name for tensor in graph.initializer}
    kinds, folded = {}, {}
    for value in graph.value_info:
        if value.name not in initializers:
            continue
        if kind := _entry(value.metadata_props, _KIND):
            kinds[value.name] = kind
        if sources := _entry(value.metadata_props, _FOLDED_FROM):
            folded[value.name] = _names(sources)
    targets = {inner: target for inner, kind, target in inputs if kind == "PARAMETER"}
    operations: dict[str, tuple[str, ...]] = {}
    readers: dict[str, frozenset[str]] = {}
    for node in graph.node:
        for name in initializers.intersection(node.input):
            operations[name] = (*operations.get(name, ()), *_reads(node))
            readers[name] = readers.get(name, frozenset()) | {node.op_type}
    detached, merged = _find_detached(graph)
    return ExporterFacts(kinds, folded, targets, operations, readers, detached, merged)


def merged_parameters(facts: ExporterFacts, graph: onnx.GraphProto) -> dict[str, tuple[str, ...]]:
    """Return the parameters of the module that an initializer stands for beside the one it is named after.

    The exporter makes one initializer of equal values (of all LayerNorm scales, at first). A node that reads
    it came from an operation which read another parameter at that place, and this one is nowhere else.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    folded = frozenset().union(*facts.folded_from.values())
    missing_targets = set(facts.targets.values()) - initializers - folded
    merged: dict[str, set[str]] = {}
    for node in graph.node if missing_targets else ():
        candidates = [
            facts.targets[name]
            for name in _reads(node)
            if facts.targets.get(name, "") in missing_targets | initializers
        ]
        parameters = [name for name in node.input if facts.kinds.get(name) == "PARAMETER"]
        if len(candidates) != len(parameters):
            continue
        for name, original in zip(parameters, candidates, strict=True):
            if original in missing_targets:
                merged.setdefault(name, set()).add(original)
    return {name: tuple(sorted(others)) for name, others in merged.items()}


def _find_detached(graph: onnx.GraphProto) -> tuple[frozenset[str], dict[str, tuple[str, ...]]]:
    """Return what PyTorch's detach made, and where it is gone: the optimiser drops its Identity."""
    node_outputs = {name for node in graph.node for name in node.output}
    detached: set[str] = set()
    merged: dict[str, tuple[str, ...]] = {}
    for node in graph.node:
        if node.op_type == "Identity" and _DETACH in _entry(node.metadata_props, _OPERATION):
            detached.add(node.output[0])
        for name in _reads(node):
            if _DETACHED.match(name) and name not in node_outputs:
                merged[name] = (*merged.get(name, ()), node.output[0])
    return frozenset(detached), merged


def _reads(node: onnx.NodeProto) -> list[str]:
    """Return what a node's PyTorch operation reads; its own result comes first in the text."""
    return _READ.findall(_entry(node.metadata_props, _OPERATION))[1:]


def _entry(entries: Iterable[onnx.StringStringEntryProto], key: str) -> str:
    return next((entry.value for entry in entries if entry.key == key), "")


def _names(text: str) -> frozenset[str]:
    """Read the text of a Python list of names; anything else tells nothing."""
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return frozenset()
    return (
        frozenset(names)
        if isinstance(names, list) and all(isinstance(n, str) for n in names)
        else frozenset()
    )
