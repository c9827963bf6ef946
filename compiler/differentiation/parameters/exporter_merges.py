"""Undo what an exporter does to parameters that are equal when it writes them, and to those that are zero.

    a.bias = b.bias = 0   one initializer, read twice      two of their own, as in the module
    table, read also as   a second initializer             a Transpose of the table: one parameter
      its transpose         with the transposed values       (join_copies.py; so for other views)
    bias = 0              no input of Conv or Gemm         an input

torch.onnx.export(dynamo=True) tells by metadata (metadata_merges.py). TorchScript's exporter merges by nodes
Identity at the head of the graph, which bear the names of the parameters; folded ones have no names of
their own (`onnx::MatMul_12`), but their readers name the module.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import onnx

from partc.compiler.differentiation.parameters.exporter_facts import (
    FOLDED_BY_TORCHSCRIPT,
    exporter_facts,
    is_torchscript,
)
from partc.compiler.differentiation.parameters.join_copies import join_copies
from partc.compiler.differentiation.parameters.merged_views import separate_views
from partc.compiler.differentiation.parameters.metadata_merges import restore_parameters

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
        separate_views(model.graph, exporter_facts(model), folder)
    return model, join_copies(model.graph, exporter_facts(model), folder)


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
