"""What a stepper and the ranks say to each other: a small header, then one frame per array.

    rank    -> stepper   Ready      loaded, and waiting
    stepper -> rank      Step       train one step on what follows, or on your own data
    worker  -> stepper   Done       the outputs that were asked for follow
    stepper -> rank      Write      write the variables to this file
    rank    -> stepper   Written
    stepper -> rank      Read       send a value, or the rows of it whose places follow
    stepper -> rank      Hash       send a number for every row of a value
    rank    -> stepper   Found      what was asked for follows
    stepper -> rank      Close      end

A frame holds an array's elements in C order; the header says their type and shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from partc.runtime.errors import RankFailed
from partc.runtime.plan.record import Record

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | memoryview


class Tensor(Record, frozen=True):
    """The name, element type and shape of a frame."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Ready(Record, frozen=True, tag="ready"):
    """A rank can begin."""


class Step(Record, frozen=True, tag="step"):
    """Train step `step`, counted from 1. `fetches`: the outputs that this rank is asked for."""

    step: int
    fetches: tuple[str, ...]
    tensors: tuple[Tensor, ...] = ()


class Done(Record, frozen=True, tag="done"):
    """A rank has trained a step."""

    step: int
    tensors: tuple[Tensor, ...] = ()


class Write(Record, frozen=True, tag="write"):
    """Write the variables, whole, to a file that all hosts see."""

    path: str


class Written(Record, frozen=True, tag="written"):
    """A rank has written its share."""


class Read(Record, frozen=True, tag="read"):
    """Send value `value`: whole, or its rows at the places (int64) that follow."""

    value: str
    tensors: tuple[Tensor, ...] = ()


class Hash(Record, frozen=True, tag="hash"):
    """Send a number for every row of a variable's value, which may hold a part of it (row_hashes.py)."""

    value: str


class Found(Record, frozen=True, tag="found"):
    """What was asked for follows."""

    tensors: tuple[Tensor, ...] = ()


class Close(Record, frozen=True, tag="close"):
    """End the job."""


StepperMessage = Ready | Step | Done | Write | Written | Read | Hash | Found | Close
_WITH_TENSORS = Step | Done | Read | Found

_DECODER = msgspec.msgpack.Decoder(StepperMessage)


def describe(arrays: Mapping[str, Array]) -> tuple[Tensor, ...]:
    """Return the headers of arrays."""
    return tuple(Tensor(name, array.dtype.name, array.shape) for name, array in arrays.items())


def encode(message: StepperMessage, arrays: Mapping[str, Array]) -> list[bytes]:
    """Return a message's frames."""
    return [msgspec.msgpack.encode(message), *(array.tobytes() for array in arrays.values())]


def decode(frames: Sequence[Buffer]) -> tuple[StepperMessage, dict[str, Array]]:
    """Parse a message's frames. Raises RankFailed."""
    try:
        message: StepperMessage = _DECODER.decode(frames[0])
        tensors = message.tensors if isinstance(message, _WITH_TENSORS) else ()
        arrays = {
            tensor.name: np.frombuffer(frame, np.dtype(tensor.dtype)).reshape(tensor.shape)
            for tensor, frame in zip(tensors, frames[1:], strict=True)
        }
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise RankFailed(
            f"a message that is none: {error}",
            at="the connection between the runner and its ranks",
            fix="let all hosts have the same version of partc",
        ) from error
    return message, arrays
