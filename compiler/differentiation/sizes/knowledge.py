"""What is known of a graph's tensors before it runs: types, and the values that shapes are made of.

Nodes are seen one after another, in their order. A size that nobody can tell gets a symbol of its own,
so that what is computed from it twice is known to be equal.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.sizes.evaluate import (
    Entries,
    SizeNode,
    as_values,
    evaluate_sizes,
    numbers_of,
    symbols_of,
)
from partc.compiler.differentiation.sizes.shapes import SHAPED_BY_VALUES, output_shape, product
from partc.compiler.differentiation.tensor_types import (
    SMALL_ELEMENTS,
    Size,
    TensorType,
    Types,
    constant_tensor,
    element_count,
    type_of,
    value_info,
)
from partc.passes.graph.operation_builder import RANDOM_OPS

INTEGERS = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})
GROWING = frozenset({"Add", "Mul", "Div", "Max", "Min", "Mod"})  # make sizes of sizes, none negative
MAX_FLOATS = 64  # of a value that is known: scales and bounds, not weights
STANDARD = ("", "ai.onnx")
# The reference implementation checks little: for values that a node does not take it raises what numpy and
# Python raise inside, each of these for some op; ImportError for ops that want a library which is not there.
UNCOMPUTABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
UNINFERABLE = (onnx.shape_inference.InferenceError, onnx.defs.SchemaError, onnx.checker.ValidationError)


class Knowledge:
    """Types and values by tensor.

    `types` is what ONNX's inference says of the whole graph, which knows subgraphs too. With `shapes`
    False a tensor's shape is no value: it may yet change. Values of float initializers stay unknown.
    """

    def __init__(self, graph: onnx.GraphProto, opset: int, types: Types, *, shapes: bool = True) -> None:
        self.types: dict[str, TensorType] = {}
        self.values: dict[str, np.ndarray] = {}  # known whole
        self.opset = opset
        self._opsets = [helper.make_opsetid("", opset)]
        self._expected = types
        self._reads_shapes = shapes
        self._protos: dict[str, onnx.TypeProto] = {}
        self._sizes: dict[str, Entries] = {}  # integers, some of them symbols
        self._symbols: dict[object, str] = {}
        for value in graph.input:
            self._learn_type(value.name, value.type)
        for tensor in graph.initializer:
            self.learn(tensor.name, tensor, is_parameter=True)

    def learn(self, name: str, tensor: TensorProto, *, is_parameter: bool = False) -> None:
        """Take note of a constant, or of a float that may be trained."""
        self._set_type(name, TensorType(tensor.data_type, tuple(tensor.dims)))
        if tensor.external_data or element_count(tensor.dims) > SMALL_ELEMENTS:
            return
        if tensor.data_type in INTEGERS or (not is_parameter and self._is_small_float(name)):
            self._set_value(name, numpy_helper.to_array(tensor))

    def value(self, name: str) -> np.ndarray | None:
        """Return a tensor's value, None if it depends on data or on symbolic sizes."""
        return self.values.get(name)

    def saw(self, node: onnx.NodeProto) -> None:
        """Take note of a node."""
        if node.op_type == "Constant" and node.domain in STANDARD:
            tensor = constant_tensor(node)
            if tensor is not None:
                self.learn(node.output[0], tensor)
            return
        inputs = tuple(self._sizes_of(name) for name in node.input)
        self._infer(node, inputs)
        if node.domain in STANDARD and node.output and node.output[0] in self.types:
            self._evaluate(node, inputs)

    # ------------------------------------------------------------ types

    def _infer(self, node: onnx.NodeProto, inputs: Sequence[Entries | None]) -> None:
        for name, proto in self._infer_node(node).items():
            self._learn_type(name, proto)
        for name in filter(None, node.output):
            expected = self._expected.get(name)
            if expected is not None and expected.element and self._is_vaguer(name, expected):
                self._set_type(name, expected)
        if node.domain in STANDARD and node.op_type in SHAPED_BY_VALUES:
            self._infer_from_values(node, inputs)
        for name in filter(None, node.output):
            self._name_unknown_sizes(name)

    def _infer_node(self, node: onnx.NodeProto) -> dict[str, onnx.TypeProto]:
        """Return what ONNX infers of one node; nothing where it cannot."""
        names = [name for name in node.input if name]
        if node.domain not in STANDARD or not all(
            name in self.types or name in self._protos for name in names
        ):
            return {}
        values = {name: numpy_helper.from_array(self.values[name]) for name in names if name in self.values}
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset)
            return dict(
                onnx.shape_inference.infer_node_outputs(
                    schema,
                    node,
                    {name: self._proto(name) for name in names},
                    values,
                    opset_imports=self._opsets,
                    ir_version=10,
                )
            )
        except UNINFERABLE:
            return {}

    def _infer_from_values(self, node: onnx.NodeProto, inputs: Sequence[Entries | None]) -> None:
        name = node.output[0]
        shapes = [self.types[x].shape if x in self.types else None for x in node.input]
        shape = output_shape(SizeNode(node, inputs, ()), shapes)
        if shape is None or name not in self.types:
            return
        type_ = self.types[name]
        if type_.shape is None or len(type_.shape) == len(shape):
            old_shape = type_.shape or (None,) * len(shape)
            merged = tuple(
                size if isinstance(size, int) or other is None else other
                for size, other in zip(old_shape, shape, strict=True)
            )
            self._set_type(name, TensorType(type_.element, merged))

    def _is_vaguer(self, name: str, expected: TensorType) -> bool:
        type_ = self.types.get(name)
        return type_ is None or (type_.shape is None and expected.shape is not None)

    def _name_unknown_sizes(self, name: str) -> None:
        type_ = self.types.get(name)
        if type_ is None or type_.shape is None or None not in type_.shape:
            return
        sizes = tuple(
            self._symbol((name, axis), f"{name}_axis{axis}") if size is None else size
            for axis, size in enumerate(type_.shape)
        )
        self._set_type(name, TensorType(type_.element, sizes))

    def _symbol(self, key: object, name: str) -> str:
        """Return the symbol of what a key says; a product is spelled with *."""
        return self._symbols.setdefault(key, name.replace("*", "_"))

    def _learn_type(self, name: str, proto: onnx.TypeProto) -> None:
        if not proto.HasField("tensor_type"):
            self._protos[name] = proto
        elif proto.tensor_type.elem_type != TensorProto.UNDEFINED:
            self._protos[name] = proto
            self.types[name] = type_of(onnx.ValueInfoProto(name=name, type=proto))

    def _set_type(self, name: str, type_: TensorType) -> None:
        if self.types.get(name) != type_:
            self.types[name] = type_
            self._protos.pop(name, None)

    def _proto(self, name: str) -> onnx.TypeProto:
        """Return a type as ONNX reads it, made when it is first asked for."""
        if name not in self._protos:
            self._protos[name] = value_info(name, self.types[name]).type
        return self._protos[name]

    # ------------------------------------------------------------ values

    def _sizes_of(self, name: str) -> Entries | None:
        """Return a small integer tensor's values, symbols among them."""
        if name not in self._sizes and name in self.values and self.types[name].element in INTEGERS:
            self._sizes[name] = symbols_of(self.values[name])
        return self._sizes.get(name)

    def _evaluate(self, node: onnx.NodeProto, inputs: Sequence[Entries | None]) -> None:
        name = node.output[0]
        if node.op_type in ("Shape", "Size"):
            self._learn_shape(node)
            return
        shape = self._static_shape(name)
        if shape is None or not self._is_small(name):
            return
        sizes = None
        if self.types[name].element in INTEGERS and self._reads_integers(node):
            sizes = evaluate_sizes(SizeNode(node, inputs, shape))
        if sizes is not None and sizes.shape == shape:
            self._set_sizes(name, self._name_unknown_results(node, inputs, sizes))
        elif all(x in self.values for x in node.input if x) and self._is_pure(node):
            self._run(node)

    def _learn_shape(self, node: onnx.NodeProto) -> None:
        shape = self.types[node.input[0]].shape if node.input[0] in self.types else None
        if shape is None or not self._reads_shapes:
            return
        if node.op_type == "Size":
            self._set_sizes(node.output[0], as_values([product(shape)]).reshape(()))
            return
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        selected = shape[slice(bounds.get("start", 0), bounds.get("end"))]
        self._set_sizes(node.output[0], as_values(selected))

    def _name_unknown_results(
        self, node: onnx.NodeProto, inputs: Sequence[Entries | None], sizes: Entries
    ) -> Entries:
        """Give symbols to sizes that were computed from sizes: equal computations are equal."""
        if node.op_type not in GROWING:
            return sizes
        known_inputs = [
            values for values in inputs if values is not None
        ]  # all of them, or nothing came of it
        operands = [array.ravel() for array in np.broadcast_arrays(*known_inputs)]
        results = [
            size if size is not None else self._symbol_of(node, index, tuple(elements))
            for index, (size, *elements) in enumerate(zip(sizes.ravel(), *operands, strict=True))
        ]
        return as_values(results).reshape(sizes.shape)

    def _symbol_of(self, node: onnx.NodeProto, index: int, operands: tuple[Size, ...]) -> str | None:
        """Return a symbol for what an operation makes of sizes; it must not be negative."""
        if any(size is None or (isinstance(size, int) and size < 0) for size in operands):
            return None
        return self._symbol((node.op_type, operands), f"{node.output[0]}_{index}")

    def _set_sizes(self, name: str, sizes: Entries) -> None:
        numbers = numbers_of(sizes, self.types[name].element)
        if numbers is None:
            self._sizes[name] = sizes
        else:
            self._set_value(name, numbers)

    def _set_value(self, name: str, value: np.ndarray) -> None:
        self.values[name] = value
        self._set_type(name, TensorType(self.types[name].element, value.shape))

    def _run(self, node: onnx.NodeProto) -> None:
        feeds = {name: self.values[name] for name in node.input if name}
        names = [name for name in node.output if name]
        results = _run(node, feeds, self.opset)
        for name, result in zip(names, results, strict=False):
            if name in self.types and self.types[name].dtype == result.dtype and self._is_small(name):
                self._set_value(name, result)

    def _is_pure(self, node: onnx.NodeProto) -> bool:
        """Tell whether a node makes the same of the same, and no parameter, as floats of one value may be."""
        if node.op_type in RANDOM_OPS or any(attribute.HasField("g") for attribute in node.attribute):
            return False
        return node.op_type != "ConstantOfShape" or not self.types[node.output[0]].is_float

    def _static_shape(self, name: str) -> tuple[int, ...] | None:
        shape = self.types[name].shape
        if shape is None:
            return None
        numbers = tuple(size for size in shape if isinstance(size, int))
        return numbers if len(numbers) == len(shape) else None

    def _reads_integers(self, node: onnx.NodeProto) -> bool:
        first = node.input[:1] if node.op_type == "CastLike" else node.input
        return all(self.types[x].element in INTEGERS for x in first if x in self.types)

    def _is_small(self, name: str) -> bool:
        """Tell whether a tensor's values are worth knowing."""
        shape, element = self._static_shape(name), self.types[name].element
        if shape is None:
            return False
        return element_count(shape) <= (SMALL_ELEMENTS if element in INTEGERS else MAX_FLOATS)

    def _is_small_float(self, name: str) -> bool:
        return self.types[name].is_float and self._is_small(name)


def _run(node: onnx.NodeProto, feeds: Mapping[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Return a node's outputs as ONNX's reference implementation computes them; none where it cannot."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    names = [name for name in node.output if name]
    graph = helper.make_graph([node], "known", inputs, [onnx.ValueInfoProto(name=name) for name in names])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    try:
        with np.errstate(all="ignore"):
            return [np.asarray(result) for result in ReferenceEvaluator(model).run(names, dict(feeds))]
    except UNCOMPUTABLE:
        return []  # the node tells when it runs
