"""Variables on disk: safetensors files, written piece by piece and renamed into place.

A safetensors file is a little-endian uint64 n, n bytes of JSON (name -> dtype, shape, [begin, end) in the
data), and the data. Written here rather than by the library, which wants every tensor whole in memory.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from partc.runtime.errors import BadData, naming_file, some_of
from partc.runtime.plan.boxes import contiguous_rows, is_whole, place
from partc.runtime.plan.variables import Box

Array = np.ndarray[Any, np.dtype[Any]]

_DTYPES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_DTYPE_OF = {written: dtype for dtype, written in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor to be written, piece by piece.

    `boxes`: where the pieces lie, in any order; None: they follow each other along axis 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[Array]
    boxes: Sequence[Box | None] | None = None

    @property
    def element_type(self) -> np.dtype[Any]:
        """The type of its elements."""
        return np.dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.element_type.itemsize


def write_tensors(path: Path, tensors: Sequence[TensorFile]) -> None:
    """Write a safetensors file, replacing an earlier one only when complete."""
    part = path.with_name(path.name + ".part")
    with naming_file(part), part.open("w+b") as stream:
        header = _header(tensors)
        stream.write(len(header).to_bytes(8, "little"))
        stream.write(header)
        for tensor in tensors:
            written = write_pieces(stream, tensor)
            assert written == tensor.nbytes, f"{tensor.name}: {written} of {tensor.nbytes} bytes"
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


def write_pieces(stream: BinaryIO, tensor: TensorFile) -> int:
    """Write a tensor at the stream's place and go behind it; return how many bytes its pieces have.

    Pieces in boxes need a file that is open for reading, too.
    """
    if tensor.boxes is None:
        return sum(stream.write(_bytes_of(piece)) for piece in tensor.pieces)
    begin, written = stream.tell(), 0
    for box, piece in zip(tensor.boxes, tensor.pieces, strict=True):
        rows = (0, 0) if is_whole(box) else contiguous_rows(box)
        if rows is None:
            _write_scattered(stream, begin, tensor, box, piece)
        else:
            stream.seek(begin + rows[0] * (tensor.nbytes // max(1, tensor.shape[0]) if tensor.shape else 0))
            stream.write(_bytes_of(piece))
        written += piece.nbytes
    stream.seek(begin + tensor.nbytes)
    return written


def _write_scattered(stream: BinaryIO, begin: int, tensor: TensorFile, box: Box | None, piece: Array) -> None:
    # The system writes what was placed, when it likes: a table need not fit into memory.
    if not piece.size:
        return
    stream.flush()
    if hasattr(os, "posix_fallocate"):  # on a full disk an error here, not a signal later
        os.posix_fallocate(stream.fileno(), begin, tensor.nbytes)
    else:
        stream.truncate(max(os.fstat(stream.fileno()).st_size, begin + tensor.nbytes))
    whole = np.memmap(stream, tensor.dtype, "r+", begin, tensor.shape)
    place(whole, box, piece)
    whole.flush()


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write whole arrays as a safetensors file."""
    write_tensors(path, whole_tensors(arrays))


def whole_tensors(arrays: Mapping[str, Array]) -> list[TensorFile]:
    """Return arrays as tensors to be written."""
    return [TensorFile(name, array.dtype.name, array.shape, (array,)) for name, array in arrays.items()]


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


def map_array(path: Path, name: str) -> Array:
    """Return one tensor of a safetensors file without reading it: the system reads what is looked at."""
    return map_arrays(path, (name,))[name]


def map_arrays(
    path: Path, names: Collection[str] | None = None, *, is_writable: bool = False
) -> dict[str, Array]:
    """Return tensors of a safetensors file, all if none are named, without reading them. Raises BadData.

    The system reads what is looked at; whoever replaces the file leaves them as they are. `is_writable`: what
    is written to them stays in memory.
    """
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(header_bytes))
    arrays: dict[str, Array] = {}
    for name in (entries.keys() - {"__metadata__"}) if names is None else names:
        if name not in entries:
            raise BadData(f"no tensor {name!r}", at=str(path), fix=f"name one of {some_of(sorted(entries))}")
        dtype, shape = np.dtype(_DTYPE_OF[entries[name]["dtype"]]), tuple(entries[name]["shape"])
        begin = 8 + header_bytes + entries[name]["data_offsets"][0]
        is_stored = np.prod(shape, dtype=np.int64) > 0
        arrays[name] = (
            np.memmap(path, dtype, "c" if is_writable else "r", begin, shape)
            if is_stored
            else np.zeros(shape, dtype)
        )
    return arrays


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
