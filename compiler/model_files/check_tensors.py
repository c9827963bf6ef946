"""What a model file says about its tensors, held to what it holds: before anything is read or allocated.

Every message of the file is looked at once, bodies and functions included:

    text       is UTF-8
    tensor     a known element type, no negative size, as many bytes as the sizes say; external ones in a
               file inside the model's folder
    type       a known element type, no size that no machine could hold
    function   calls no function that calls it
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, TensorProto, helper

from partc.runtime.errors import BadModel
from partc.runtime.plan.plan_folder import outside

MAX_BYTES = 1 << 44  # of one tensor: more than any machine has memory
_EXPORT_AGAIN = "export the model again, or mend the file"
_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
_TYPED_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
_MESSAGE, _STRING, _BYTES = (
    FieldDescriptor.TYPE_MESSAGE,
    FieldDescriptor.TYPE_STRING,
    FieldDescriptor.TYPE_BYTES,
)


def check_tensors(model: onnx.ModelProto, folder: Path | None) -> None:
    """Raise BadModel at the first claim that cannot be true.

    `folder`: where external data must lie; None: files are not looked at.
    """
    initializers = list(model.graph.initializer)  # as long as it lives, so do its entries' identities
    initializer_ids = {id(tensor) for tensor in initializers}
    for message, owner, is_of_function in _messages(model, "the model"):
        match message:
            case TensorProto():
                check_tensor(message, owner)
                if message.data_location == TensorProto.EXTERNAL:
                    _check_external(message, owner, id(message) in initializer_ids, folder)
            case onnx.TypeProto.Tensor():
                _check_type(message, owner)
            case AttributeProto():
                _check_attribute(message, owner, is_of_function)
    for value in model.graph.input:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
            raise BadModel("an input without an element type", at=f"input {value.name!r}", fix=_EXPORT_AGAIN)
    _check_functions(model.functions)


# ---------------------------------------------------------------- every message


def _messages(root: Message, owner: str) -> Iterator[tuple[Message, str, bool]]:
    """Yield every message, the nearest thing around it that has a name, and whether a function holds it.

    Checks texts on the way.
    """
    stack: list[tuple[Message, str, bool]] = [(root, owner, False)]
    while stack:
        message, owner, is_of_function = stack.pop()
        yield message, owner, is_of_function
        inner = _name_of(message) or owner
        is_of_function = is_of_function or isinstance(message, onnx.FunctionProto)
        for field, value in message.ListFields():
            if field.type == _MESSAGE:
                children = value if _is_many(value) else [value]
                stack += [(child, inner, is_of_function) for child in children]
            elif field.type == _STRING:
                _check_texts(value, field.name, owner)
            elif field.type == _BYTES and isinstance(message, AttributeProto):
                _check_attribute_texts(message, owner)


def _check_texts(value: object, field: str, owner: str) -> None:
    texts = value if isinstance(value, Iterable) and not isinstance(value, str | bytes) else [value]
    for text in texts:
        if isinstance(text, bytes):  # protobuf's way to return a string that is no text
            raise BadModel(f"{field} {text[:40]!r} is not UTF-8", at=owner, fix=_EXPORT_AGAIN)


def _check_attribute_texts(attribute: AttributeProto, owner: str) -> None:
    for text in (attribute.s, *attribute.strings):
        try:
            text.decode()
        except UnicodeDecodeError as error:
            at = f"{owner}, attribute {attribute.name!r}"
            raise BadModel(f"text {text[:40]!r} is not UTF-8", at=at, fix=_EXPORT_AGAIN) from error


def _is_many(value: object) -> bool:
    return not isinstance(value, Message)


def _name_of(message: Message) -> str:
    if isinstance(message, onnx.NodeProto):
        return f"node {message.name or next(iter(message.output), '')!r} ({message.op_type!s})"
    if isinstance(message, onnx.ValueInfoProto | TensorProto | onnx.FunctionProto):
        return f"{message.DESCRIPTOR.name.removesuffix('Proto')} {message.name!r}" if message.name else ""
    return ""


# ---------------------------------------------------------------- tensors


def check_tensor(tensor: TensorProto, owner: str) -> None:
    """Raise BadModel unless a tensor holds as many values as its shape and type say."""
    at = f"tensor {tensor.name!r}" if tensor.name else owner
    if tensor.HasField("segment"):
        raise BadModel("a tensor in segments, which nobody reads", at=at, fix=_EXPORT_AGAIN)
    bits = _bits_of(tensor.data_type, at)
    elements = _elements(tensor.dims, at)
    if tensor.data_type == TensorProto.STRING:
        actual, expected = len(tensor.string_data), elements
    elif tensor.data_location == TensorProto.EXTERNAL:
        return
    elif tensor.HasField("raw_data"):
        actual, expected = len(tensor.raw_data), (elements * bits + 7) // 8
    else:
        actual = sum(len(getattr(tensor, field)) for field in _TYPED_FIELDS)
        field = helper.tensor_dtype_to_field(tensor.data_type)
        packed = 8 // bits if bits < 8 else 1
        expected = -(-elements // packed) * (2 if tensor.data_type in _COMPLEX else 1)
        if actual and actual != len(getattr(tensor, field)):
            raise BadModel(f"values that are not in {field}", at=at, fix=_EXPORT_AGAIN)
    if actual != expected:
        raise BadModel(
            f"{actual} values or bytes, where shape {list(tensor.dims)} of element type "
            f"{TensorProto.DataType.Name(tensor.data_type)} takes {expected}",
            at=at,
            fix=_EXPORT_AGAIN,
        )


_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def _bits_of(element: int, at: str) -> int:
    try:
        name = TensorProto.DataType.Name(element)
        if name == "STRING":
            return 8
        return _BITS.get(name) or 8 * helper.tensor_dtype_to_np_dtype(element).itemsize
    except (KeyError, ValueError) as error:
        raise BadModel(f"element type {element}, which is none", at=at, fix=_EXPORT_AGAIN) from error


def _elements(dims: "tuple[int, ...]", at: str) -> int:
    if any(size < 0 for size in dims):
        raise BadModel(f"a negative size in shape {list(dims)}", at=at, fix=_EXPORT_AGAIN)
    return prod(dims)


def _check_external(tensor: TensorProto, owner: str, is_initializer: bool, folder: Path | None) -> None:
    """Raise BadModel unless a file inside the model's folder holds the bytes."""
    at = f"tensor {tensor.name!r}" if tensor.name else owner
    wanted_bytes = (_elements(tensor.dims, at) * _bits_of(tensor.data_type, at) + 7) // 8
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not is_initializer:
        raise BadModel(
            f"external data {location!r}, but not of an initializer of the main graph",
            at=at,
            fix="keep this tensor's values in the model file",
        )
    if folder is None:
        return
    if why := outside(folder, location):
        raise BadModel(
            f"external data file {location!r} {why}",
            at=at,
            fix="put the file itself beside the model, and name it by its place in the model's folder",
        )
    numbers = {key: entries.get(key, "") for key in ("offset", "length")}
    for key, text in numbers.items():
        if text and not (text.isascii() and text.isdigit() and len(text) < 20):
            raise BadModel(f"external data {key} {text!r} is no size", at=at, fix=_EXPORT_AGAIN)
    file, offset = folder / location, int(numbers["offset"] or 0)
    if file.is_file() and file.stat().st_nlink > 1:
        raise BadModel(
            f"external data file {location!r} has other names too (hard links), and ONNX does not read it",
            at=at,
            fix="put a copy of the file in its place",
        )
    found_bytes = file.stat().st_size if file.is_file() else -1
    if found_bytes < offset + wanted_bytes or (numbers["length"] and int(numbers["length"]) != wanted_bytes):
        claimed = f", its length is said to be {numbers['length']}" if numbers["length"] else ""
        requirement = f"{offset + wanted_bytes} are needed{claimed}"
        what = "is missing" if found_bytes < 0 else f"has {found_bytes} bytes, {requirement}"
        raise BadModel(
            f"external data file {location!r} {what}", at=at, fix="put the whole file beside the model"
        )


