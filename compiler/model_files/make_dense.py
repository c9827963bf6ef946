"""Write sparse tensors as dense ones, which all of partc reads.

    sparse_initializer SP, values {1, 2} at {1, 7} of [4, 4]      initializer SP float[4,4]
    Constant <sparse_value = ...> ()                              Constant <value = ...> ()

ONNX Runtime makes them dense as well.
"""

from collections.abc import Iterator
from math import prod

import numpy as np
import onnx
from onnx import SparseTensorProto, TensorProto, numpy_helper

from partc.compiler.model_files.check_tensors import check_tensor
from partc.passes.graph.bodies import subgraphs_of
from partc.runtime.errors import BadModel, UnsupportedModel

LIMIT_BYTES = 1 << 28  # of all that is made dense: a file of a few bytes may claim any shape

_Nodes = onnx.GraphProto | onnx.FunctionProto


def make_dense(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without sparse tensors, also in bodies and functions; the model itself if it has none.

    Raises BadModel for one that is wrong, UnsupportedModel for one that is too large.
    """
    if not any(_sparse_tensors(model)):
        return model
    _check_size(model)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for nodes in _all_nodes(result):
        if isinstance(nodes, onnx.GraphProto):
            nodes.initializer.extend([_dense(sparse) for sparse in nodes.sparse_initializer])
            del nodes.sparse_initializer[:]
        for attribute in _sparse_attributes(nodes):
            dense = _dense(attribute.sparse_tensor)
            attribute.Clear()
            attribute.CopyFrom(onnx.helper.make_attribute("value", dense))
    return result


def _sparse_tensors(model: onnx.ModelProto) -> Iterator[SparseTensorProto]:
    for nodes in _all_nodes(model):
        if isinstance(nodes, onnx.GraphProto):
            yield from nodes.sparse_initializer
        for attribute in _sparse_attributes(nodes):
            yield attribute.sparse_tensor


def _all_nodes(model: onnx.ModelProto) -> Iterator[_Nodes]:
    """Yield what holds nodes: graphs, functions, and the bodies in them."""
    found: list[_Nodes] = [model.graph, *model.functions]
    found += [graph for info in model.training_info for graph in (info.initialization, info.algorithm)]
    while found:
        yield (nodes := found.pop())
        found += [body for node in nodes.node for body in subgraphs_of(node)]


def _sparse_attributes(nodes: _Nodes) -> Iterator[onnx.AttributeProto]:
    for node in nodes.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            yield from (each for each in node.attribute if each.HasField("sparse_tensor"))


def _check_size(model: onnx.ModelProto) -> None:
    """Raise UnsupportedModel if dense tensors would be out of proportion."""
    total_bytes = sum(map(_size_bytes, _sparse_tensors(model)))
    if total_bytes <= LIMIT_BYTES:
        return
    largest = max(_sparse_tensors(model), key=_size_bytes)
    raise UnsupportedModel(
        f"sparse tensors are made dense, which takes {total_bytes} bytes; allowed are {LIMIT_BYTES}",
        at=f"{_place(largest)} ({_size_bytes(largest)} bytes)",
        fix="gather from, or scatter into, a dense tensor of the entries that are not zero",
    )


def _size_bytes(sparse: SparseTensorProto) -> int:
    check_tensor(sparse.values, _place(sparse))
    if sparse.values.data_type == TensorProto.STRING or min(sparse.dims, default=0) < 0:
        raise _bad(sparse, "a sparse tensor of texts or of a negative size")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(sparse.values.data_type)
    return int(prod(sparse.dims) * dtype.itemsize)


def _dense(sparse: SparseTensorProto) -> TensorProto:
    values = _array(sparse, sparse.values)
    dense = np.zeros(prod(sparse.dims), values.dtype)
    dense[_positions(sparse, values.size)] = values
    return numpy_helper.from_array(dense.reshape(tuple(sparse.dims)), sparse.values.name)


def _positions(sparse: SparseTensorProto, count: int) -> np.ndarray:
    """Return where the values lie in the flat tensor: int64[count], ascending."""
    indices, shape = _array(sparse, sparse.indices), tuple(sparse.dims)
    if sparse.indices.data_type != TensorProto.INT64 or indices.shape not in ((count,), (count, len(shape))):
        raise _bad(sparse, f"indices of shape {list(indices.shape)} for {count} values of {list(shape)}")
    limits = np.array(shape if indices.ndim == 2 else [prod(shape)])
    if count and ((indices < 0) | (indices >= limits)).any():
        raise _bad(sparse, f"indices outside of its shape {list(shape)}")
    positions = np.ravel_multi_index(tuple(indices.T), shape) if indices.ndim == 2 else indices
    if (np.diff(positions) <= 0).any():
        raise _bad(sparse, "indices that do not ascend")
    return np.asarray(positions)


def _array(sparse: SparseTensorProto, tensor: TensorProto) -> np.ndarray:
    if tensor.data_location == TensorProto.EXTERNAL:
        raise _bad(sparse, "a sparse tensor in external data", fix="keep its values in the model file")
    check_tensor(tensor, _place(sparse))
    return numpy_helper.to_array(tensor)


def _place(sparse: SparseTensorProto) -> str:
    return f"sparse tensor {sparse.values.name!r}"


def _bad(sparse: SparseTensorProto, what: str, fix: str = "write the tensor as a dense one") -> BadModel:
    return BadModel(what, at=_place(sparse), fix=fix)
