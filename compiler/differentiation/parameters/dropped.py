"""Find the parameters that an exporter's optimiser may have dropped, with the operations that read them.

    module   h * scale        scale is 1 when it is exported
    file     h                the signature still lists scale, and what reads h says that it reads `mul`

The optimiser drops x * 1, x / 1, x + 0, x - 0 where the number has no axes, and layers' biases of zeros. Such
a number is a parameter, a part of one, or computed from one. The signature lists parameters that the module
never uses, too: where no operation is gone, what has no values is such.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from partc.compiler.differentiation.parameters.decision import MAX_NAMES, PLAIN
from partc.compiler.differentiation.parameters.equal_parameters import find_stand_ins
from partc.compiler.differentiation.parameters.exporter_facts import (
    ExporterFacts,
    exporter_facts,
    inputs_of_program,
    is_numbered_as,
    module_of,
    operation_of,
    outputs_of_program,
    tensors_read,
)
from partc.compiler.differentiation.parameters.folded import operations_of
from partc.compiler.differentiation.parameters.metadata_merges import BIASED
from partc.compiler.differentiation.parameters.value_patterns import values_of
from partc.compiler.differentiation.parameters.views import COPYING, PERMUTING, RESHAPING, SLICING
from partc.compiler.differentiation.tensor_types import FLOATS
from partc.compiler.report.units import first_words, plural

_ARITHMETIC = re.compile(r"^(add|div|mul|rsub|sub|true_divide)(_|$)")
_TARGET = re.compile(r"torch\.ops\.aten\.(\w+)\.")
_USERS = re.compile(r"\[num_users=(\d+)\]")
_VIEWS = RESHAPING | PERMUTING | COPYING | SLICING
_BIAS_FIRST = frozenset({"addmm"})  # all others read it third


@dataclass(frozen=True, slots=True)
class Dropped:
    """What may be gone from a file. All are empty where it has all that the module reads.

    parameters: such as have no values in the file, though operations are gone that may have read them
    numbers: initializers, of or from parameters, that operations which are gone may have read, too
    operations: these, by PyTorch's names
    silent: parameters without values, of which nothing tells whether the module reads them
    stand_ins: initializers that are read in place of parameters without values, and those
    """

    parameters: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    stand_ins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def describe(self, may_train: Callable[[str], bool]) -> list[str]:
        """Return lines about parameters that the file says nothing of."""
        names = [name for name in self.silent if may_train(name)]
        if not names:
            return []
        return [
            f"not in the file: {plural(len(names), 'parameter')}".translate(PLAIN),
            f"  unused, tied to another, or dropped by the exporter's optimiser (optimize=False tells): "
            f"{first_words(names, MAX_NAMES)}",
        ]


def find_dropped(model: onnx.ModelProto, folder: Path | None = None) -> Dropped:
    """Return what may be gone from a forward model, as it is when merges are undone.

    External data lies in `folder`.
    """
    facts = exporter_facts(model)
    absent = _absent(model.graph, facts)
    numbers = tuple(_numbers(model.graph, facts, folder))
    if not absent and not numbers:
        return Dropped()
    gone = _Program(model.graph).gone(frozenset().union(*facts.folded_from.values()))
    operations = tuple(name for name, is_arithmetic in gone.items() if is_arithmetic)
    tied = _tied(model.graph, facts, absent)
    leaves = {_leaf(name) for name in tied}
    absent = tuple(name for name in absent if name not in tied)
    stand_ins = find_stand_ins(model.graph, facts, absent, folder)
    merged = frozenset().union(*stand_ins.values())
    absent = tuple(name for name in absent if name not in merged)
    uncalled = _uncalled(model.graph, facts, absent)
    may_be_read = (name for name in absent if name not in uncalled and _leaf(name) not in leaves)
    read = tuple(may_be_read) if operations else ()
    silent = tuple(name for name in absent if gone and name not in read)
    return Dropped(read, numbers if operations else (), operations, silent, stand_ins)


def _absent(graph: onnx.GraphProto, facts: ExporterFacts) -> tuple[str, ...]:
    """Return the parameters that have no values in the file, and that no operation left reads."""
    present = {tensor.name for tensor in graph.initializer}
    present.update(*(facts.parameters_in(sources) for sources in facts.folded_from.values()))
    read = {name for node in graph.node if not _passes_on(node) for name in tensors_read(node)}
    return tuple(
        target for inner, target in facts.targets.items() if target not in present and inner not in read
    )


def _tied(graph: onnx.GraphProto, facts: ExporterFacts, absent: Collection[str]) -> frozenset[str]:
    """Return other names of parameters: an operation of the module that is to read one reads another's.

        wte.weight = lm_head.weight      the embedding of module wte reads lm_head.weight

    More names of the same end may be such, as that of a module that holds a table and is never called.
    """
    tied = set()
    for node in graph.node:
        module = module_of(node)
        for parameter in (facts.targets[name] for name in tensors_read(node) if name in facts.targets):
            if not parameter.startswith(f"{module}."):
                tied.add(f"{module}.{_leaf(parameter)}")
    return frozenset(tied.intersection(absent))


def _uncalled(graph: onnx.GraphProto, facts: ExporterFacts, absent: Collection[str]) -> frozenset[str]:
    """Return the parameters of modules that no operation came from, and that hold a layer.

    A layer has a weight and a bias. Its weight has axes: where it was called, an operation is left.
    """
    called = {outer for node in graph.node for outer in _enclosing(f"{module_of(node)}.")}
    called.update(
        outer for name in facts.targets.values() if name not in absent for outer in _enclosing(name)
    )
    layers = {
        outer
        for name in absent
        if "weight" in _leaf(name) and _bias_beside(name) in absent
        for outer in _enclosing(name)
    }
    return frozenset(name for name in absent if not layers.difference(called).isdisjoint(_enclosing(name)))


def _enclosing(name: str) -> Iterator[str]:
    """Yield the paths of the modules that a parameter is in, but the outermost: a.b and a of a.b.weight."""
    while name := name.rpartition(".")[0]:
        yield name


def _bias_beside(weight: str) -> str:
    """Return the name of a weight's bias: in_proj_bias of in_proj_weight."""
    module, dot, leaf = weight.rpartition(".")
    return f"{module}{dot}{leaf.replace('weight', 'bias')}"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _numbers(graph: onnx.GraphProto, facts: ExporterFacts, folder: Path | None) -> Iterator[str]:
    """Yield parameters without axes, and such parts of one, of which another use or part may be gone."""
    for tensor in graph.initializer:
        is_folded = tensor.name in facts.folded_from
        sources = facts.folded_from.get(tensor.name, frozenset({tensor.name}))
        made_by = operations_of(facts, tensor.name) if is_folded else frozenset[str]()
        if tensor.dims or not facts.parameters_in(sources) or not made_by <= _VIEWS:
            continue
        if made_by & SLICING or values_of(tensor, folder).array.tolist() in (0.0, 1.0):
            yield tensor.name


