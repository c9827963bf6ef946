"""Plans broken in one place, drawn by a seed: in their instructions, their memory, their graphs, their data.

No mutation knows the model: each looks for whatever it can apply to, and says what it did.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.compiler.verification.ranks import Data, Ranks, launch_in_process
from partc.runtime.data import initial
from partc.runtime.execution import in_process
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Instruction, Plan, Run, Slice, Start, Store, Wait
from partc.runtime.plan.variables import Box

Random = np.random.Generator
Feeds = dict[str, np.ndarray]
Replace = msgspec.structs.replace


@dataclass
class Mutant:
    """A plan that is to be broken: its folder is a copy of its own.

    `feeds`: changes what a rank is fed and draws in a step; `start`: what rows of a variable start with.
    """

    folder: PlanFolder
    rng: Random
    what: str = ""
    feeds: Callable[[int, int, Feeds], Feeds] | None = None  # (rank, step from 0, what it is fed)
    start: Callable[[str, np.ndarray], np.ndarray] | None = None

    @property
    def plan(self) -> Plan:
        return self.folder.plan

    def change(self, what: str, **fields: Any) -> bool:
        self.what = what
        self.folder = PlanFolder(Replace(self.plan, **fields), self.folder.path)
        return True

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def places(self, kind: type[Instruction]) -> list[int]:
        return [place for place, i in enumerate(self.plan.instructions) if isinstance(i, kind)]


Mutate = Callable[[Mutant], bool]  # False: there is nothing to apply it to
IN_PLACE = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


def draw_mutant(folder: PlanFolder, where: Path, seed: int) -> Mutant:
    """Return a broken copy of a plan."""
    rng = np.random.default_rng(seed)
    shutil.copytree(folder.path, where)
    mutant = Mutant(PlanFolder(folder.plan, where), rng)
    while not MUTATIONS[int(rng.integers(len(MUTATIONS)))](mutant):
        pass
    return mutant


# ---------------------------------------------------------------- communications


def _starts(mutant: Mutant) -> list[int]:
    found = []
    for place in mutant.places(Start):
        start = mutant.plan.instructions[place]
        assert isinstance(start, Start)
        if start.kind in IN_PLACE:
            found.append(place)
    return found


def _wait_of(plan: Plan, place: int) -> int:
    tag_id = plan.instructions[place].tag_id  # type: ignore[union-attr]
    return next(p for p, i in enumerate(plan.instructions) if isinstance(i, Wait) and i.tag_id == tag_id)


def remove_communication(mutant: Mutant) -> bool:
    if not (starts := _starts(mutant)):
        return False
    place = mutant.pick(starts)
    gone = {place, _wait_of(mutant.plan, place)}
    kept = tuple(i for p, i in enumerate(mutant.plan.instructions) if p not in gone)
    return mutant.change(f"removed {_name(mutant, place)}", instructions=kept)


def double_communication(mutant: Mutant) -> bool:
    if not (starts := _starts(mutant)):
        return False
    place = mutant.pick(starts)
    instructions = list(mutant.plan.instructions)
    start, wait = instructions[place], _wait_of(mutant.plan, place)
    assert isinstance(start, Start)
    tag_id = 10_000 + start.tag_id
    instructions[wait + 1 : wait + 1] = [Replace(start, tag_id=tag_id), Wait(tag_id)]
    return mutant.change(f"doubled {_name(mutant, place)}", instructions=tuple(instructions))


def move_communication(mutant: Mutant) -> bool:
    """Communicate before the segment that makes the value, or behind the one that reads it."""
    if not (starts := _starts(mutant)):
        return False
    place = mutant.pick(starts)
    instructions = list(mutant.plan.instructions)
    pair = [instructions[place], instructions[_wait_of(mutant.plan, place)]]
    name = _name(mutant, place)
    rest = [i for i in instructions if i not in pair]
    target = int(mutant.rng.integers(len(rest) + 1))
    return mutant.change(f"moved {name} to {target}", instructions=(*rest[:target], *pair, *rest[target:]))


def other_reduction(mutant: Mutant) -> bool:
    places = [p for p in _starts(mutant) if "reduce" in mutant.plan.instructions[p].kind]  # type: ignore[union-attr]
    if not places:
        return False
    place = mutant.pick(places)
    start = mutant.plan.instructions[place]
    assert isinstance(start, Start)
    other = mutant.pick([kind for kind in ("sum", "max", "min") if kind != start.reduction])
    return _put(mutant, place, Replace(start, reduction=other), f"{other} in {_name(mutant, place)}")


def fewer_ranks(mutant: Mutant) -> bool:
    """One communication among a part of its group; the others have one of their own."""
    places = []
    for place in _starts(mutant):
        start = mutant.plan.instructions[place]
        assert isinstance(start, Start)
        if start.kind not in ("reduce_scatter", "all_gather") and _members(mutant.plan, start) > 1:
            places.append(place)
    if not places:
        return False
    place = mutant.pick(places)
    start = mutant.plan.instructions[place]
    assert isinstance(start, Start)
    halves = tuple(half for members in mutant.plan.groups[start.group] for half in _halves(members))
    number_of = {rank: number for number, half in enumerate(halves) for rank in half}
    ranks = [
        Replace(rank, groups={**rank.groups, "cut": number_of[rank.rank]}) if rank.rank in number_of else rank
        for rank in mutant.plan.ranks
    ]
    mutant.change("", ranks=tuple(ranks), groups={**mutant.plan.groups, "cut": halves})
    return _put(mutant, place, Replace(start, group="cut"), f"half the ranks in {_name(mutant, place)}")


def shift_counts(mutant: Mutant) -> bool:
    places = []
    for place in _starts(mutant):
        start = mutant.plan.instructions[place]
        if isinstance(start, Start) and len(start.counts) > 1 and max(start.counts) > 1:
            places.append(place)
    if not places:
        return False
    place = mutant.pick(places)
    start = mutant.plan.instructions[place]
    assert isinstance(start, Start)
    counts = list(start.counts)
    largest = int(np.argmax(counts))
    counts[largest] -= 1
    counts[(largest + 1) % len(counts)] += 1
    return _put(mutant, place, Replace(start, counts=tuple(counts)), f"counts of {_name(mutant, place)}")


def _members(plan: Plan, start: Start) -> int:
    return max(len(members) for members in plan.groups[start.group])


def _halves(members: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    cut = max(1, len(members) // 2)
    yield from filter(None, (members[:cut], members[cut:]))


def _put(mutant: Mutant, place: int, instruction: Instruction, what: str) -> bool:
    instructions = list(mutant.plan.instructions)
    instructions[place] = instruction
    return mutant.change(what, instructions=tuple(instructions))


def _name(mutant: Mutant, place: int) -> str:
    start = mutant.plan.instructions[place]
    assert isinstance(start, Start)
    return f"{start.kind} {start.label or start.reads}"


# ---------------------------------------------------------------- segments: when, and on what


def run_twice(mutant: Mutant) -> bool:
    """A segment that writes a variable: at a server, its shard is updated twice."""
    place = mutant.pick(_updates(mutant))
    instructions = list(mutant.plan.instructions)
    instructions.insert(place, instructions[place])
    return mutant.change(f"update {place} twice", instructions=tuple(instructions))


def leave_out_update(mutant: Mutant) -> bool:
    place = mutant.pick(_updates(mutant))
    instructions = list(mutant.plan.instructions)
    del instructions[place]
    return mutant.change(f"left out update {place}", instructions=tuple(instructions))


def move_update(mutant: Mutant) -> bool:
    """An update too early: with the gradients of the step before, or before the variable is read."""
    place = mutant.pick(_updates(mutant))
    target = int(mutant.rng.integers(place)) if place else 0
    instructions = list(mutant.plan.instructions)
    instructions.insert(target, instructions.pop(place))
    return mutant.change(f"update {place} moved to {target}", instructions=tuple(instructions))


def write_elsewhere(mutant: Mutant) -> bool:
    """A stale variable: what is written of it goes nowhere."""
    place = mutant.pick(_updates(mutant))
    run = mutant.plan.instructions[place]
    if not isinstance(run, Run):
        return False
    variables = {piece.value for rank in mutant.plan.ranks for piece in rank.pieces}
    index = mutant.pick([i for i, (_, value) in enumerate(run.writes) if value in variables])
    writes = list(run.writes)
    writes[index] = (writes[index][0], "nowhere")
    return _put(mutant, place, Replace(run, writes=tuple(writes)), f"{run.writes[index]} not written")


def swap_values(mutant: Mutant) -> bool:
    """Two values of one shape change places in what a segment reads or writes: a slot, a gradient."""
    shapes = _shapes(mutant)
    choices = []
    for place in mutant.places(Run):
        run = mutant.plan.instructions[place]
        assert isinstance(run, Run)
        for side in ("reads", "writes"):
            pairs = getattr(run, side)
            choices += [
                (place, side, one, other)
                for one in range(len(pairs))
                for other in range(one)
                if shapes.get(pairs[one][1]) == shapes.get(pairs[other][1]) is not None
            ]
    if not choices:
        return False
    place, side, one, other = mutant.pick(choices)
    run = mutant.plan.instructions[place]
    assert isinstance(run, Run)
    pairs = list(getattr(run, side))
    what = f"{side} {pairs[one]} and {pairs[other]} swapped"
    pairs[one], pairs[other] = (pairs[one][0], pairs[other][1]), (pairs[other][0], pairs[one][1])
    return _put(mutant, place, Replace(run, **{side: tuple(pairs)}), what)


def _shapes(mutant: Mutant) -> dict[str, tuple[int, ...]]:
    slices = (*mutant.plan.slices, *(piece for rank in mutant.plan.ranks for piece in rank.slices))
    found = {piece.value: piece.shape for piece in slices}
    shapes = {variable.name: variable.shape for variable in mutant.plan.variables}
    pieces = (piece for rank in mutant.plan.ranks for piece in rank.pieces)
    return found | {piece.value: shapes[piece.variable] for piece in pieces}


def _updates(mutant: Mutant) -> list[int]:
    variables = {piece.value for rank in mutant.plan.ranks for piece in rank.pieces}
    found = [
        place
        for place, i in enumerate(mutant.plan.instructions)
        if (isinstance(i, Run) and variables & {value for _, value in i.writes})
        or (isinstance(i, Store) and i.target in variables)
    ]
    assert found
    return found


# ---------------------------------------------------------------- memory and shards


def shift_slice(mutant: Mutant) -> bool:
    """A value of a bucket begins one element early or late."""
    sizes = {buffer.name: buffer.elements for buffer in mutant.plan.buffers}

    def moved(piece: Slice) -> list[int]:
        room = sizes[piece.buffer] - int(np.prod(piece.shape, dtype=np.int64))
        return [offset for offset in (piece.offset - 1, piece.offset + 1) if 0 <= offset <= room]

    choices = [(i, offset) for i, piece in enumerate(mutant.plan.slices) for offset in moved(piece)]
    if not choices:
        return False
    index, offset = mutant.pick(choices)
    slices = list(mutant.plan.slices)
    slices[index] = Replace(slices[index], offset=offset)
    return mutant.change(f"{slices[index].value} at {offset}", slices=tuple(slices))


def swap_slices(mutant: Mutant) -> bool:
    slices = list(mutant.plan.slices)
    choices = [
        (one, other)
        for one in range(len(slices))
        for other in range(one)
        if slices[one].shape == slices[other].shape
        and (slices[one].buffer, slices[one].offset) != (slices[other].buffer, slices[other].offset)
    ]
    if not choices:
        return False
    one, other = mutant.pick(choices)
    places = [(slices[i].buffer, slices[i].offset) for i in (other, one)]
    what = f"{slices[one].value} and {slices[other].value} change places"
    for index, (buffer, offset) in zip((one, other), places, strict=True):
        slices[index] = Replace(slices[index], buffer=buffer, offset=offset)
    return mutant.change(what, slices=tuple(slices))


def shift_boundary(mutant: Mutant) -> bool:
    """A constant that says where a shard begins or ends is off by one, at one rank."""
    choices = [(r, name, i) for r, rank in enumerate(mutant.plan.ranks)
               for name, vector in rank.constants.items() for i in range(len(vector))]  # fmt: skip
    if not choices:
        return False
    index, name, place = mutant.pick(choices)
    ranks = list(mutant.plan.ranks)
    vector = list(ranks[index].constants[name])
    vector[place] += int(mutant.pick([-1, 1]))
    ranks[index] = Replace(ranks[index], constants={**ranks[index].constants, name: tuple(vector)})
    return mutant.change(f"{name} at rank {index} is {vector}", ranks=tuple(ranks))


def other_start(mutant: Mutant) -> bool:
    """A variable that starts elsewhere, in all its pieces and copies."""
    name = mutant.pick([v.name for v in mutant.plan.variables])
    by = float(mutant.pick([0.5, 0.01, -1.0]))
    mutant.start = lambda variable, rows: rows + rows.dtype.type(by) if variable == name else rows
    mutant.what = f"{name} starts {by} off"
    return True


# ---------------------------------------------------------------- graphs


def _edit(mutant: Mutant, edit: Callable[[onnx.GraphProto], str | None]) -> bool:
    """Edit one segment of the plan."""
    path = mutant.folder.path / mutant.pick(sorted({i.segment for i in mutant.plan.instructions
                                                    if isinstance(i, Run)}))  # fmt: skip
    model = onnx.load(path)
    what = edit(model.graph)
    if what is None:
        return False
    mutant.what = f"{what} in {path.name}"
    onnx.save(model, path)
    return True


def scale_constant(mutant: Mutant) -> bool:
    """A learning rate, a divisor, a limit."""

    def edit(graph: onnx.GraphProto) -> str | None:
        tensors = list(graph.initializer) + [
            node.attribute[0].t for node in graph.node if node.op_type == "Constant" and node.attribute
        ]
        floats = [t for t in tensors if t.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)]
        if not floats:
            return None
        tensor, factor = mutant.pick(floats), float(mutant.pick([2.0, 0.5, 1.01, -1.0]))
        value = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array((value * factor).astype(value.dtype), tensor.name))
        return f"{tensor.name} times {factor}"

    return _edit(mutant, edit)


def shift_integer(mutant: Mutant) -> bool:
    def edit(graph: onnx.GraphProto) -> str | None:
        tensors = [t for t in graph.initializer if t.data_type == onnx.TensorProto.INT64 and all(t.dims)]
        if not tensors:
            return None
        tensor = mutant.pick(tensors)
        value = numpy_helper.to_array(tensor).copy()
        value.reshape(-1)[int(mutant.rng.integers(value.size))] += int(mutant.pick([-1, 1]))
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
        return f"{tensor.name} is {value.tolist()}"

    return _edit(mutant, edit)


OTHER_OPS = {
    "Add": ["Sub"], "Sub": ["Add"], "Mul": ["Div", "Add"], "Div": ["Mul"], "Max": ["Min"], "Min": ["Max"],
    "ReduceSum": ["ReduceMean", "ReduceMax"], "ReduceMean": ["ReduceSum"], "Sqrt": ["Identity"],
    "Tanh": ["Sigmoid"], "Sigmoid": ["Tanh"], "Neg": ["Identity"], "Less": ["LessOrEqual"], "Relu": ["Abs"],
    "GreaterOrEqual": ["Greater"], "ReduceSumSquare": ["ReduceSum"], "Exp": ["Identity"],
}  # fmt: skip


def other_op(mutant: Mutant) -> bool:
    def edit(graph: onnx.GraphProto) -> str | None:
        nodes = [node for node in graph.node if node.op_type in OTHER_OPS]
        if not nodes:
            return None
        node = mutant.pick(nodes)
        was, node.op_type = node.op_type, mutant.pick(OTHER_OPS[node.op_type])
        return f"{node.output[0]} by {node.op_type}, not {was}"

    return _edit(mutant, edit)


def leave_out_node(mutant: Mutant) -> bool:
    """A result is its own first operand: a missing average, clip, correction."""

    def edit(graph: onnx.GraphProto) -> str | None:
        kinds = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sqrt", "Where", "ScatterND", "Sum")
        nodes = [node for node in graph.node if node.op_type in kinds]
        if not nodes:
            return None
        node = mutant.pick(nodes)
        source = node.input[1] if node.op_type == "Where" else mutant.pick(list(node.input)[:2])
        node.CopyFrom(helper.make_node("Identity", [source], list(node.output), node.name))
        return f"{node.output[0]} is {source}"

    return _edit(mutant, edit)


def swap_operands(mutant: Mutant) -> bool:
    def edit(graph: onnx.GraphProto) -> str | None:
        nodes = [n for n in graph.node if n.op_type in ("Sub", "Div", "MatMul", "Where", "Gather", "Less")]
        if not nodes:
            return None
        node = mutant.pick(nodes)
        one, other = (1, 2) if node.op_type == "Where" else (0, 1)
        node.input[one], node.input[other] = node.input[other], node.input[one]
        return f"operands of {node.output[0]} ({node.op_type}) swapped"

    return _edit(mutant, edit)


def other_input(mutant: Mutant) -> bool:
    """A node reads another tensor of the same shape: a stale value, another variable's."""

    def edit(graph: onnx.GraphProto) -> str | None:
        typed = {info.name: info.type for info in (*graph.input, *graph.value_info)}
        choices = [
            (n, i, other.name)
            for n in graph.node
            for i, name in enumerate(n.input)
            for other in graph.input
            if name in typed and other.name != name and other.type == typed[name]
        ]
        if not choices:
            return None
        node, index, other = mutant.pick(choices)
        was, node.input[index] = node.input[index], other
        return f"{node.output[0]} reads {other}, not {was}"

    return _edit(mutant, edit)


