"""One forward node as a gradient rule sees it: its inputs, shapes, attributes and constants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.tensor_types import Shape, Size, Types, known_shape
from partc.passes.graph.operation_builder import AttributeValue
from partc.runtime.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class ForwardNode:
    """A node of the forward graph, and the builder that its gradient is emitted to."""

    build: NodeBuilder
    node: onnx.NodeProto
    types: Types
    constants: Mapping[str, np.ndarray]
    parameters: frozenset[str]
    gradient_inputs: frozenset[int]  # inputs whose gradient is needed
    opset: int

    def x(self, index: int) -> str:
        """Return the name of an input, empty where it is left out."""
        inputs: Sequence[str] = self.node.input
        return inputs[index] if index < len(inputs) else ""

    def y(self, index: int = 0) -> str:
        """Return the name of an output."""
        name: str = self.node.output[index]
        return name

    @property
    def place(self) -> str:
        """Say which node this is, for an error message."""
        return f"node {self.node.name!r} ({self.node.op_type})"

    def op(self, op_type: str, *inputs: str, **attributes: AttributeValue) -> str:
        """Emit an operation with one output."""
        return self.build.op(op_type, *inputs, **attributes)

    def call_function(self, function: onnx.FunctionProto, inputs: Sequence[str], *, like: str) -> str:
        """Call a model-local function whose output has the type of forward tensor `like`."""
        output = self.build.call_function(function, inputs)[0]
        self.build.declared[output] = self.types[like]
        return output

    def attribute(self, name: str, default: AttributeValue | None = None) -> AttributeValue | None:
        """Return an attribute, text decoded."""
        for attribute in self.node.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                return value.decode() if isinstance(value, bytes) else value
        return default

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        value = self.attribute(name, default)
        assert isinstance(value, int)
        return value

    def number(self, name: str, default: float) -> float:
        """Return a float attribute."""
        value = self.attribute(name, default)
        assert isinstance(value, int | float)
        return float(value)

    def shape(self, tensor: str) -> Shape:
        """Return a shape; sizes may be symbols. Raises UnsupportedModel when the rank is unknown."""
        return known_shape(self.types, tensor, needed_by=self.place)

    def static_shape(self, tensor: str) -> tuple[int, ...]:
        """Return a shape of numbers. Raises UnsupportedModel when a size is symbolic."""
        return self.static_sizes(tensor, 0)

    def rank(self, tensor: str) -> int:
        """Return the number of axes."""
        return len(self.shape(tensor))

    def static_sizes(self, tensor: str, first_axis: int) -> tuple[int, ...]:
        """Return the sizes from an axis on. Raises UnsupportedModel when one is symbolic."""
        sizes = self.shape(tensor)[first_axis:]
        numbers = tuple(size for size in sizes if isinstance(size, int))
        if len(numbers) == len(sizes):
            return numbers
        raise UnsupportedModel(
            f"shape {list(sizes)} of tensor {tensor!r}, from axis {first_axis} on, must be known",
            at=self.place,
            fix="export the model with these sizes fixed; only the batch may be symbolic",
        )

    def constant_input(self, index: int) -> np.ndarray | None:
        """Return a constant input's value, None where it is left out. Raises UnsupportedModel."""
        name = self.x(index)
        if not name:
            return None
        if name not in self.constants:
            raise UnsupportedModel(
                f"input {index} ({name!r}) is computed; its gradient rule needs it constant",
                at=self.place,
                fix="make it an initializer or a Constant node",
            )
        return self.constants[name]

    def scalar(self, value: float, *, like: str) -> str:
        """Return a scalar constant of the element type of forward tensor `like`."""
        return self.build.constant(np.array(value, self.types[like].dtype))

    def shape_of(self, tensor: str) -> str:
        """Return a tensor's shape int64[rank], read at run time; a constant for a parameter."""
        if tensor in self.parameters:
            return self.build.ints(*self.static_shape(tensor))
        return self.op("Shape", tensor)

    def zeros(self, tensor: str) -> str:
        """Return zeros shaped and typed like a forward tensor."""
        zero = TensorProto(data_type=self.types[tensor].element, dims=[1])
        zero.raw_data = bytes(self.types[tensor].dtype.itemsize)
        return self.op("ConstantOfShape", self.shape_of(tensor), value=zero)

    def unbroadcast(self, gradient: str, source: str, target: str, axes: slice = slice(None)) -> str:
        """Sum a gradient shaped like forward tensor `source` down to the shape of `target`.

        `axes` are those of both tensors that were broadcast; the others are the gradient's own. Where
        inferred sizes leave open whether an axis of `target` was stretched, the step decides as it runs.
        """
        wide, narrow = self.shape(source)[axes], self.shape(target)[axes]
        new_axes = len(wide) - len(narrow)
        if new_axes:
            gradient = self.op("ReduceSum", gradient, self.build.ints(*range(new_axes)), keepdims=0)
        pairs = list(enumerate(zip(narrow, wide[new_axes:], strict=True)))
        stretched = [axis for axis, (size, of) in pairs if size == 1 and of != 1]
        if stretched:
            gradient = self.op("ReduceSum", gradient, self.build.ints(*stretched), keepdims=1)
        open_axes = [axis for axis, (size, of) in pairs if may_be_stretched(size, of)]
        return self.sum_where_narrow(gradient, target, open_axes) if open_axes else gradient

    def sum_where_narrow(self, gradient: str, target: str, axes: Sequence[int]) -> str:
        """Sum along some axes down to their sizes in `target`: to 1, or not at all.

        [.., n, ..] is seen as [.., n / m, m, ..] for the size m that the target has as the step runs.
        """
        sizes: list[str] = []
        copies = []
        own = self.op("Shape", gradient)
        for axis in range(axes[-1] + 1):
            size = self.op("Slice", own, self.build.ints(axis), self.build.ints(axis + 1))
            if axis in axes:
                length = self.op("Gather", self.shape_of(target), self.build.ints(axis))
                copies.append(len(sizes))
                sizes += [self.op("Div", size, self.op("Max", length, self.build.ints(1))), length]
            else:
                sizes.append(size)
        rest = self.op("Slice", own, self.build.ints(axes[-1] + 1), self.build.ints(np.iinfo(np.int64).max))
        split = self.op("Reshape", gradient, self.op("Concat", *sizes, rest, axis=0), allowzero=1)
        return self.op("ReduceSum", split, self.build.ints(*copies), keepdims=0)


