"""Values that live at the same time have memory of their own; others share it."""

import random
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partc.runtime.execution.arrays import HOST_ARRAYS
from partc.runtime.execution.static_memory import ALIGNMENT, DeclaredSizes, allocate, declared_sizes
from partc.runtime.plan.last_readers import last_readers
from partc.runtime.plan.program import Instruction, Run, Start, Wait

FLOATS = np.dtype(np.float32)


def drawn_program(seed: int) -> tuple[list[Instruction], dict[str, DeclaredSizes]]:
    """Runs that read what was made before, and communications that send it while other runs go on."""
    draw = random.Random(seed)
    made, program, waits = ["fed"], [], []
    sizes = {"fed": DeclaredSizes((draw.randint(1, 900),), FLOATS)}
    for number in range(draw.randint(3, 25)):
        value = f"v{number}"
        reads = tuple(dict.fromkeys(draw.choices(made, k=draw.randint(1, 3))))
        if draw.random() < 0.3:
            program.append(Start(number, "broadcast", "g", "worker", "worker", reads[:1], (value,)))
            waits.append(Wait(number))
        else:
            pairs = tuple((read, read) for read in reads)
            program.append(Run("worker", "segment", pairs, ((value, value),)))
        if waits and draw.random() < 0.5:
            program.append(waits.pop(0))
        made.append(value)
        sizes[value] = DeclaredSizes((draw.randint(0, 900),), FLOATS)
    return [*program, *waits], sizes


@pytest.mark.parametrize("seed", range(40))
def test_what_is_read_later_is_not_written_over(seed: int) -> None:
    """Every value is filled when it is made, and intact when it is read, or until it has been sent."""
    program, sizes = drawn_program(seed)

    memory = allocate(sizes, program, last_readers(tuple(program), frozenset()), HOST_ARRAYS)

    assert {value: array.shape for value, array in memory.items()} == {v: s.shape for v, s in sizes.items()}
    numbers = {value: number for number, value in enumerate(sizes, 1)}
    memory["fed"][...] = numbers["fed"]
    sent: dict[int, str] = {}
    for instruction in program:
        match instruction:
            case Run(reads=reads, writes=writes):
                assert all((memory[value] == numbers[value]).all() for _, value in reads)
                for _, value in writes:
                    memory[value][...] = numbers[value]
            case Start(tag_id=tag, reads=(read,), writes=(write,)):
                sent[tag] = read
                memory[write][...] = numbers[write]
            case Wait(tag_id=tag):
                assert (memory[sent[tag]] == numbers[sent[tag]]).all()


def test_values_one_after_the_other_take_the_memory_of_two() -> None:
    names = [f"v{number}" for number in range(9)]
    program = [Run("worker", "segment", ((a, a),), ((b, b),)) for a, b in pairwise(names)]
    sizes = {name: DeclaredSizes((ALIGNMENT,), FLOATS) for name in names}

    memory = allocate(sizes, program, last_readers(tuple(program), frozenset()), HOST_ARRAYS)

    assert len({array.ctypes.data for array in memory.values()}) == 2


SEGMENT = """
<ir_version: 10, opset_import: ["" : 21]>
segment (float[2,3] x, float[n,3] rows) => (float[2,3] doubled, float[n,3] more, bool[2,3] positive) {
    zero = Constant <value_float = 0.0> ()
    doubled = Add (x, x)
    more = Add (rows, rows)
    positive = Greater (x, zero)
}
"""


def test_only_values_of_declared_sizes_keep_memory() -> None:
    session = ort.InferenceSession(onnx.parser.parse_model(SEGMENT).SerializeToString())
    reads, writes = (("x", "a"), ("rows", "b")), (("doubled", "c"), ("more", "d"), ("positive", "e"))

    sizes = declared_sizes([(Run("worker", "segment", reads, writes), session)])

    assert sizes == {
        "a": DeclaredSizes((2, 3), FLOATS),
        "c": DeclaredSizes((2, 3), FLOATS),
        "e": DeclaredSizes((2, 3), np.dtype(np.bool_)),
    }
