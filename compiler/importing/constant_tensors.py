"""Tensors that hold one value over and over: recognised by streaming, then made instead of stored.

    before   initializer zeros float[800000, 512]     after   ConstantOfShape <value = 0> ([800000, 512])

PyTorch's exporter bakes the accumulator of an embedding's gradient at the table's full size.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo

STREAM_FROM_BYTES = 1 << 16  # smaller tensors are not worth the reading
_CHUNK_BYTES = 1 << 22


def repeated_value(tensor: TensorProto, folder: Path) -> np.ndarray | None:
    """Return the value (0-d) that every element of a large tensor has, or None."""
    if tensor.data_type == TensorProto.STRING:
        return None
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if int(np.prod(tensor.dims, dtype=np.int64)) * dtype.itemsize < STREAM_FROM_BYTES:
        return None
    first: bytes | None = None
    for chunk in _chunks(tensor, folder):
        # Equal bytes, not equal values: -0.0 and NaN keep their identity.
        words = np.frombuffer(chunk, dtype=np.dtype((np.void, dtype.itemsize)))
        first = first or words[0].tobytes()
        if words.tobytes() != first * len(words):
            return None
    return None if first is None else np.frombuffer(first, dtype=dtype)[0].reshape(())


def _chunks(tensor: TensorProto, folder: Path) -> Iterator[bytes]:
    if tensor.data_location == TensorProto.EXTERNAL:
        yield from _file_chunks(ExternalDataInfo(tensor), folder)
        return
    data = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _file_chunks(info: ExternalDataInfo, folder: Path) -> Iterator[bytes]:
    with (folder / info.location).open("rb") as file:
        file.seek(info.offset or 0)
        remaining_bytes = info.length if info.length is not None else (folder / info.location).stat().st_size
        while remaining_bytes and (chunk := file.read(min(remaining_bytes, _CHUNK_BYTES))):
            remaining_bytes -= len(chunk)
            yield chunk


def make_repeated_constants(model: onnx.ModelProto, folder: Path) -> int:
    """Replace large initializers of one repeated value by ConstantOfShape; return how many."""
    graph = model.graph
    inputs = {info.name for info in graph.input}
    constant_nodes: list[onnx.NodeProto] = []
    for index, tensor in reversed([*enumerate(graph.initializer)]):
        value = None if tensor.name in inputs else repeated_value(tensor, folder)
        if value is not None:
            constant_nodes = _constant_of_shape(tensor.name, tuple(tensor.dims), value) + constant_nodes
            del graph.initializer[index]
    if constant_nodes:
        nodes = constant_nodes + list(graph.node)
        del graph.node[:]
        graph.node.extend(nodes)
    return len(constant_nodes) // 2


def _constant_of_shape(name: str, shape: tuple[int, ...], value: np.ndarray) -> list[onnx.NodeProto]:
    shape_name = f"{name}/shape"
    shape_tensor = numpy_helper.from_array(np.array(shape, dtype=np.int64), shape_name)
    return [
        helper.make_node("Constant", [], [shape_name], name=shape_name, value=shape_tensor),
        helper.make_node(
            "ConstantOfShape",
            [shape_name],
            [name],
            name=f"{name}/fill",
            value=numpy_helper.from_array(value.reshape(1), "value"),
        ),
    ]
