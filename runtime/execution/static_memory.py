"""Memory that the values of a GPU keep from step to step, so that what reads and writes them can be replayed.

A value has it whose sizes every segment that reads or makes it declares. Values that do not live at the same
time share it: each takes the smallest block that is free when it is made and not twice as large as need be.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnxruntime as ort

from partc.runtime.execution.arrays import Array, DeviceArrays
from partc.runtime.plan.program import Instruction, Run, Start, Store

ALIGNMENT = 256  # bytes: what CUDA's own allocations have
_CALLED = {"float": "float32", "double": "float64"}  # by ONNX Runtime


@dataclass(frozen=True, slots=True)
class DeclaredSizes:
    """What a value is."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def declared_sizes(runs: Iterable[tuple[Run, ort.InferenceSession]]) -> dict[str, DeclaredSizes]:
    """Return the values whose sizes all segments declare that read or make them."""
    sizes: dict[str, DeclaredSizes | None] = {}
    for run, session in runs:
        declared = {info.name: _sizes_of(info) for info in (*session.get_inputs(), *session.get_outputs())}
        for name, value in (*run.writes, *run.reads):
            here = declared.get(name)
            known = sizes.setdefault(value, here)
            if here is None or known is None or known.nbytes != here.nbytes:
                sizes[value] = None
    return {value: known for value, known in sizes.items() if known is not None}


def _sizes_of(info: ort.NodeArg) -> DeclaredSizes | None:
    element = info.type.removeprefix("tensor(").removesuffix(")")
    if not all(isinstance(size, int) for size in info.shape):
        return None
    try:
        return DeclaredSizes(tuple(info.shape), np.dtype(_CALLED.get(element, element)))
    except TypeError:
        return None


def allocate(
    sizes: Mapping[str, DeclaredSizes],
    program: Sequence[Instruction],
    last_read_by: Sequence[Sequence[str]],
    arrays: DeviceArrays,
) -> dict[str, Array]:
    """Return zeros for each value. `last_read_by`: per instruction, the values that are let go behind it."""
    blocks = _Blocks()
    places: dict[str, _Block] = {}
    made = {value for instruction in program for value in _made_by(instruction)}
    for value in sizes.keys() - made:  # fed before the program begins
        places[value] = blocks.take(sizes[value].nbytes)
    for instruction, dying in zip(program, last_read_by, strict=True):
        for value in _made_by(instruction):
            if value in sizes and value not in places:
                places[value] = blocks.take(sizes[value].nbytes)
        for value in dict.fromkeys(dying):
            if value in places:
                blocks.give_back(places[value])
    memory = [arrays.zeros(block.nbytes, np.dtype(np.uint8)) for block in blocks.all]
    return {
        value: memory[place.number][: sizes[value].nbytes]
        .view(sizes[value].dtype)
        .reshape(sizes[value].shape)
        for value, place in places.items()
    }


def _made_by(instruction: Instruction) -> Iterator[str]:
    match instruction:
        case Run(writes=writes):
            yield from (value for _, value in writes)
        case Start(writes=writes):
            yield from writes
        case Store(target=target):
            yield target


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    nbytes: int


@dataclass(slots=True)
class _Blocks:
    all: list[_Block] = field(default_factory=list)
    free: set[_Block] = field(default_factory=set)

    def take(self, nbytes: int) -> _Block:
        """Return a block of so many bytes at least."""
        fitting = [block for block in self.free if nbytes <= block.nbytes <= 2 * nbytes]
        if fitting:
            block = min(fitting, key=lambda block: (block.nbytes, block.number))
            self.free.remove(block)
            return block
        self.all.append(_Block(len(self.all), -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT))
        return self.all[-1]

    def give_back(self, block: _Block) -> None:
        """Let others have a block."""
        self.free.add(block)
