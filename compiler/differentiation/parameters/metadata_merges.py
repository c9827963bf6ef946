"""Let each node read the parameters that its PyTorch operation read, as metadata of dynamo=True tells.

    operation   linear(x, %p_b_weight, %p_b_bias)
    nodes       MatMul (x, val_3)   Add (_, a.bias)       val_3 is a.weight folded, which equals b.weight
    becomes     MatMul (x, val_4)   Add (_, b.bias)

The exporter's optimiser makes one initializer of equal values: of all LayerNorm scales, at first. Which
parameter it stands for is known where one is left of what the operation reads, or where another operation of
the kind reads the initializer's own parameter at that place. It also drops biases that are zero.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.compiler.differentiation.parameters.exporter_facts import (
    FOLDED_FROM,
    KIND,
    ExporterFacts,
    operation_of,
    tensors_read,
)

BIASED = {"Conv", "ConvTranspose", "Gemm"}  # whose third input is a bias, which may be left out


@dataclass(frozen=True)
class _Operation:
    """The nodes that one PyTorch operation became."""

    kind: str  # such as torch.ops.aten.linear.default
    parameters: tuple[str, ...]  # by the place at which it reads one; empty: another tensor
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def reads(self, owners: Mapping[str, str]) -> dict[str, str]:
        """Return the initializers that its nodes read, and the parameter that each is named after."""
        return {name: owners[name] for node in self.nodes for name in node.input if name in owners}


def restore_parameters(graph: onnx.GraphProto, facts: ExporterFacts) -> None:
    """Store each parameter that the graph reads by another's initializer, or that was dropped."""
    owners = _owners(facts)
    missing = set(facts.targets.values()) - set(owners.values())
    if not missing:
        return
    operations = _operations(graph, facts)
    places = {
        (operation.kind, owner, operation.parameters.index(owner))
        for operation in operations
        for owner in operation.reads(owners).values()
        if owner in operation.parameters
    }
    store = _Store(graph, facts)
    for operation in operations:
        for name, parameter in _stand_ins(operation, owners, places, missing).items():
            copy = store.copy(name, parameter)
            for node in operation.nodes:
                node.input[:] = [copy if read == name else read for read in node.input]
        left = [p for p in operation.parameters if p in missing and p not in store.stored]
        for node in operation.nodes:
            if len(left) == 1 and node.op_type in BIASED and len(node.input) == 2:
                store.add_bias(node, left[0])


def _owners(facts: ExporterFacts) -> dict[str, str]:
    """Return the parameter that each initializer holds, by itself or folded."""
    owners = {name: name for name, kind in facts.kinds.items() if kind == "PARAMETER"}
    for name, sources in facts.folded_from.items():
        parameters = facts.parameters_in(sources)
        if len(parameters) == 1:
            owners[name] = parameters[0]
    return owners


def _operations(graph: onnx.GraphProto, facts: ExporterFacts) -> list[_Operation]:
    operations: dict[str, _Operation] = {}
    for node in graph.node:
        if text := operation_of(node):
            if text not in operations:
                read = tuple(facts.targets.get(name, "") for name in tensors_read(node))
                operations[text] = _Operation(_kind(text), read)
            operations[text].nodes.append(node)
    return [operation for operation in operations.values() if any(operation.parameters)]


def _kind(text: str) -> str:
    return text.partition("target=")[2].partition("]")[0]


def _stand_ins(
    operation: _Operation,
    owners: Mapping[str, str],
    places: Iterable[tuple[str, str, int]],
    missing: Iterable[str],
) -> dict[str, str]:
    """Return the initializers of others that an operation's nodes read, and for which of its parameters."""
    reads = operation.reads(owners)
    foreign = [name for name, owner in reads.items() if owner not in operation.parameters]
    left = [p for p in dict.fromkeys(operation.parameters) if p in missing]
    stand_ins: dict[str, str] = {}
    for name in foreign:
        at = {place for kind, owner, place in places if kind == operation.kind and owner == reads[name]}
        candidates = {operation.parameters[place] for place in at if place < len(operation.parameters)}
        if len(at) == 1 and candidates <= set(left):
            stand_ins[name] = candidates.pop()
    rest = [name for name in foreign if name not in stand_ins]
    others = [parameter for parameter in left if parameter not in stand_ins.values()]
    if len(rest) == len(others) == 1:
        stand_ins[rest[0]] = others[0]
    return stand_ins if len(set(stand_ins.values())) == len(stand_ins) else {}


class _Store:
    """Adds initializers, and what the exporter would have said of them."""

    def __init__(self, graph: onnx.GraphProto, facts: ExporterFacts) -> None:
        self.stored: dict[str, str] = {}  # parameter -> its initializer
        self._graph, self._facts = graph, facts
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._names = {name for node in graph.node for name in (*node.input, *node.output)}

    def copy(self, name: str, parameter: str) -> str:
        """Return the initializer of a parameter that another stands for, by now."""
        if parameter in self.stored:
            return self.stored[parameter]
        tensor = onnx.TensorProto()
        tensor.CopyFrom(self._tensors[name])
        if name in self._facts.kinds:
            return self._add(parameter, tensor, parameter, KIND, "PARAMETER")
        step = next(f"val_{n}" for n in count() if f"val_{n}" not in self._names)
        sources = (self._facts.folded_from[name] - self._facts.targets.keys()) - set(
            self._facts.targets.values()
        )
        return self._add(step, tensor, parameter, FOLDED_FROM, repr(sorted({*sources, parameter})))

    def add_bias(self, node: onnx.NodeProto, parameter: str) -> None:
        """Give a node the bias that was dropped because it was zero."""
        weight = self._tensors.get(node.input[1])
        if weight is None:
            return
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        by_rows = node.op_type == "Conv" or (node.op_type == "Gemm" and attributes.get("transB", 0))
        width = weight.dims[0] if by_rows else weight.dims[1] * attributes.get("group", 1)
        zeros = np.zeros(width, helper.tensor_dtype_to_np_dtype(weight.data_type))
        tensor = numpy_helper.from_array(zeros)
        node.input.append(self._add(parameter, tensor, parameter, KIND, "PARAMETER"))

    def _add(self, name: str, tensor: onnx.TensorProto, parameter: str, key: str, value: str) -> str:
        tensor.name = name
        info = helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        info.metadata_props.add(key=key, value=value)
        self._graph.value_info.append(info)
        self._graph.initializer.append(tensor)
        self._tensors[name] = tensor
        self._names.add(name)
        self.stored[parameter] = name
        return name
