"""Hold a plan to itself: whatever one part of it names, another part has, and sizes fit into each other.

Only then may `check_program` play it, and a rank allocate what it declares.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from math import prod

import numpy as np

from partc.runtime.errors import BadPlan
from partc.runtime.plan.boxes import cover_fault, fault_of
from partc.runtime.plan.members import has_outputs
from partc.runtime.plan.moves import intersect, shape_of
from partc.runtime.plan.program import Exchange, Plan, Region, Run, Slice, Start, Store, Wait
from partc.runtime.plan.variables import Box, DataInput, DrawnInput, Made, Stored

MOST_THREADS = 1 << 12  # of one rank
MOST_BYTES = 1 << 44  # of one value: more than any machine has memory
_ROW_KINDS = ("gather_rows", "scatter_rows", "all_gather_rows", "all_to_all_rows")
_AGAIN = "compile the model again, or name what is there"


def check_references(plan: Plan) -> None:
    """Raise BadPlan at the first name that nothing has, or size that does not fit."""
    for finding in _findings(plan):
        raise BadPlan(finding[0], at=finding[1], fix=_AGAIN)


Finding = tuple[str, str]  # what is wrong, and where


def _findings(plan: Plan) -> Iterator[Finding]:
    yield from _files(plan)
    yield from _ranks(plan)
    yield from _buffers(plan)
    yield from _variables(plan)
    yield from _instructions(plan)
    yield from _inputs_and_outputs(plan)


def _unknown(what: str, names: Iterable[str], known: Iterable[str], at: str) -> Iterator[Finding]:
    known = set(known)
    for name in names:
        if name not in known:
            yield f"{what} {name!r}, which the plan does not have", at


def _twice(what: str, names: Sequence[object], at: str) -> Iterator[Finding]:
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        yield f"{what} {repeated!r} twice", at


def _files(plan: Plan) -> Iterator[Finding]:
    yield from _unknown("the model is file", [plan.model], plan.files, "model")
    segments = [run.segment for run in plan.instructions if isinstance(run, Run)]
    yield from _unknown("segment", segments, plan.files, "instructions")
    stored = [v.initial.file for v in plan.variables if isinstance(v.initial, Stored | Made)]
    yield from _unknown("initial values in file", stored, plan.files, "variables")


def _ranks(plan: Plan) -> Iterator[Finding]:
    if [rank.rank for rank in plan.ranks] != list(range(len(plan.ranks))) or not plan.ranks:
        yield f"ranks {[rank.rank for rank in plan.ranks][:8]} do not count from 0", "ranks"
    workers = [rank.replica for rank in plan.ranks if rank.replica is not None]
    replicas = sorted(set(workers))  # of one replica there may be several ranks
    if len(replicas) != plan.replicas or replicas != list(range(len(replicas))) or not replicas:
        yield f"ranks have replicas {replicas[:8]}, the plan has {plan.replicas}", "ranks"
    for rank in plan.ranks:
        at = f"ranks: {rank.rank}"
        if (rank.replica is not None) != bool({*rank.sites} - {"server"}) or not rank.sites:
            yield f"sites {list(rank.sites)} of replica {rank.replica}", at
        if not 1 <= rank.threads <= MOST_THREADS or rank.device_index < 0:
            yield f"{rank.threads} threads on device {rank.device_index}", at
        yield from _constants(rank.constants, at)
    yield from _constants(plan.constants, "constants")
    for name, groups in plan.groups.items():
        strays = [r for members in groups for r in members if not 0 <= r < len(plan.ranks)]
        if strays or not all(groups):
            yield f"a group with rank {strays[0]}" if strays else "a group without ranks", f"groups: {name}"
    if plan.microbatches < 1:
        yield f"{plan.microbatches} micro-batches", "microbatches"
    if plan.asynchronous and (len(workers) != 1 or any(w.threads < 1 for w in plan.asynchronous)):
        yield f"asynchronous workers beside {len(workers)} ranks that compute", "asynchronous"


def _constants(constants: Mapping[str, tuple[int, ...]], at: str) -> Iterator[Finding]:
    if not all(-(2**63) <= number < 2**63 for vector in constants.values() for number in vector):
        yield "a constant that is no int64", at


# ---------------------------------------------------------------- memory


def _buffers(plan: Plan) -> Iterator[Finding]:
    yield from _twice("buffer", [buffer.name for buffer in plan.buffers], "buffers")
    elements = {buffer.name: buffer.elements for buffer in plan.buffers}
    kinds = {buffer.name: (buffer.dtype, buffer.sites) for buffer in plan.buffers if buffer.memory is None}
    for buffer in plan.buffers:
        if buffer.memory is not None and (
            kinds.get(buffer.memory) != (buffer.dtype, buffer.sites)
            or elements[buffer.memory] < buffer.elements
        ):
            yield f"memory {buffer.memory!r}, which is no buffer like it", f"buffers: {buffer.name}"
        yield from _size(buffer.dtype, (buffer.elements,), f"buffers: {buffer.name}")
    for pieces, at in (
        (plan.slices, "slices"),
        *((r.slices, f"ranks: {r.rank}: slices") for r in plan.ranks),
    ):
        yield from _unknown("buffer", [piece.buffer for piece in pieces], elements, at)
        for piece in pieces:
            yield from _slice(piece, elements.get(piece.buffer, 0), f"{at}: {piece.value}")


def _slice(piece: Slice, elements: int, at: str) -> Iterator[Finding]:
    if piece.offset < 0 or any(size < 0 for size in piece.shape):
        yield f"offset {piece.offset}, shape {list(piece.shape)}", at
    elif piece.offset + prod(piece.shape) > elements:
        yield f"a slice ends at element {piece.offset + prod(piece.shape)} of a buffer of {elements}", at


def _size(dtype: str, shape: Sequence[int], at: str) -> Iterator[Finding]:
    item_bytes = _item_bytes(dtype)
    if item_bytes is None:
        yield f"element type {dtype!r}, which is no type of numbers", at
    elif any(size < 0 for size in shape) or prod(shape) * item_bytes > MOST_BYTES:
        yield f"shape {list(shape)}, which no machine holds", at


def _item_bytes(dtype: str) -> int | None:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        return None
    return kind.itemsize if kind.name == dtype and (kind.kind in "biuf" or dtype in _SMALL_FLOATS) else None


_SMALL_FLOATS = ("bfloat16",)


# ---------------------------------------------------------------- variables


def _variables(plan: Plan) -> Iterator[Finding]:
    variables = {variable.name: variable for variable in plan.variables}
    yield from _twice("variable", [variable.name for variable in plan.variables], "variables")
    parameters = [variable.parameter for variable in plan.variables if variable.parameter is not None]
    yield from _unknown("parameter", parameters, variables, "variables")
    for variable in plan.variables:
        yield from _size(variable.dtype, variable.shape, f"variables: {variable.name}")
    misfits = False
    for rank in plan.ranks:
        at = f"ranks: {rank.rank}: pieces"
        yield from _unknown("variable", [piece.variable for piece in rank.pieces], variables, at)
        for piece in rank.pieces:
            shape = variables[piece.variable].shape if piece.variable in variables else ()
            if fault := fault_of(shape, piece.box):
                misfits = True
                yield f"a box of {piece.variable!r} has {fault}", at
    if not misfits:
        yield from _owners(plan)


def _owners(plan: Plan) -> Iterator[Finding]:
    """Every element of every variable is held by somebody; by several only if their boxes are equal."""
    boxes_of: dict[str, dict[Box | None, str]] = {}
    for rank in plan.ranks:
        for piece in rank.pieces:
            boxes_of.setdefault(piece.variable, {}).setdefault(piece.box, f"rank {rank.rank}")
    for variable in plan.variables:
        if fault := cover_fault(variable.shape, boxes_of.get(variable.name, {})):
            yield fault, f"variables: {variable.name}"


# ---------------------------------------------------------------- instructions


def _instructions(plan: Plan) -> Iterator[Finding]:
    variables = {piece.value for rank in plan.ranks for piece in rank.pieces}
    starts = [i for i in plan.instructions if isinstance(i, Start)]
    yield from _twice("communication", [start.tag_id for start in starts], "instructions")
    started = {start.tag_id for start in starts}
    for index, instruction in enumerate(plan.instructions):
        at = f"instructions[{index}]"
        match instruction:
            case Start():
                yield from _unknown("group", [instruction.group], plan.groups, at)
                yield from _start(instruction, plan.groups.get(instruction.group, ()), at)
            case Wait() if instruction.tag_id not in started:
                yield f"a wait for communication {instruction.tag_id}, which nobody starts", at
            case Run():
                names = [name for name, _ in (*instruction.reads, *instruction.writes)]
                yield from _twice("the segment's tensor", names, at)
                work = (instruction.flops, instruction.touched_bytes, instruction.streamed_bytes)
                sizes = (*instruction.write_bytes, instruction.inner_bytes)
                counts = (instruction.nodes, instruction.sorted_ids, instruction.packed_bytes)
                if min(*work, *sizes, *counts) < 0:
                    yield "a negative amount of work", at
            case Store(target=target):
                yield from _unknown("value of a variable", [target], variables, at)


def _start(start: Start, groups: Sequence[tuple[int, ...]], at: str) -> Iterator[Finding]:
    sizes = {len(members) for members in groups}
    if start.payload_bytes < 0 or any(count < 0 for count in start.counts):
        yield "a negative number of bytes or elements", at
    if start.counts and {len(start.counts)} != sizes:
        yield f"{len(start.counts)} counts for a group of {sorted(sizes)}", at
    if start.rounds_to and (start.kind not in ("all_reduce", "reduce_scatter") or start.reduction != "sum"):
        yield f"{start.kind} ({start.reduction}) of rounded values", at
    if start.kind in ("reduce_scatter", "all_gather") and not start.counts:
        yield f"no counts for {start.kind}", at
    reads, writes = len(start.reads), len(start.writes)
    if start.kind in ("gather_rows", "all_gather_rows"):
        fits = writes == reads + 1
    elif start.kind == "all_to_all_rows":
        fits = writes == reads
    elif start.kind == "scatter_rows":
        fits = writes == reads - 1
    else:
        fits = writes == reads == 1
    if not fits or not reads:
        yield f"{start.kind} of {reads} values into {writes}", at
    if (start.kind == "exchange") != (start.exchange is not None):
        yield f"an account of moves {'missing in' if start.exchange is None else 'of'} {start.kind}", at
    elif start.exchange is not None:
        yield from _exchange(start.exchange, sizes, at)
    for row in start.rows:
        yield from _size(row.dtype, row.shape, at)
    if start.rows and start.kind not in _ROW_KINDS:
        yield f"rows of {start.kind}", at


def _exchange(exchange: Exchange, sizes: set[int], at: str) -> Iterator[Finding]:
    """Every member ends with all that it wants, each part of it once, of one who has it."""
    yield from _size(exchange.dtype, exchange.shape, at)
    if {len(exchange.has), len(exchange.wants)} != sizes or len(sizes) != 1:
        yield f"an exchange of {len(exchange.has)} members for a group of {sorted(sizes)}", at
        return
    for region in filter(None, (*exchange.has, *exchange.wants)):
        fits = len(region) == len(exchange.shape) and all(
            0 <= start < stop <= size and all(before[1] <= after[0] for before, after in pairwise(ranges))
            for ranges, size in zip(region, exchange.shape, strict=True)
            for start, stop in ranges
        )
        if not fits:
            yield f"{list(region)} of a tensor shaped {list(exchange.shape)}", at
            return
    arriving: dict[int, list[Region]] = {}
    for move in exchange.moves:
        ends = [
            known[member] if 0 <= member < len(known) else None
            for known, member in ((exchange.has, move.source), (exchange.wants, move.target))
        ]
        if any(end is None or intersect(end, move.region) != move.region for end in ends):
            yield f"member {move.source} sends {move.target} what one of them does not have or want", at
            return
        arriving.setdefault(move.target, []).append(move.region)
    for member, wanted in enumerate(exchange.wants):
        parts = arriving.get(member, [])
        elements = sum(prod(shape_of(part)) for part in parts)
        is_twice = any(intersect(*pair) is not None for pair in combinations(parts, 2))
        if wanted is not None and (elements != prod(shape_of(wanted)) or is_twice):
            yield f"member {member} does not get what it wants, each part once", at


# ---------------------------------------------------------------- inputs and outputs


def _inputs_and_outputs(plan: Plan) -> Iterator[Finding]:
    entries: tuple[DataInput | DrawnInput, ...] = (*plan.data_inputs, *plan.drawn_inputs)
    names = [entry.name for entry in entries] + [shard_input.name for shard_input in plan.shard_inputs]
    yield from _twice("input", names, "data_inputs")
    if not all(size >= 1 for size in plan.sizes.values()):
        yield "a size below 1", "sizes"
    symbols = {size for entry in plan.data_inputs for size in entry.shape if isinstance(size, str)}
    for entry in entries:
        at = f"data_inputs: {entry.name}"
        known = [size for size in entry.shape if isinstance(size, int)]
        yield from _size(entry.dtype, known, at)
        if entry.sample_axis is not None and not 0 <= entry.sample_axis < len(entry.shape):
            yield f"sample axis {entry.sample_axis} of shape {list(entry.shape)}", at
    for drawn in plan.drawn_inputs:
        factors = [f for size in drawn.shape if isinstance(size, str) for f in size.split("*")]
        sizes = [factor for factor in factors if not factor.isdigit()]
        yield from _unknown("size", sizes, {*symbols, *plan.sizes}, f"drawn_inputs: {drawn.name}")
        if drawn.outer < 1:
            yield f"outer {drawn.outer}", f"drawn_inputs: {drawn.name}"
    for shard_input in plan.shard_inputs:
        yield from _size(shard_input.dtype, (), f"shard_inputs: {shard_input.name}")
    outputs = [output.name for output in plan.outputs]
    yield from _twice("output", outputs, "outputs")
    yield from _unknown("the loss is output", [plan.loss] if plan.loss is not None else [], outputs, "loss")
    for output in plan.outputs:
        if output.layout == "split" and (output.axis is None or output.axis < 0):
            yield f"an output split along axis {output.axis}", f"outputs: {output.name}"
    yield from _made_outputs(plan)


def _made_outputs(plan: Plan) -> Iterator[Finding]:
    """Every worker of the outputs' mesh has every output at the end of a step."""
    inputs = {entry.name for entry in plan.data_inputs} | {entry.name for entry in plan.drawn_inputs}
    inputs |= {shard_input.name for shard_input in plan.shard_inputs}
    written = {value for i in plan.instructions if isinstance(i, Run) for _, value in i.writes}
    written |= {value for i in plan.instructions if isinstance(i, Start) for value in i.writes}
    sites = {output.site for output in plan.outputs}
    if len(sites) > 1 or not sites <= {site for rank in plan.ranks for site in rank.sites}:
        yield f"outputs at {sorted(sites)}", "outputs"
    for rank in plan.ranks:
        if has_outputs(plan, rank):
            resident = {piece.value for piece in rank.pieces} | {*rank.constants, *plan.constants}
            known = written | resident | inputs | {piece.value for piece in (*plan.slices, *rank.slices)}
            at = f"outputs, on rank {rank.rank}"
            yield from _unknown("value", [output.value for output in plan.outputs], known, at)
