"""What shape inference knows about the tensors of a forward graph."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.compiler.model_files.check_element_types import check_element_types
from partc.compiler.model_files.check_operand_shapes import check_operand_shapes
from partc.passes.graph.infer_shapes import infer_shapes
from partc.runtime.errors import UnsupportedModel

Size = int | str | None  # a number, a symbol, or unknown
Shape = tuple[Size, ...]

FLOATS = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
    }
)
UNINFERRED = frozenset(
    {"GroupNormalization", "MeanVarianceNormalization"}
)  # ONNX 1.23 infers no type of theirs
SMALL_ELEMENTS = 4096  # constants up to this size are read while differentiating


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type (onnx.TensorProto.DataType) and shape; None when even the rank is unknown."""

    element: int
    shape: Shape | None

    @property
    def is_float(self) -> bool:
        """Tell whether a gradient can flow through such a tensor."""
        return self.element in FLOATS

    @property
    def dtype(self) -> np.dtype:
        """Return the numpy element type."""
        return helper.tensor_dtype_to_np_dtype(self.element)


Types = Mapping[str, TensorType]


def infer_types(model: onnx.ModelProto) -> dict[str, TensorType]:
    """Return the type of every tensor of the main graph, as far as ONNX can tell."""
    light = without_large_values(model)
    inferred = infer_shapes(light, data_prop=True)
    types = {
        initializer.name: TensorType(initializer.data_type, tuple(initializer.dims))
        for initializer in inferred.graph.initializer
    }
    values = (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
    return types | {value.name: type_of(value) for value in values}


def check_shapes(model: onnx.ModelProto) -> None:
    """Raise BadModel where the shapes, or the element types, of a node's inputs do not fit together."""
    inferred = infer_shapes(without_large_values(model), strict_mode=True)
    check_element_types(inferred)
    check_operand_shapes(inferred)


def type_of(value: onnx.ValueInfoProto) -> TensorType:
    """Read a ValueInfoProto."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type, None)
    return TensorType(tensor.elem_type, tuple(_size(dimension) for dimension in tensor.shape.dim))


def value_info(name: str, type_: TensorType) -> onnx.ValueInfoProto:
    """Write a ValueInfoProto."""
    return helper.make_tensor_value_info(name, type_.element, type_.shape)


def known_shape(types: Types, tensor: str, *, needed_by: str) -> Shape:
    """Return a tensor's shape. Raises UnsupportedModel when its rank is unknown."""
    type_ = types.get(tensor)
    if type_ is None or type_.shape is None:
        raise UnsupportedModel(
            f"the rank of tensor {tensor!r} is unknown",
            at=needed_by,
            fix="give the graph's inputs shapes, or add value_info for this tensor",
        )
    return type_.shape


def static_shape(types: Types, tensor: str, *, needed_by: str) -> tuple[int, ...]:
    """Return a shape of numbers. Raises UnsupportedModel when a size is not known."""
    shape = known_shape(types, tensor, needed_by=needed_by)
    numbers = tuple(size for size in shape if isinstance(size, int))
    if len(numbers) == len(shape):
        return numbers
    raise UnsupportedModel(
        f"tensor {tensor!r} of shape {list(shape)} needs a static shape",
        at=needed_by,
        fix="export the model with this shape fixed; only the batch may be symbolic",
    )


def small_constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Return the values of small initializers and Constant nodes."""
    tensors = [(t.name, t) for t in graph.initializer if not t.external_data]
    tensors += [
        (node.output[0], constant)
        for node in graph.node
        if node.op_type == "Constant" and (constant := constant_tensor(node)) is not None
    ]
    return {
        name: numpy_helper.to_array(tensor)
        for name, tensor in tensors
        if element_count(tensor.dims) <= SMALL_ELEMENTS
    }


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor of a Constant node, whichever attribute holds it; None if it is sparse or text."""
    attribute = node.attribute[0]
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return value  # type: ignore[no-any-return]  # get_attribute_value is untyped
    if attribute.name in ("value_float", "value_floats"):
        return numpy_helper.from_array(np.array(value, np.float32))
    if attribute.name in ("value_int", "value_ints"):
        return numpy_helper.from_array(np.array(value, np.int64))
    return None


def element_count(sizes: Iterable[int]) -> int:
    """Return the product of sizes."""
    count = 1
    for size in sizes:
        count *= size
    return count


def _size(dimension: onnx.TensorShapeProto.Dimension) -> Size:
    if dimension.HasField("dim_value"):
        return dimension.dim_value
    return dimension.dim_param or None


def without_large_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy the model; initializers that shape inference need not read become inputs."""
    light = without_initializers(model)
    already = {value.name for value in light.graph.input}
    for initializer in model.graph.initializer:
        if element_count(initializer.dims) <= SMALL_ELEMENTS and not initializer.external_data:
            light.graph.initializer.append(initializer)
        elif initializer.name not in already:
            type_ = TensorType(initializer.data_type, tuple(initializer.dims))
            light.graph.input.append(value_info(initializer.name, type_))
    for node in light.graph.node:
        if node.op_type in UNINFERRED:
            _make_identity(node)
    return light


def _make_identity(node: onnx.NodeProto) -> None:
    """Let shape inference see an op that infers nothing, and whose output is like its first input."""
    node.op_type = "Identity"
    del node.input[1:]
    del node.attribute[:]


def without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model's graph, opsets and functions, but not its initializers, which may be large."""
    graph = model.graph
    copy = helper.make_graph(graph.node, graph.name, graph.input, graph.output, value_info=graph.value_info)
    return helper.make_model(
        copy,
        opset_imports=model.opset_import,
        functions=model.functions,
        ir_version=model.ir_version,
    )