class _Program:
    """What came of the operations of the exported program, by the nodes that tell them."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._stored = {tensor.name for tensor in graph.initializer}
        made = [node for node in graph.node if not _passes_on(node)]
        self._operation = {name: operation_of(node) for node in made for name in node.output}
        self._readers: dict[str, set[str]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, set()).add(operation_of(node))
        self._types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}

    def gone(self, folded: Iterable[str]) -> Mapping[str, bool]:
        """Return the operations that others read and no node tells, and whether each may be arithmetic.

        `folded`: names of what initializers were made from.
        """
        named = {_name_of(text) for text in self._operation.values() if text}
        if not named:
            return {}
        inputs = inputs_of_program(self._graph)
        present = named.union(self._own_results(), self._stored, inputs, folded)
        gone = {name: _is_arithmetic(name) for name in outputs_of_program(self._graph) if name not in present}
        for node in self._graph.node:
            for name in _data_read(node):
                if name not in present:
                    gone[name] = gone.get(name, False) or self._may_read_parameter(name, node)
        return gone

    def _own_results(self) -> set[str]:
        """Return the tensors but those that bear the name of arithmetic and are another operation's.

        The file's outputs keep their names, whatever makes them.
        """
        return {
            name
            for name, operation in self._operation.items()
            if not operation or not _is_arithmetic(name) or _name_of(operation) == name
        }

    def _may_read_parameter(self, gone: str, reader: onnx.NodeProto) -> bool:
        """Tell whether an operation that is gone may have read a parameter and another tensor."""
        if gone == _dropped_bias(reader):
            return True
        stand_ins = self._stand_ins(reader)
        if any(is_numbered_as(name, gone) for name in self._stored.intersection(reader.input)):
            return False  # it was folded, and merged with what was folded to the same
        is_other = bool(stand_ins) and all(self._is_integer(t) or self._is_twin(t, gone) for t in stand_ins)
        return _is_arithmetic(gone) and not is_other

    def _stand_ins(self, reader: onnx.NodeProto) -> list[str]:
        """Return what a node reads, and its operation did not."""
        read, own = set(tensors_read(reader)), operation_of(reader)
        return [
            name
            for name in reader.input
            if name not in read | self._stored
            and _name_of(text := self._operation.get(name, "")) not in read
            and text != own
        ]

    def _is_integer(self, tensor: str) -> bool:
        element = self._types.get(tensor, onnx.TensorProto.UNDEFINED)
        return element != onnx.TensorProto.UNDEFINED and element not in FLOATS

    def _is_twin(self, tensor: str, gone: str) -> bool:
        """Tell whether a tensor is the result of an operation like the one that is gone, merged with it.

        More operations then read it than read it in the program.
        """
        operation = self._operation.get(tensor, "")
        users = _USERS.search(operation)
        readers = self._readers.get(tensor, set()) - {operation}
        is_alike = is_numbered_as(_name_of(operation), gone)
        return is_alike and users is not None and len(readers) > int(users[1])


def _passes_on(node: onnx.NodeProto) -> bool:
    """Tell whether a node stands for arithmetic with two tensors, and hands on the one that is left."""
    is_arithmetic = _ARITHMETIC.match(_kind(node)) is not None
    return node.op_type == "Identity" and is_arithmetic and len(tensors_read(node)) > 1


def _is_arithmetic(name: str) -> bool:
    return _ARITHMETIC.match(name) is not None


def _name_of(operation: str) -> str:
    return operation.partition(" ")[0].removeprefix("%")


def _data_read(node: onnx.NodeProto) -> list[str]:
    """Return what an operation reads; of a view, whose sizes may be computed, the first alone."""
    read = tensors_read(node)
    return read[:1] if _kind(node) in _VIEWS else read


def _kind(node: onnx.NodeProto) -> str:
    match = _TARGET.search(operation_of(node))
    return match.group(1) if match else ""


def _dropped_bias(node: onnx.NodeProto) -> str:
    """Return the bias that an operation reads and its node does not."""
    read = tensors_read(node)
    if node.op_type not in BIASED or len(node.input) != 2 or len(read) != 3:
        return ""
    return read[0 if _kind(node) in _BIAS_FIRST else 2]