# ---------------------------------------------------------------- types, attributes, functions


def _check_type(type_: onnx.TypeProto.Tensor, owner: str) -> None:
    if type_.elem_type == TensorProto.UNDEFINED:
        return
    bits = _bits_of(type_.elem_type, owner)
    sizes = [dim.dim_value for dim in type_.shape.dim if dim.HasField("dim_value")]
    if _elements(tuple(sizes), owner) * bits > 8 * MAX_BYTES:
        raise BadModel(
            f"shape {sizes}: no machine holds a tensor of so many elements",
            at=owner,
            fix="correct the declared shape, or make the size that varies a name",
        )


def _check_attribute(attribute: AttributeProto, owner: str, is_of_function: bool) -> None:
    if attribute.ref_attr_name and is_of_function:
        return
    if attribute.ref_attr_name:
        what = f"attribute {attribute.name!r} refers to {attribute.ref_attr_name!r}, outside of any function"
        raise BadModel(what, at=owner, fix=_EXPORT_AGAIN)
    field = _ATTRIBUTE_FIELDS.get(attribute.type)
    value_fields = {field.name for field, _ in attribute.ListFields()} - {"name", "type", "doc_string"}
    if field is None or value_fields - {field}:
        raise BadModel(
            f"attribute {attribute.name!r} holds {sorted(value_fields)}, which is not its type",
            at=owner,
            fix=_EXPORT_AGAIN,
        )
    if field in _MESSAGES and field not in value_fields:
        raise BadModel(f"attribute {attribute.name!r} has no value", at=owner, fix=_EXPORT_AGAIN)


