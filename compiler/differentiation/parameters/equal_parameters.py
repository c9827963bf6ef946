"""Find initializers that stand for parameters of several modules, since they were equal when written.

    module   a.bias and b.bias, both of zeros, split in two   1 + a.weight and 1 + b.weight, both of zeros
    file     Split (a.bias), whose parts module b reads       add_1, of a.weight, which both modules read
    told     nothing of the Split                             mul(%y, %add_3) in b, and no add_3

What names a parameter, or a view of one, got its own back before, or is asked about. Values that differ are
equal where one parameter is read twice, not by chance.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import onnx

from partc.compiler.differentiation.parameters.exporter_facts import (
    ExporterFacts,
    is_numbered_as,
    module_of,
    operation_of,
    tensors_read,
)
from partc.compiler.differentiation.parameters.value_patterns import TensorValues, values_of


def find_stand_ins(
    graph: onnx.GraphProto, facts: ExporterFacts, absent: Collection[str], folder: Path | None
) -> Mapping[str, tuple[str, ...]]:
    """Return initializers that nodes read in place of `absent` parameters, and those.

    External data lies in `folder`.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer if absent}
    sources = {
        name: facts.parameters_in(facts.folded_from.get(name, (name,)))
        for name in tensors.keys() - facts.undecided.keys()
    }
    readers = _Readers(graph, facts)
    stand_ins: dict[str, list[str]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            for parameter in readers.replaced(node, name, sources.get(name, ()), absent):
                if parameter not in stand_ins[name]:
                    stand_ins[name].append(parameter)
    return {
        name: tuple(parameters)
        for name, parameters in stand_ins.items()
        if not _is_own_by_values(values_of(tensors[name], folder))
    }


def _is_own_by_values(values: TensorValues) -> bool:
    """Tell whether no parameter can have become this tensor but its own."""
    return values.array.size > 1 and values.are_distinct


class _Readers:
    """Who reads a tensor: nodes, and the modules whose operations they came from."""

    def __init__(self, graph: onnx.GraphProto, facts: ExporterFacts) -> None:
        self._targets = facts.targets
        self._present = {tensor.name for tensor in (*graph.input, *graph.initializer)}
        self._present.update(name for node in graph.node for name in node.output)
        self._nodes: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self._nodes[name].append(node)

    def replaced(
        self, node: onnx.NodeProto, name: str, sources: Collection[str], absent: Collection[str]
    ) -> Iterator[str]:
        """Yield the absent parameters that a node may read in the initializer `name`, made of `sources`."""
        reads = tensors_read(node)
        if not sources or name in reads or any(self._targets.get(read) in sources for read in reads):
            return
        is_alike = any(is_numbered_as(read, name) for read in reads if read not in self._present)
        leaves = {_module_and_leaf(source)[1] for source in sources}
        for module in self._modules(node):
            for parameter in absent:
                owner, leaf = _module_and_leaf(parameter)
                if owner == module and (is_alike or leaf in leaves):
                    yield parameter

    def _modules(self, node: onnx.NodeProto) -> set[str]:
        """Return the module of a node, or where nothing tells, those of what reads its results."""
        modules: set[str] = set()
        waiting, seen = [node], set()
        while waiting:
            reader = waiting.pop()
            if operation_of(reader):
                modules.add(module_of(reader))
                continue
            fresh = [name for name in reader.output if name not in seen]
            seen.update(fresh)
            waiting += [after for name in fresh for after in self._nodes[name]]
        return modules


def _module_and_leaf(name: str) -> tuple[str, str]:
    module, _, leaf = name.rpartition(".")
    return module, leaf
