"""Emit nodes with fresh names; an operation that was emitted before is shared, not repeated."""

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.compiler.training.tensor_types import TensorType
from partc.passes.indexed_slices import DOMAIN

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


class NodeBuilder:
    """Nodes in topological order, and the small constants that they read."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.functions: dict[str, onnx.FunctionProto] = {}
        self.declared: dict[str, TensorType] = {}  # outputs of functions: inference may not look inside
        self.scope = ""
        self._taken = set(taken)
        self._counts: dict[str, count[int]] = {}
        self._made: dict[bytes, tuple[str, ...]] = {}

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
        node = onnx.NodeProto(op_type=op_type, input=inputs)
        node.attribute.extend(helper.make_attribute(name, attributes[name]) for name in sorted(attributes))
        return self._emit(node, outputs)

    def emit(self, node: onnx.NodeProto) -> tuple[str, ...]:
        """Emit a node of another graph under fresh names; it reads this graph's tensors."""
        outputs = len(node.output)
        anonymous = onnx.NodeProto(op_type=node.op_type, domain=node.domain, input=node.input)
        anonymous.attribute.extend(node.attribute)
        if node.op_type in RANDOM_OPS:
            return self._emit(anonymous, [self.fresh(f"{self.scope}{node.op_type}") for _ in range(outputs)])
        return self._emit(anonymous, outputs)

    def _emit(self, node: onnx.NodeProto, outputs: int | Sequence[str]) -> tuple[str, ...]:
        key = _key(node, outputs if isinstance(outputs, int) else len(outputs))
        if isinstance(outputs, int):
            if key in self._made:
                return self._made[key]
            names = tuple(self.fresh(f"{self.scope}{node.op_type}") for _ in range(outputs))
            node.name = names[0]
        else:
            names = tuple(outputs)
            node.name = self.fresh(f"{node.op_type}:{names[0]}")
        node.output.extend(names)
        self.nodes.append(node)
        self._made.setdefault(key, names)
        return names

    def copy(self, node: onnx.NodeProto) -> None:
        """Append a node as it is; equal operations emitted later share its outputs."""
        self.nodes.append(node)
        self._taken.update((node.name, *node.output))
        if node.op_type in RANDOM_OPS or "" in node.output:
            return
        anonymous = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
        anonymous.input.extend(node.input)
        anonymous.attribute.extend(node.attribute)
        self._made.setdefault(_key(anonymous, len(node.output)), tuple(node.output))

    def adopt(self, constant: onnx.TensorProto) -> None:
        """Share a constant that the graph has already."""
        self._made.setdefault(_constant_key(constant), (constant.name,))

    def call_function(self, function: onnx.FunctionProto, inputs: Sequence[str]) -> tuple[str, ...]:
        """Emit a call of a model-local function, and keep the function."""
        known = self.functions.setdefault(function.name, function)
        assert known == function, f"two bodies for function {function.name}"
        node = onnx.NodeProto(op_type=function.name, domain=function.domain, input=inputs)
        return self._emit(node, len(function.output))

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
        tensor = numpy_helper.from_array(value)
        key = _constant_key(tensor)
        if key not in self._made:
            name = self.fresh(_constant_hint(value))
            self._made[key] = (name,)
            if as_node:
                self.nodes.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
            else:
                tensor.name = name
                self.constants.append(tensor)
        return self._made[key][0]


class FunctionBuilder(NodeBuilder):
    """The body of a model-local function: constants are nodes, for functions have no initializers."""

    def constant(self, value: np.ndarray) -> str:
        """Return the name of a constant; equal constants are shared."""
        return self._shared_constant(value, as_node=True)

    def finish(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], opset: int
    ) -> onnx.FunctionProto:
        """Return the function."""
        return helper.make_function(
            DOMAIN, name, inputs, outputs, self.nodes, [helper.make_opsetid("", opset)]
        )


def _key(node: onnx.NodeProto, arity: int) -> bytes:
    ordered = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
    ordered.input.extend(node.input)
    ordered.attribute.extend(sorted(node.attribute, key=lambda attribute: attribute.name))
    serialized: bytes = ordered.SerializeToString(deterministic=True)
    return arity.to_bytes(4, "little") + serialized


def _constant_key(tensor: onnx.TensorProto) -> bytes:
    value = numpy_helper.to_array(tensor)
    return f"constant {tensor.data_type} {value.shape} ".encode() + value.tobytes()


def _constant_hint(value: np.ndarray) -> str:
    if value.size <= 6:
        return "constant/" + "x".join(f"{element:g}" for element in value.ravel().tolist())
    return "constant/" + "x".join(map(str, value.shape))
