"""Undo what an exporter does to parameters that are equal when it writes them, and to those that are zero.

    a.bias = b.bias = 0   one initializer, read twice      two of their own, as in the module
    table, read also as   a second initializer             a Transpose of the table: one parameter
      its transpose         with the transposed values
    bias = 0              no input of Conv or Gemm         an input

torch.onnx.export(dynamo=True) tells by metadata (metadata_merges.py). TorchScript's exporter merges by nodes
Identity at the head of the graph, which bear the names of the parameters; folded ones have no names of
their own (`onnx::MatMul_12`), but their readers name the module.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path

import onnx
from onnx import helper

from partc.compiler.differentiation.parameters.exporter_facts import (
    FOLDED_BY_TORCHSCRIPT,
    ExporterFacts,
    exporter_facts,
    is_torchscript,
)
from partc.compiler.differentiation.parameters.metadata_merges import restore_parameters
from partc.compiler.differentiation.parameters.value_patterns import values_of

_CALL = re.compile(r"_\d+$")  # of a module's later calls: /layer, /layer_1, ...


def undo_merges(
    forward: onnx.ModelProto, folder: Path | None = None
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the model with its parameters as the module has them, where the file tells; else itself.

    Returns copy -> parameter, too, of what was stored twice. External data lies in `folder`.
    """
    facts = exporter_facts(forward)
    if facts.is_silent and not is_torchscript(forward, facts):
        return forward, {}
    model = onnx.ModelProto()
    model.CopyFrom(forward)
    if facts.is_silent:
        _separate_identities(model.graph)
    else:
        restore_parameters(model.graph, facts)
    return model, _join_copies(model.graph, facts, folder)


# ---------------------------------------------------------------- equal parameters, by TorchScript


def _separate_identities(graph: onnx.GraphProto) -> None:
    """Give what TorchScript's exporter merged initializers of their own."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    head = takewhile(lambda node: node.op_type == "Identity" and node.input[0] in stored, graph.node)
    merged = {node.output[0]: node for node in head if node.output[0] not in outputs}
    twins: dict[str, list[str]] = defaultdict(list)
    for name, node in merged.items():
        twins[node.input[0]].append(name)
    modules = _modules_of_readers(graph, stored.keys() | merged.keys())
    for name, others in twins.items():
        first_of = {modules.get(name, ""): name} if name.startswith(FOLDED_BY_TORCHSCRIPT) else {}
        for other in others:
            module = modules.get(other, "") if other.startswith(FOLDED_BY_TORCHSCRIPT) else other
            if module in first_of:  # the same weight, read at another call
                merged[other].input[0] = first_of[module]
                continue
            first_of[module] = other
            graph.initializer.append(stored[name])
            graph.initializer[-1].name = other
            graph.node.remove(merged[other])


def _modules_of_readers(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, str]:
    """Return the path of the module whose node reads a tensor first: of `/l.1/lin_1/MatMul`, `/l.1/lin`."""
    selected = frozenset(names)
    modules: dict[str, str] = {}
    for node in graph.node:
        path = "/".join(_CALL.sub("", part) for part in node.name.split("/")[:-1])
        for name in selected.intersection(node.input):
            if node.op_type != "Identity":
                modules.setdefault(name, path)
    return modules


# ---------------------------------------------------------------- tied parameters


def _join_copies(graph: onnx.GraphProto, facts: ExporterFacts, folder: Path | None) -> dict[str, str]:
    """Compute a transposed copy of a parameter from it, in place of storing it: copy -> parameter."""
    matrices = {t.name: t for t in graph.initializer if len(t.dims) == 2}
    copies = dict(_transposed_copies(facts, matrices, folder))
    for copy, original in copies.items():
        node = helper.make_node("Transpose", [original], [copy], name=f"Transpose:{copy}", perm=[1, 0])
        graph.node.insert(0, node)
        graph.initializer.remove(matrices[copy])
    return copies


def _transposed_copies(
    facts: ExporterFacts, matrices: Mapping[str, onnx.TensorProto], folder: Path | None
) -> Iterator[tuple[str, str]]:
    """Yield each matrix that the exporter folded, beside the parameter of which it is the transpose."""
    named = [name for name in matrices if not name.startswith(FOLDED_BY_TORCHSCRIPT)]
    for name, tensor in matrices.items():
        if facts.is_silent:
            sources = named if name.startswith(FOLDED_BY_TORCHSCRIPT) else []
        else:
            sources = [source for source in facts.folded_from.get(name, ()) if source in matrices]
        for source in sources:
            if _is_transposed(tensor, matrices[source], folder):
                yield name, source
                break


def _is_transposed(tensor: onnx.TensorProto, other: onnx.TensorProto, folder: Path | None) -> bool:
    """Compare what is looked at of both: of large ones a corner, whose values have to differ."""
    if tuple(tensor.dims) != tuple(reversed(other.dims)) or tensor.data_type != other.data_type:
        return False
    values, others = values_of(tensor, folder), values_of(other, folder)
    if not values.array.size or not others.array.size or not others.are_distinct:
        return False
    rows, columns = len(values.array), len(others.array)
    return bool((values.array[:, :columns] == others.array[:, :rows].T).all())
