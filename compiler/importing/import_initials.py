"""Initial values of variables: where they lie, or how they are made. Nothing large is read here."""

import struct
from collections.abc import Callable, Set
from math import prod
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.importing.constant_tensors import repeated_value
from partc.passes.graph.infer_shapes import infer_shapes
from partc.passes.graph.training_graph import InitialValue, MadeTensor, StoredTensor
from partc.runtime.data.npz import read_npz
from partc.runtime.errors import BadData, BadModel
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.plan.variables import Constant, Normal, Uniform

_CHECKED_ELEMENTS = 1 << 22  # at a time


def read_initial_values(
    model: onnx.ModelProto, folder: Path, file: Path | None = None, variables: Set[str] = frozenset()
) -> dict[str, InitialValue]:
    """Return every initial value that the model or `file` gives, by variable.

    `file` (.npz or .safetensors) wins over training_info, and that over initializers; it may name
    `variables` and nothing else, and holds finite numbers. Raises BadModel.
    """
    values: dict[str, InitialValue] = {
        tensor.name: _read_initializer(tensor, folder) for tensor in model.graph.initializer
    }
    for training in model.training_info:
        values |= _made_values(training, model)
    if file is not None:
        file_values = _file_values(file)
        if stray := sorted(file_values.keys() - variables):
            raise BadModel(
                f"an initial value for {stray[0]!r}, which is no variable",
                at=str(file),
                fix=f"name the tensors as the variables are: {', '.join(sorted(variables)[:8])}; to train on "
                "with another optimizer or other parameters, make the step of the trained model, which "
                f"`partc run` writes: partc grad {file.with_name('trained.onnx')} ...",
            )
        for name, value in file_values.items():
            _check_finite(name, value, file)
        values |= file_values
    return values


def _read_initializer(tensor: TensorProto, folder: Path) -> InitialValue:
    value = repeated_value(tensor, folder)
    if value is not None and np.isfinite(value):
        return Constant(float(value))
    return StoredTensor(tensor, folder)


# ---------------------------------------------------------------- training_info.initialization


def _made_values(training: onnx.TrainingInfoProto, model: onnx.ModelProto) -> dict[str, InitialValue]:
    graph = training.initialization
    makers = {name: node for node in graph.node for name in node.output}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    values: dict[str, InitialValue] = {}
    for binding in training.initialization_binding:
        node = makers.get(binding.value)
        if node is not None:
            values[binding.key] = _run_maker(node, binding.value, graph, model)
        elif binding.value in initializers:
            values[binding.key] = StoredTensor(initializers[binding.value], Path())
        else:
            raise BadModel(
                f"initialization output {binding.value!r} is made by no node",
                at=f"training_info initialization_binding of {binding.key!r}",
                fix=f"add the node that makes {binding.value!r}, or bind another output",
            )
    return values


def _run_maker(
    node: onnx.NodeProto, output: str, graph: onnx.GraphProto, model: onnx.ModelProto
) -> InitialValue:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type in ("RandomNormal", "RandomUniform"):
        seed = _seed(attributes, node)
        if node.op_type == "RandomNormal":
            return Normal(attributes.get("mean", 0.0), attributes.get("scale", 1.0), seed)
        return Uniform(attributes.get("low", 0.0), attributes.get("high", 1.0), seed)
    if node.op_type == "ConstantOfShape":
        value = attributes.get("value")
        return Constant(float(numpy_helper.to_array(value).reshape(-1)[0]) if value is not None else 0.0)
    if node.op_type == "Constant" and "value" in attributes:
        return StoredTensor(attributes["value"], Path())
    return MadeTensor(_model_of(graph, output, model), output)


def _seed(attributes: dict[str, float], node: onnx.NodeProto) -> int:
    seed = attributes.get("seed")
    if seed is None or seed != int(seed):
        raise BadModel(
            f"{node.op_type} without a whole seed: two ranks would start from different values",
            at=f"training_info initialization, node {node.name or node.output[0]!r}",
            fix="give it a whole number as seed, as seed = 1.0",
        )
    return int(seed)


