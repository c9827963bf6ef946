"""What steps put out, in a file that only grows: a step of a long run costs no memory, and none is lost.

A record is a little-endian uint32 n and n bytes of MessagePack: output name -> element type, shape, elements
in C order. A record that was cut off by the end of its writer is left out.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_LENGTH_BYTES = 4


class _Output(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    elements: bytes


_DECODER = msgspec.msgpack.Decoder(dict[str, _Output])


class OutputLog:
    """Appends the outputs of one step after the other."""

    def __init__(self, path: Path) -> None:
        self._stream: BinaryIO = path.open("wb")

    def append(self, outputs: Mapping[str, Array]) -> None:
        """Write one step's outputs."""
        record = msgspec.msgpack.encode(
            {name: _Output(array.dtype.name, array.shape, array.tobytes()) for name, array in outputs.items()}
        )
        self._stream.write(len(record).to_bytes(_LENGTH_BYTES, "little") + record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()


def read_outputs(path: Path) -> Iterator[dict[str, Array]]:
    """Yield the outputs of every step that was written whole."""
    with path.open("rb") as stream:
        while len(length := stream.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            record = stream.read(int.from_bytes(length, "little"))
            if len(record) < int.from_bytes(length, "little"):
                return
            yield {
                name: np.frombuffer(output.elements, output.dtype).reshape(output.shape)
                for name, output in _DECODER.decode(record).items()
            }
