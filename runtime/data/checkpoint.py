"""Variables on disk: safetensors files, written piece by piece and renamed into place.

A safetensors file is a little-endian uint64 n, n bytes of JSON (name -> dtype, shape, [begin, end) in the
data), and the data. Written here rather than by the library, which wants every tensor whole in memory.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from partc.runtime.errors import BadData

Array = np.ndarray[Any, np.dtype[Any]]

_DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor to be written: its pieces follow each other along axis 0."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[Array]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def write_tensors(path: Path, tensors: Sequence[TensorFile]) -> None:
    """Write a safetensors file, replacing an earlier one only when complete."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as stream:
        header = _header(tensors)
        stream.write(len(header).to_bytes(8, "little"))
        stream.write(header)
        for tensor in tensors:
            written = sum(stream.write(_bytes_of(piece)) for piece in tensor.pieces)
            assert written == tensor.nbytes, f"{tensor.name}: {written} of {tensor.nbytes} bytes"
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


def write_arrays(path: Path, arrays: dict[str, Array]) -> None:
    """Write whole arrays as a safetensors file."""
    write_tensors(
        path, [TensorFile(name, array.dtype.name, array.shape, (array,)) for name, array in arrays.items()]
    )


def read_arrays(path: Path) -> dict[str, Array]:
    """Read every tensor of a safetensors file. Raises BadData."""
    return dict(iterate_arrays(path))


def iterate_arrays(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a safetensors file one after the other. Raises BadData."""
    try:
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise BadData(
            f"no tensors can be read: {error}", at=str(path), fix="give a complete safetensors file"
        ) from error


def read_array(path: Path, name: str) -> Array:
    """Read one tensor of a safetensors file."""
    with safe_open(path, framework="numpy") as tensors:
        array: Array = tensors.get_tensor(name)
        return array


def map_array(path: Path, name: str) -> Array:
    """Return one tensor of a safetensors file without reading it: the system reads what is looked at."""
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        entry = json.loads(stream.read(header_bytes))[name]
    dtypes = {written: dtype for dtype, written in _DTYPES.items()}
    dtype, shape = np.dtype(dtypes[entry["dtype"]]), tuple(entry["shape"])
    if not np.prod(shape, dtype=np.int64):
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", 8 + header_bytes + entry["data_offsets"][0], shape)


def _header(tensors: Sequence[TensorFile]) -> bytes:
    entries: dict[str, dict[str, object]] = {}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _bytes_of(array: Array) -> memoryview:
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data
