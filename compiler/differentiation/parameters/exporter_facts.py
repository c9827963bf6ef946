"""What torch.onnx.export(dynamo=True) says of a graph's tensors in metadata.

    graph          the signature of the exported program: PARAMETER, BUFFER, .. and its name in the module;
                   which results are the next values of buffers
    value_info     of an initializer: what kind of input it was, or what it was folded from
    node           the PyTorch operation that it came from, with the parameters that this one reads; detach

Older exporters, and those of other frameworks, say none of it.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx
from onnx import helper

FOLDED_BY_TORCHSCRIPT = "onnx::"  # what a name begins with that no tensor of the module has
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
UNOPTIMISED = "export with torch.onnx.export(..., optimize=False)"
UNDECIDED = "partc.undecided"  # why nothing tells whether an initializer is a parameter of its own
_SCOPES = "pkg.torch.onnx.name_scopes"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_OPERATION = "pkg.torch.onnx.fx_node"
# "p_head_weight: PARAMETER target='head.weight'", one line per input of the exported program
_INPUT = re.compile(r"^(\w+): (\w+) target='([^']*)'", re.MULTILINE)
# "div: BUFFER_MUTATION target='norm.u'", one line for every buffer that the module renews
_RENEWED = re.compile(r"^(\w+): BUFFER_MUTATION target='([^']*)'", re.MULTILINE)
_NAMED = re.compile(r"^(\w+): ", re.MULTILINE)
_RESULT = re.compile(r"^(\w+): USER_OUTPUT", re.MULTILINE)
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
    undecided: Mapping[str, str]  # initializer -> why it may be no parameter, or more than one
    lost_detached: Mapping[str, tuple[str, ...]]  # of those that are gone: which nodes' outputs read them
    renewed: Mapping[str, str]  # buffers -> their next values, but for running statistics of batches
    lost_buffers: tuple[str, ...]  # such as the module renews, whose value or next value is gone

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
    kinds, folded, undecided = {}, {}, {}
    for value in graph.value_info:
        if value.name not in initializers:
            continue
        if kind := _entry(value.metadata_props, KIND):
            kinds[value.name] = kind
        if sources := _entry(value.metadata_props, FOLDED_FROM):
            folded[value.name] = _names(sources)
        if reason := _entry(value.metadata_props, UNDECIDED):
            undecided[value.name] = reason
    targets = {inner: target for inner, kind, target in inputs if kind == "PARAMETER"}
    operations: dict[str, tuple[str, ...]] = {}
    readers: dict[str, frozenset[str]] = {}
    for node in graph.node:
        for name in initializers.intersection(node.input):
            operations[name] = (*operations.get(name, ()), *tensors_read(node))
            readers[name] = readers.get(name, frozenset()) | {node.op_type}
    detached, merged = _find_detached(graph)
    renewed, lost_buffers = _find_renewed(graph, signature, frozenset().union(*folded.values()))
    detached |= {following for name, following in renewed.items() if _is_read_whole(graph, name)}
    return ExporterFacts(
        kinds,
        folded,
        targets,
        operations,
        readers,
        frozenset(detached),
        undecided,
        merged,
        renewed,
        lost_buffers,
    )


def is_torchscript(model: onnx.ModelProto, facts: ExporterFacts) -> bool:
    """Tell whether torch.onnx.export(dynamo=False) wrote the model: it leaves no metadata."""
    return model.producer_name == "pytorch" and facts.is_silent


def _find_detached(graph: onnx.GraphProto) -> tuple[set[str], dict[str, tuple[str, ...]]]:
    """Return what PyTorch's detach made, and where it is gone: the optimiser drops its Identity."""
    node_outputs = {name for node in graph.node for name in node.output}
    detached: set[str] = set()
    merged: dict[str, tuple[str, ...]] = {}
    for node in graph.node:
        if _is_detach(node):
            detached.add(node.output[0])
        for name in tensors_read(node):
            if _DETACHED.match(name) and name not in node_outputs:
                merged[name] = (*merged.get(name, ()), node.output[0])
    return detached, merged


def _find_renewed(
    graph: onnx.GraphProto, signature: str, folded: frozenset[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the buffers that the module renews: those with their next values, and those without."""
    made = {name for node in graph.node for name in node.output}
    of_batches = {x for node in graph.node if node.op_type == "BatchNormalization" for x in node.input[3:5]}
    read = {tensor.name for tensor in graph.initializer} - of_batches
    renewed = {target: result for result, target in _RENEWED.findall(signature) if target in read | folded}
    lost = tuple(name for name, result in renewed.items() if name in folded or result not in made)
    return {name: result for name, result in renewed.items() if name not in lost}, lost


def _is_read_whole(graph: onnx.GraphProto, buffer: str) -> bool:
    """Tell whether a buffer is read as it is: then its next value passes no gradient in PyTorch, where the
    step after would go back through a graph that is gone. What is detached when it is read may pass one.
    """
    return any(buffer in node.input and not _is_detach(node) for node in graph.node)


def _is_detach(node: onnx.NodeProto) -> bool:
    return node.op_type == "Identity" and _DETACH in _entry(node.metadata_props, _OPERATION)


def mark_detached(node: onnx.NodeProto) -> None:
    """Let no gradient pass an Identity."""
    text = f"%{node.output[0]} : call_function[target={_DETACH}default](args = (), kwargs = {{}})"
    node.metadata_props.add(key=_OPERATION, value=text)


def operation_of(node: onnx.NodeProto) -> str:
    """Return the text of the PyTorch operation that a node came from; empty where nothing tells."""
    return _entry(node.metadata_props, _OPERATION)


def tensors_read(node: onnx.NodeProto) -> list[str]:
    """Return what a node's PyTorch operation reads; its own result comes first in the text."""
    return _READ.findall(operation_of(node))[1:]


def inputs_of_program(graph: onnx.GraphProto) -> list[str]:
    """Return what the exported program is given, parameters and buffers too, by the names in it."""
    return _NAMED.findall(_entry(graph.metadata_props, _SIGNATURE).partition("# outputs")[0])


def outputs_of_program(graph: onnx.GraphProto) -> list[str]:
    """Return what the exported program returns, by the names that these have in it."""
    return _RESULT.findall(_entry(graph.metadata_props, _SIGNATURE))


def module_of(node: onnx.NodeProto) -> str:
    """Return the path of the module whose operation a node came from; empty for the outermost."""
    scopes = _listed(_entry(node.metadata_props, _SCOPES))
    return scopes[-2] if len(scopes) > 1 else ""


def is_numbered_as(name: str, other: str) -> bool:
    """Tell whether two names are of operations of one kind: mul, mul_1."""
    return re.sub(r"_\d+$", "", name) == re.sub(r"_\d+$", "", other)


def mark_undecided(graph: onnx.GraphProto, name: str, reason: str) -> None:
    """Note in an initializer's value_info why it may be no parameter of its own."""
    value = next((value for value in graph.value_info if value.name == name), None)
    if value is None:
        tensor = next(tensor for tensor in graph.initializer if tensor.name == name)
        value = graph.value_info.add()
        value.CopyFrom(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    if not _entry(value.metadata_props, UNDECIDED):
        value.metadata_props.add(key=UNDECIDED, value=reason)


def _entry(entries: Iterable[onnx.StringStringEntryProto], key: str) -> str:
    return next((entry.value for entry in entries if entry.key == key), "")


def _names(text: str) -> frozenset[str]:
    return frozenset(_listed(text))


def _listed(text: str) -> list[str]:
    """Read the text of a Python list of names; anything else tells nothing."""
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(n, str) for n in names) else []
