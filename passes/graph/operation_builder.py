"""Emit nodes with fresh names; an operation that was emitted before is shared, not repeated."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN

# onnx.helper.make_node takes attribute values of all these types.
AttributeValue = int | float | str | Sequence[int] | Sequence[float] | onnx.TensorProto

RANDOM_OPS = frozenset(
    {
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
        "Dropout",
    }
)


OperationKey = tuple[Hashable, ...]  # what tells operations, or constants, apart


@dataclass(frozen=True, slots=True)
class Operation:
    """A node without its name and its outputs' names; attributes are ordered by name."""

    op_type: str
    domain: str
    inputs: tuple[str, ...]
    attributes: Sequence[onnx.AttributeProto]

    def key(self, arity: int) -> OperationKey:
        """Return what is equal for operations that give equal results."""
        attributes = (attribute.SerializeToString(deterministic=True) for attribute in self.attributes)
        return (self.op_type, self.domain, arity, self.inputs, *attributes)

    def node(self, name: str, outputs: Sequence[str]) -> onnx.NodeProto:
        """Return the operation as a node."""
        node = onnx.NodeProto(op_type=self.op_type, name=name, input=self.inputs, output=outputs)
        if self.domain:
            node.domain = self.domain
        node.attribute.extend(self.attributes)
        return node


class OperationBuilder:
    """Nodes in topological order, and the small constants that they read."""

    def __init__(self, used_names: Iterable[str] = ()) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.functions: dict[str, onnx.FunctionProto] = {}
        self.scope = ""
        self._taken = set(used_names)
        self._counts: dict[str, count[int]] = {}
        self._made: dict[OperationKey, tuple[str, ...]] = {}
        self._producers: dict[str, onnx.NodeProto] = {}

    def producer(self, tensor: str) -> onnx.NodeProto | None:
        """Return the node that makes a tensor; none makes an input or a constant."""
        return self._producers.get(tensor)

    def op(self, op_type: str, *inputs: str, **attributes: AttributeValue) -> str:
        """Emit an operation with one output and return the output's name."""
        return self.call(op_type, inputs, 1, **attributes)[0]

    def call(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: int | Sequence[str],
        **attributes: AttributeValue,
    ) -> tuple[str, ...]:
        """Emit an operation with several outputs, or with outputs whose names are given."""
        attribute_protos = [helper.make_attribute(name, attributes[name]) for name in sorted(attributes)]
        return self._emit(Operation(op_type, "", tuple(inputs), attribute_protos), outputs)

    def emit(self, node: onnx.NodeProto) -> tuple[str, ...]:
        """Emit a node of another graph under fresh names; it reads this graph's tensors."""
        outputs = len(node.output)
        if node.op_type in RANDOM_OPS:
            names = [self.fresh(f"{self.scope}{node.op_type}") for _ in range(outputs)]
            return self._emit(_operation(node), names)
        return self._emit(_operation(node), outputs)

    def _emit(self, operation: Operation, outputs: int | Sequence[str]) -> tuple[str, ...]:
        arity = outputs if isinstance(outputs, int) else len(outputs)
        key = operation.key(arity)
        if isinstance(outputs, int):
            if key in self._made:
                return self._made[key]
            names = tuple(self.fresh(f"{self.scope}{operation.op_type}") for _ in range(arity))
            node = operation.node(names[0], names)
        else:
            names = tuple(outputs)
            node = operation.node(self.fresh(f"{operation.op_type}:{names[0]}"), names)
        self.nodes.append(node)
        self._producers.update(dict.fromkeys(names, node))
        self._made.setdefault(key, names)
        return names

    def copy(self, node: onnx.NodeProto) -> None:
        """Append a node as it is; equal operations emitted later share its outputs."""
        self.nodes.append(node)
        self._producers.update(dict.fromkeys(node.output, node))
        self._taken.update((node.name, *node.output))
        if node.op_type in RANDOM_OPS or "" in node.output:
            return
        self._made.setdefault(_operation(node).key(len(node.output)), tuple(node.output))

    def adopt(self, constant: onnx.TensorProto) -> None:
        """Share a constant that the graph has already."""
        key = _constant_key(numpy_helper.to_array(constant), constant.data_type)
        self._made.setdefault(key, (constant.name,))

    def call_function(self, function: onnx.FunctionProto, inputs: Sequence[str]) -> tuple[str, ...]:
        """Emit a call of a model-local function, and keep the function."""
        function_of_name = self.functions.setdefault(function.name, function)
        assert function_of_name == function, f"two bodies for function {function.name}"
        called = Operation(function.name, function.domain, tuple(inputs), ())
        return self._emit(called, len(function.output))

    def fresh(self, hint: str) -> str:
        """Return a name that nothing else bears."""
        name = hint
        counter = self._counts.setdefault(hint, count(1))
        while name in self._taken or not name:
            name = f"{hint}_{next(counter)}"
        self._taken.add(name)
        return name

    def constant(self, value: np.ndarray) -> str:
        """Return the name of a constant; equal constants are shared."""
        return self._shared_constant(value, as_node=False)

    def ints(self, *values: int) -> str:
        """Return an int64 vector constant."""
        return self.constant(np.array(values, np.int64))

    def _shared_constant(self, value: np.ndarray, *, as_node: bool) -> str:
        key = _constant_key(value, helper.np_dtype_to_tensor_dtype(value.dtype))
        if key not in self._made:
            tensor, name = numpy_helper.from_array(value), self.fresh(_constant_hint(value))
            self._made[key] = (name,)
            if as_node:
                self.nodes.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
            else:
                tensor.name = name
                self.constants.append(tensor)
        return self._made[key][0]


class FunctionBuilder(OperationBuilder):
    """The body of a model-local function: constants are nodes, for functions have no initializers."""

    def constant(self, value: np.ndarray) -> str:
        """Return the name of a constant; equal constants are shared."""
        return self._shared_constant(value, as_node=True)

    def finish(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], opset: int
    ) -> onnx.FunctionProto:
        """Return the function."""
        return helper.make_function(
            FUNCTION_DOMAIN, name, inputs, outputs, self.nodes, [helper.make_opsetid("", opset)]
        )


def _operation(node: onnx.NodeProto) -> Operation:
    attributes = sorted(node.attribute, key=lambda attribute: attribute.name)
    return Operation(node.op_type, node.domain, tuple(node.input), attributes)


def _constant_key(value: np.ndarray, data_type: int) -> OperationKey:
    return (data_type, value.shape, value.tobytes())


def _constant_hint(value: np.ndarray) -> str:
    if value.size <= 6:
        return "constant/" + "x".join(f"{element:g}" for element in value.ravel().tolist())
    return "constant/" + "x".join(map(str, value.shape))


def onnx_number(dtype: np.dtype) -> int:
    """Return the number that ONNX has for an element type, as the attribute `to` of Cast holds it."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
