"""Small values that a graph computes from constants and shapes alone: conditions and trip counts."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from partc.compiler.training.node_builder import RANDOM_OPS
from partc.compiler.training.tensor_types import SMALL_ELEMENTS, Types, element_count, small_constants
from partc.passes.infer_shapes import infer_shapes
from partc.runtime.errors import BadModel

OPSET = 21  # what tells a condition from a shape has not changed in any opset from 13 on


class KnownValues:
    """Values by tensor, evaluated when asked for."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._values: dict[str, np.ndarray | None] = dict(small_constants(graph))
        self._makers: dict[str, onnx.NodeProto] = {}

    def saw(self, node: onnx.NodeProto) -> None:
        """Take note of a node."""
        self._makers.update(dict.fromkeys((name for name in node.output if name), node))

    def learn(self, name: str, tensor: TensorProto) -> None:
        """Take note of a constant."""
        if element_count(tensor.dims) <= SMALL_ELEMENTS:
            self._values[name] = numpy_helper.to_array(tensor)

    def value(self, name: str, types: Types) -> np.ndarray | None:
        """Return a tensor's value, None if it depends on data."""
        waiting = [name]
        while waiting:
            tensor = waiting[-1]
            node = self._makers.get(tensor)
            if tensor in self._values or node is None:
                self._values.setdefault(tensor, None)
                waiting.pop()
                continue
            missing = (
                [] if node.op_type == "Shape" else [x for x in node.input if x and x not in self._values]
            )
            if missing:
                waiting.extend(missing)
                continue
            self._values.update(self._evaluate(node, types))
            waiting.pop()
        return self._values[name]

    def _evaluate(self, node: onnx.NodeProto, types: Types) -> dict[str, np.ndarray | None]:
        unknown: dict[str, np.ndarray | None] = dict.fromkeys(name for name in node.output if name)
        if node.op_type == "Shape":
            type_ = types.get(node.input[0])
            if type_ is None or type_.shape is None:
                return unknown
            sizes = [size for size in type_.shape if isinstance(size, int)]
            if len(sizes) < len(type_.shape):
                return unknown
            feeds = {node.input[0]: np.broadcast_to(np.float32(0), sizes)}
        else:
            values = {name: self._values[name] for name in node.input if name}
            feeds = {name: value for name, value in values.items() if value is not None}
            if (
                len(feeds) < len(values)
                or node.op_type in RANDOM_OPS
                or any(a.HasField("g") for a in node.attribute)
            ):
                return unknown
        return {**unknown, **_run(node, feeds)}


def _run(node: onnx.NodeProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a node makes of small values, nothing where that would be large. Raises BadModel."""
    names = [name for name in node.output if name]
    graph = helper.make_graph([node], "known", [], [onnx.ValueInfoProto(name=name) for name in names])
    for name, value in feeds.items():
        element = helper.np_dtype_to_tensor_dtype(value.dtype)
        graph.input.append(helper.make_tensor_value_info(name, element, value.shape))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    try:
        if not _makes_small(model, feeds):
            return {}
        results = ReferenceEvaluator(model).run(names, feeds)
    except Exception as error:  # whatever a kernel of the reference raises on values it does not take
        raise BadModel(
            f"constants that cannot be computed: {error}",
            at=f"node {node.name or names[0]!r} ({node.op_type})",
            fix="mend the node, or the constants that it reads",
        ) from error
    return dict(zip(names, (np.asarray(result) for result in results), strict=True))


def _makes_small(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> bool:
    """Tell whether every result is small by ONNX's own inference, before anything is computed."""
    told = onnx.ModelProto()
    told.CopyFrom(model)
    del told.graph.input[:]
    small = {name: value for name, value in feeds.items() if value.size <= SMALL_ELEMENTS}
    told.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in small.items())
    told.graph.input.extend(info for info in model.graph.input if info.name not in small)
    inferred = infer_shapes(told, data_prop=True)
    shapes = [value.type.tensor_type.shape for value in inferred.graph.output]
    sizes = [[dim.dim_value for dim in shape.dim if dim.HasField("dim_value")] for shape in shapes]
    return all(element_count(known) <= SMALL_ELEMENTS for known in sizes)