_MESSAGES = ("t", "g", "sparse_tensor", "tp")  # fields whose absence is not a value

_ATTRIBUTE_FIELDS = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}


def _check_functions(functions: "list[onnx.FunctionProto]") -> None:
    """Refuse functions that call themselves, however far round, and those that do not make their outputs."""
    for body in functions:
        inside = {*body.input, *(name for node in body.node for name in node.output)}
        if missing := [name for name in body.output if name not in inside]:
            raise BadModel(
                f"no node makes output {missing[0]!r}", at=f"function {body.name!r}", fix=_EXPORT_AGAIN
            )
    calls = {
        (function.domain, function.name): {
            (node.domain, node.op_type)
            for node, *_ in _messages(function, f"function {function.name!r}")
            if isinstance(node, onnx.NodeProto)
        }
        for function in functions
    }
    finished: set[tuple[str, str]] = set()
    for function in calls:
        _follow(function, calls, [], finished)


def _follow(
    function: tuple[str, str],
    calls: Mapping[tuple[str, str], set[tuple[str, str]]],
    way: list[tuple[str, str]],
    finished: set[tuple[str, str]],
) -> None:
    if function in way:
        names = " -> ".join(name for _, name in [*way[way.index(function) :], function])
        raise BadModel(f"a function that calls itself: {names}", at="functions", fix=_EXPORT_AGAIN)
    if function in finished or function not in calls:
        return
    finished.add(function)
    for called in sorted(calls[function]):
        _follow(called, calls, [*way, function], finished)


def refuse_empty_batch(name: str, shape: Sequence[object], axis: int = 0) -> None:
    """Refuse a data input that declares no samples. Raises BadModel."""
    if -len(shape) <= axis < len(shape) and shape[axis] == 0:
        raise BadModel(
            f"the batch is empty: data input {name!r} has shape {list(shape)}, no samples on axis {axis}",
            at=f"input {name!r}",
            fix="export the model with a batch of at least one sample, or give `partc grad` a --batch-size",
        )