# ---------------------------------------------------------------- data and draws


def _axes(mutant: Mutant, drawn: bool) -> dict[str, int]:
    entries = mutant.plan.drawn_inputs if drawn else mutant.plan.data_inputs
    return {entry.name: entry.sample_axis for entry in entries if entry.sample_axis is not None}


def repeat_sample(mutant: Mutant) -> bool:
    """At one rank the first sample is read twice, and the last not at all."""
    return _feed(
        mutant, lambda array, axis: np.roll(array, 1, axis).take([1, *range(1, array.shape[axis])], axis)
    )


def shift_samples(mutant: Mutant) -> bool:
    """One input's samples are off by one against the others'."""
    name = mutant.pick([*_axes(mutant, drawn=False)])
    return _feed(mutant, lambda array, axis: np.roll(array, 1, axis), {name})


def _feed(
    mutant: Mutant,
    change: Callable[[np.ndarray, int], np.ndarray],
    only: set[str] | None = None,
    drawn: bool = False,
) -> bool:
    axes = {n: axis for n, axis in _axes(mutant, drawn).items() if only is None or n in only}
    workers = [rank.rank for rank in mutant.plan.ranks if rank.replica is not None]
    if not axes:
        return False
    chosen = mutant.pick(workers)

    def feeds(rank: int, step: int, fed: Feeds) -> Feeds:
        if rank != chosen:
            return fed
        return {n: np.ascontiguousarray(change(a, axes[n])) if n in axes else a for n, a in fed.items()}

    mutant.feeds = feeds
    mutant.what = f"{sorted(axes)} changed at rank {chosen}"
    return True


