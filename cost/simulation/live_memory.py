"""What the values of a rank take: what segments and messages make, until it is let go.

    kept   between instructions, as the executor holds it: data, and what is read later, of every
           micro-batch under way. Exact where the data decide no size
    peak   with what a segment makes and lets go again. An estimate: on CPUs of what ONNX Runtime takes in
           its own order (session_memory.py), on GPUs of what the segment's order needs

Buffers and variables last, and are not counted here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from partc.runtime.data.batches import inputs_of, total_shape
from partc.runtime.data.step_draws import draws_of, evaluate_size
from partc.runtime.plan.last_readers import last_readers
from partc.runtime.plan.members import lands_at, roots_of, shard_values
from partc.runtime.plan.program import Instruction, Plan, Rank, Run, Start, Wait, instructions_of


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """The most bytes that values of a rank take at once, between instructions and within segments."""

    between_runs: int
    peak: int


def live_bytes(plan: Plan, rank: Rank) -> LiveBytes:
    """Return the most that a rank's values take, from the second step on: it begins with results."""
    program = instructions_of(plan, rank)
    fixed = _fixed_values(plan, rank)
    results = {output.value for output in plan.outputs}
    sizes = {value: nbytes for value, nbytes in _made(plan, rank, program) if value not in fixed}
    alive = {value: sizes[value] for value in results & sizes.keys()}
    alive |= dict(_fed(plan, rank))
    now = between_runs = peak = sum(alive.values())
    arriving = {start.tag_id: start for start in program if isinstance(start, Start)}
    for instruction, let_go in zip(program, last_readers(program, results | fixed), strict=True):
        if isinstance(instruction, Run):
            peak = max(peak, now + instruction.inner_bytes)
        for value in _appearing(instruction, arriving):
            if value in sizes and value not in alive:
                alive[value] = sizes[value]
                now += sizes[value]
        between_runs = max(between_runs, now)
        now -= sum(alive.pop(value, 0) for value in let_go)
    return LiveBytes(between_runs, max(between_runs, peak))


def live_kind(plan: Plan, rank: Rank) -> tuple[object, ...]:
    """Return what ranks have in common whose values take the same."""
    roots = tuple(sorted((group, root == rank.rank) for group, root in roots_of(plan, rank).items()))
    return rank.sites, rank.replica is None, roots, frozenset(piece.value for piece in rank.slices)


def _fixed_values(plan: Plan, rank: Rank) -> set[str]:
    buffers = {buffer.name for buffer in plan.buffers if set(buffer.sites) & set(rank.sites)}
    slices = {piece.value for piece in (*plan.slices, *rank.slices) if piece.buffer in buffers}
    constants = plan.constants.keys() | rank.constants.keys() | shard_values(plan, rank).keys()
    return buffers | slices | constants | {piece.value for piece in rank.pieces}


def _fed(plan: Plan, rank: Rank) -> Iterator[tuple[str, int]]:
    """Yield each input that a rank is given, or draws, with its bytes."""
    yield from input_bytes(plan, rank)
    for drawn in draws_of(plan, rank):
        parts = plan.replicas if drawn.sample_axis is not None and plan.batch == "global" else 1
        elements = prod(evaluate_size(size, plan.sizes) for size in drawn.shape)
        yield drawn.name, elements // parts * np.dtype(drawn.dtype).itemsize


def input_bytes(plan: Plan, rank: Rank) -> Iterator[tuple[str, int]]:
    """Yield each data input that a rank is given with the bytes of its share."""
    for entry in inputs_of(plan, rank):
        shape = [size if isinstance(size, int) else 1 for size in total_shape(plan, entry)]
        parts = 1 if entry.sample_axis is None else plan.replicas
        yield entry.name, prod(shape) // parts * np.dtype(entry.dtype).itemsize


def _made(plan: Plan, rank: Rank, program: tuple[Instruction, ...]) -> Iterator[tuple[str, int]]:
    """Yield what segments and messages make, with its bytes where the plan tells them."""
    roots = roots_of(plan, rank)
    for instruction in program:
        if isinstance(instruction, Run):
            values = (value for _, value in instruction.writes)
            yield from zip(values, instruction.write_bytes, strict=False)
        elif isinstance(instruction, Start) and lands_at(instruction, rank, roots[instruction.group]):
            whole = instruction.payload_bytes
            if instruction.kind in ("gather_rows", "all_gather_rows"):
                whole *= len(plan.groups[instruction.group][rank.groups[instruction.group]])
            for value in instruction.writes:
                yield value, whole // len(instruction.writes)


def _appearing(instruction: Instruction, arriving: dict[int, Start]) -> tuple[str, ...]:
    match instruction:
        case Run(writes=writes):
            return tuple(value for _, value in writes)
        case Wait(tag_id=tag_id):
            return arriving[tag_id].writes
    return ()