def _model_of(graph: onnx.GraphProto, output: str, model: onnx.ModelProto) -> onnx.ModelProto:
    needed_names, nodes = {output}, []
    for node in reversed(graph.node):
        if needed_names.intersection(node.output):
            nodes.append(node)
            needed_names.update(node.input)
    for node in nodes:
        if node.op_type.startswith(("Random", "Multinomial", "Bernoulli")):
            _seed({a.name: a.f for a in node.attribute}, node)
    result = helper.make_empty_tensor_value_info(output)
    inner = helper.make_graph(
        nodes[::-1], "initial", [], [result], [t for t in graph.initializer if t.name in needed_names]
    )
    model_proto = helper.make_model(inner, opset_imports=list(model.opset_import), ir_version=10)
    model_proto.functions.extend(model.functions)
    return infer_shapes(model_proto)


# ---------------------------------------------------------------- files


def _file_values(file: Path) -> dict[str, InitialValue]:
    readers: dict[str, Callable[[Path], dict[str, InitialValue]]] = {
        ".npz": _npz_values,
        ".safetensors": _safetensors_values,
    }
    if not file.is_file() or file.suffix not in readers:
        raise BadModel(
            "initial values that cannot be read" if file.is_file() else "no such file of initial values",
            at=str(file),
            fix="give a .npz or .safetensors file with one tensor per variable",
        )
    try:
        return readers[file.suffix](file)
    except (ValueError, KeyError, OSError, struct.error, BadData, *NOT_DECODED) as error:
        raise BadModel(
            f"initial values that cannot be read: {error}", at=str(file), fix="write the file again"
        ) from error


def _check_finite(name: str, value: InitialValue, file: Path) -> None:
    """Refuse a state that is none, as a training that diverged leaves it; read a block at a time."""
    assert isinstance(value, StoredTensor)
    if not prod(value.shape) or not (value.dtype.kind == "f" or value.dtype == ml_dtypes.bfloat16):
        return
    elements = value.load().reshape(-1)
    blocks = range(0, elements.size, _CHECKED_ELEMENTS)
    finite = sum(int(np.isfinite(elements[i : i + _CHECKED_ELEMENTS]).sum()) for i in blocks)
    if finite < elements.size:
        raise BadModel(
            f"the initial value of {name!r} is not finite:"
            f" {elements.size - finite} of {elements.size} elements are NaN or infinite",
            at=str(file),
            fix="give the variables of a training that did not diverge, or leave this one to the model",
        )


def _npz_values(file: Path) -> dict[str, InitialValue]:
    return {
        name: StoredTensor(numpy_helper.from_array(array, name), file.parent)
        for name, array in read_npz(file).items()
    }


_SAFETENSORS_TYPES = {
    "F64": TensorProto.DOUBLE,
    "F32": TensorProto.FLOAT,
    "F16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "I64": TensorProto.INT64,
    "I32": TensorProto.INT32,
    "I16": TensorProto.INT16,
    "I8": TensorProto.INT8,
    "U8": TensorProto.UINT8,
    "BOOL": TensorProto.BOOL,
}


def _safetensors_values(file: Path) -> dict[str, InitialValue]:
    """Describe each tensor as ONNX external data: an offset into the file, read when asked for.

    Source: the format's specification (8 bytes of header length, a JSON header, then the data).
    """
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        if header_bytes > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = msgspec.json.decode(stream.read(header_bytes), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    values: dict[str, InitialValue] = {}
    for name, text in header.items():
        entry = msgspec.json.decode(text, type=_Entry)
        start, stop = entry.data_offsets
        tensor = TensorProto(name=name, data_type=_SAFETENSORS_TYPES[entry.dtype], dims=entry.shape)
        size_bytes = prod(entry.shape) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        if min(entry.shape, default=0) < 0 or start < 0 or stop - start != size_bytes:
            raise ValueError(f"{name!r} takes bytes {start} to {stop}, its shape is {list(entry.shape)}")
        if 8 + header_bytes + stop > file.stat().st_size:
            raise ValueError(f"{name!r} ends behind the file")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", file.name), ("offset", 8 + header_bytes + start)):
            tensor.external_data.add(key=key, value=str(value))
        tensor.external_data.add(key="length", value=str(stop - start))
        values[name] = StoredTensor(tensor, file.parent)
    return values


class _Entry(msgspec.Struct):
    """One tensor of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