def wrong_draws(mutant: Mutant) -> bool:
    return _feed(mutant, lambda array, axis: np.flip(array, axis), drawn=True)


def repeat_batch(mutant: Mutant) -> bool:
    """A rank reads its first batch in every step."""
    workers = [rank.rank for rank in mutant.plan.ranks if rank.replica is not None]
    chosen, first = mutant.pick(workers), dict[str, np.ndarray]()

    def feeds(rank: int, step: int, fed: Feeds) -> Feeds:
        return (first or first.update(fed) or fed) if rank == chosen else fed

    mutant.feeds = feeds
    mutant.what = f"the first batch again and again at rank {chosen}"
    return True


MUTATIONS: tuple[Mutate, ...] = (
    remove_communication,
    double_communication,
    move_communication,
    other_reduction,
    fewer_ranks,
    shift_counts,
    run_twice,
    leave_out_update,
    move_update,
    write_elsewhere,
    swap_values,
    shift_slice,
    swap_slices,
    shift_boundary,
    other_start,
    scale_constant,
    scale_constant,
    shift_integer,
    other_op,
    other_op,
    leave_out_node,
    swap_operands,
    other_input,
    repeat_sample,
    shift_samples,
    wrong_draws,
    repeat_batch,
)


# ---------------------------------------------------------------- training them


@contextmanager
def launch_mutant(mutant: Mutant, data: Data, seed: int) -> Iterator[Ranks]:
    """Open the broken plan's ranks in this process."""
    part, feeds = initial.InitialValues.part, in_process.RanksInProcess._feeds

    def started(values: Any, name: str, box: Box | None = None) -> np.ndarray:
        made = part(values, name, box)
        return made if mutant.start is None else mutant.start(name, made)

    def fed(ranks: Any, rank: Any, share: Mapping[str, np.ndarray]) -> Feeds:
        given = feeds(ranks, rank, share)
        return given if mutant.feeds is None else mutant.feeds(rank.rank, ranks._step, given)

    initial.InitialValues.part = started  # type: ignore[method-assign]
    in_process.RanksInProcess._feeds = fed  # type: ignore[method-assign]
    try:
        with launch_in_process(mutant.folder, data, 0, seed) as ranks:
            initial.InitialValues.part = part  # type: ignore[method-assign]
            yield ranks
    finally:
        initial.InitialValues.part = part  # type: ignore[method-assign]
        in_process.RanksInProcess._feeds = feeds  # type: ignore[method-assign]