def may_be_stretched(narrow: Size, wide: Size) -> bool:
    """Tell whether a size that no number says may be 1 where the broadcast size is another."""
    return not isinstance(narrow, int) and wide != 1 and (narrow is None or narrow != wide)


# A rule takes the gradients of a node's outputs (None: no gradient arrives there) and returns the
# gradients of those inputs that have one. What nobody reads is dropped later.
Gradients = Mapping[int, str]
Rule = Callable[[ForwardNode, Sequence[str | None]], Gradients]
SingleOutputRule = Callable[[ForwardNode, str], Gradients]


def of_first_output(rule: SingleOutputRule) -> Rule:
    """Make a rule of one that only knows the gradient of output 0."""

    def full_rule(at: ForwardNode, gradients: Sequence[str | None]) -> Gradients:
        if any(gradients[1:]) or gradients[0] is None:
            raise UnsupportedModel(
                "the loss depends on a secondary output, whose gradient is not known",
                at=at.place,
                fix="compute that value with other ops, or do not use it in the loss",
            )
        return rule(at, gradients[0])

    return full_rule


def broadcasting(rule: SingleOutputRule) -> Rule:
    """Make a rule of one that returns gradients of the output's shape: sum them to the inputs'."""

    def summed(at: ForwardNode, dy: str) -> Gradients:
        return {
            index: at.unbroadcast(gradient, at.y(), at.x(index))
            for index, gradient in rule(at, dy).items()
            if index in at.gradient_inputs
        }

    return of_first_output(summed)
