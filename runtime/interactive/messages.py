"""What a stepper and the ranks say to each other: a small header, then frames of each array.

    rank    -> stepper   Ready      loaded, and waiting
    stepper -> rank      Step       train one step on what follows, or on your own data
    worker  -> stepper   Done       the outputs that were asked for follow
    stepper -> rank      Write      write the variables to this file
    rank    -> stepper   Written
    stepper -> rank      Read       send a value, or the rows of it whose places follow
    stepper -> rank      Hash       send a number for every row of a value
    rank    -> stepper   Found      what was asked for follows
    stepper -> rank      Close      end

Frames hold arrays' elements in C order; the header says their types and shapes. No frame is long, so that who
listens can refuse those that are before it takes memory for them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from partc.runtime.errors import RankFailed
from partc.runtime.plan.record import Record

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = bytes | memoryview

LARGEST_FRAME_BYTES = 1 << 20


class TensorHeader(Record, frozen=True):
    """The name, element type and shape of an array."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Ready(Record, frozen=True, tag="ready"):
    """A rank can begin."""


class Step(Record, frozen=True, tag="step"):
    """Train step `step`, counted from 1. `fetches`: the outputs that this rank is asked for.

    `saves`: write a checkpoint after it.
    """

    step: int
    fetches: tuple[str, ...]
    tensors: tuple[TensorHeader, ...] = ()
    saves: bool = False


class Done(Record, frozen=True, tag="done"):
    """A rank has trained a step."""

    step: int
    tensors: tuple[TensorHeader, ...] = ()


class Write(Record, frozen=True, tag="write"):
    """Write the variables, whole, to a file that all hosts see."""

    path: str


class Written(Record, frozen=True, tag="written"):
    """A rank has written its share."""


class Read(Record, frozen=True, tag="read"):
    """Send value `value`: whole, or its rows at the places (int64) that follow."""

    value: str
    tensors: tuple[TensorHeader, ...] = ()


class Hash(Record, frozen=True, tag="hash"):
    """Send a number for every row of a variable's value, which may hold a part of it (row_hashes.py)."""

    value: str


class Found(Record, frozen=True, tag="found"):
    """What was asked for follows."""

    tensors: tuple[TensorHeader, ...] = ()


class Close(Record, frozen=True, tag="close"):
    """End the job. `saves`: write a checkpoint before."""

    saves: bool = False


StepperMessage = Ready | Step | Done | Write | Written | Read | Hash | Found | Close
_WITH_TENSORS = Step | Done | Read | Found

_DECODER = msgspec.msgpack.Decoder(StepperMessage)


def describe(arrays: Mapping[str, Array]) -> tuple[TensorHeader, ...]:
    """Return the headers of arrays."""
    return tuple(TensorHeader(name, array.dtype.name, array.shape) for name, array in arrays.items())


def encode(message: StepperMessage, arrays: Mapping[str, Array]) -> list[Bytes]:
    """Return a message's frames: its own, then those of each array, none longer than LARGEST_FRAME_BYTES."""
    frames: list[Bytes] = [msgspec.msgpack.encode(message)]
    for array in arrays.values():
        raw = memoryview(array.tobytes())
        frames += [raw[at : at + LARGEST_FRAME_BYTES] for at in range(0, len(raw), LARGEST_FRAME_BYTES)]
    return frames


def decode(frames: Sequence[Bytes]) -> tuple[StepperMessage, dict[str, Array]]:
    """Parse a message's frames. Raises RankFailed."""
    try:
        message: StepperMessage = _DECODER.decode(frames[0])
        tensors = message.tensors if isinstance(message, _WITH_TENSORS) else ()
        rest = list(frames[1:])
        arrays = {tensor.name: _take(tensor, rest) for tensor in tensors}
        if rest:
            raise ValueError(f"{len(rest)} frames too many")
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
        raise RankFailed(
            f"a message that is none: {error}",
            at="the connection between the runner and its ranks",
            fix="let all hosts have the same version of partc",
        ) from error
    return message, arrays


def _take(tensor: TensorHeader, rest: list[Bytes]) -> Array:
    """Return a tensor of the first of these frames, and take those away."""
    dtype = np.dtype(tensor.dtype)
    count = -(-math.prod(tensor.shape) * dtype.itemsize // LARGEST_FRAME_BYTES)
    own, rest[:] = rest[:count], rest[count:]
    return np.frombuffer(own[0] if count == 1 else b"".join(own), dtype).reshape(tensor.shape)
