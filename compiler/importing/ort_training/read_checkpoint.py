"""The parameters in a checkpoint of onnxruntime-training, read without its package and without pickle.

The file is a FlatBuffer with identifier ODTC:

    Checkpoint   version, module_state, ..      ModuleState   requires_grad_params, frozen_params, ..
    Tensor       name, doc_string, dims, data_type, raw_data, string_data, external_data_offset

Large ones keep the values beside it, in <checkpoint>.data. Source: the schemas ort.fbs and
ort_training_checkpoint.fbs of onnxruntime 1.19, and FlatBuffers' internals page for the layout.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from partc.runtime.errors import BadModel

_IDENTIFIER = b"ODTC"
_MODULE_STATE, _TRAINED, _FROZEN = 1, 0, 1
_NAME, _DIMS, _DATA_TYPE, _RAW_DATA, _EXTERNAL_OFFSET = 0, 2, 3, 4, 6


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Parameters by name: those that are trained, and the frozen ones."""

    trained: dict[str, TensorProto]
    frozen: dict[str, TensorProto]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's parameters. Raises BadModel."""
    if not path.is_file():
        raise BadModel("no checkpoint", at=str(path), fix="give the folder that generate_artifacts wrote")
    data = path.read_bytes()
    if data[4:8] != _IDENTIFIER:
        raise _damage_error(path, "not a checkpoint of onnxruntime-training 1.19")
    try:
        root = _Table(data, _follow(data, 0))
        state = root.table(_MODULE_STATE)
        trained, frozen = (
            {tensor.name: tensor for tensor in _tensors(state, field, path)} for field in (_TRAINED, _FROZEN)
        )
    except (struct.error, UnicodeDecodeError, ValueError, KeyError) as error:
        raise _damage_error(path, f"a damaged checkpoint: {error}") from error
    return Checkpoint(trained, frozen)


def _damage_error(path: Path, what: str) -> BadModel:
    return BadModel(what, at=str(path), fix="save it again with CheckpointState.save_checkpoint")


def _tensors(state: "_Table", field: int, path: Path) -> Iterator[TensorProto]:
    for table in state.tables(field):
        element = table.int32(_DATA_TYPE)
        tensor = TensorProto(
            name=table.bytes(_NAME).decode(), data_type=element, dims=table.int64_vector(_DIMS)
        )
        dtype = helper.tensor_dtype_to_np_dtype(element)
        size_bytes = int(np.prod(tensor.dims, dtype=np.int64)) * dtype.itemsize
        offset = table.int64(_EXTERNAL_OFFSET, default=-1)
        if offset >= 0:
            _refer(tensor, f"{path.name}.data", offset, size_bytes)
        else:
            tensor.raw_data = table.bytes(_RAW_DATA)
            if len(tensor.raw_data) != size_bytes:
                raise ValueError(f"{tensor.name!r} has {len(tensor.raw_data)} bytes instead of {size_bytes}")
        yield tensor


def _refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


# ---------------------------------------------------------------- FlatBuffers


def _read_unsigned(data: bytes, at: int) -> int:
    (value,) = struct.unpack_from("<I", data, at)
    return int(value)


def _follow(data: bytes, at: int) -> int:
    return at + _read_unsigned(data, at)


@dataclass(frozen=True, slots=True)
class _Table:
    """One table: fields are found through a table of offsets that several tables may share."""

    data: bytes
    at: int

    def _field(self, field: int) -> int | None:
        (back,) = struct.unpack_from("<i", self.data, self.at)
        offsets = self.at - back
        (size_bytes,) = struct.unpack_from("<H", self.data, offsets)
        position = 4 + 2 * field
        if position >= size_bytes:
            return None
        (offset,) = struct.unpack_from("<H", self.data, offsets + position)
        return self.at + offset if offset else None

    def int32(self, field: int, default: int = 0) -> int:
        return self._number("<i", field, default)

    def int64(self, field: int, default: int = 0) -> int:
        return self._number("<q", field, default)

    def _number(self, form: str, field: int, default: int) -> int:
        where = self._field(field)
        return default if where is None else int(struct.unpack_from(form, self.data, where)[0])

    def _vector(self, field: int) -> tuple[int, int]:
        """Return where a vector's entries begin, and how many there are."""
        where = self._field(field)
        if where is None:
            return 0, 0
        start = _follow(self.data, where)
        count = _read_unsigned(self.data, start)
        if start + 4 + count > len(self.data):
            raise ValueError("a vector reaches beyond the file")
        return start + 4, count

    def bytes(self, field: int) -> bytes:
        start, count = self._vector(field)
        return self.data[start : start + count]

    def int64_vector(self, field: int) -> list[int]:
        start, count = self._vector(field)
        return list(struct.unpack_from(f"<{count}q", self.data, start))

    def table(self, field: int) -> "_Table":
        where = self._field(field)
        if where is None:
            raise ValueError("the module's state is missing")
        return _Table(self.data, _follow(self.data, where))

    def tables(self, field: int) -> "list[_Table]":
        start, count = self._vector(field)
        return [_Table(self.data, _follow(self.data, start + 4 * index)) for index in range(count)]
