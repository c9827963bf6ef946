"""Constants, embedded in the model; those of one value over and over are made instead of stored.

    before   initializer zeros float[800000, 512]     after   ConstantOfShape <value = 0> ([800000, 512])

PyTorch's exporter bakes the accumulator of an embedding's gradient at the table's full size.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_model

from partc.compiler.model_files.model_file import PROTOBUF_LIMIT_BYTES
from partc.runtime.errors import UnsupportedModel

STREAM_FROM_BYTES = 1 << 16  # smaller tensors are not worth the reading
_CHUNK_BYTES = 1 << 22


def repeated_value(tensor: TensorProto, folder: Path) -> np.ndarray | None:
    """Return the value (0-d) that every element of a large tensor has, or None."""
    if tensor.data_type == TensorProto.STRING:
        return None
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if _size_bytes(tensor) < STREAM_FROM_BYTES:
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


def embed_constants(model: onnx.ModelProto, folder: Path) -> None:
    """Bring all external data into the model: no such files lie beside a plan's copy of it.

    Raises UnsupportedModel if the constants are more than a model can hold.
    """
    _make_repeated_constants(model, folder)
    sizes = {tensor.name: _size_bytes(tensor) for tensor in model.graph.initializer}
    if sum(sizes.values()) > PROTOBUF_LIMIT_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UnsupportedModel(
            f"{sum(sizes.values())} bytes of constants, but a plan's model holds at most "
            f"{PROTOBUF_LIMIT_BYTES}",
            at=f"initializer {largest!r} ({sizes[largest]} bytes)",
            fix="make it an input and an output too, a variable that never changes: --state "
            f"{largest}={largest},...",
        )
    load_external_data_for_model(model, str(folder))


def _size_bytes(tensor: TensorProto) -> int:
    if tensor.data_type == TensorProto.STRING:
        return 0
    return int(prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _make_repeated_constants(model: onnx.ModelProto, folder: Path) -> None:
    """Replace large initializers of one repeated value by ConstantOfShape."""
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
