"""What the dimensions in a strategy mean to a node: a wish for each mesh axis.

    "split": {"out:1": "tensor"}        axis 1 of the output along the mesh axis tensor

A dimension is `batch` (the samples), `out:A` (axis A of the output) or `in:I:A` (axis A of operand I,
which is summed); `/N` behind it means the inner factor behind N blocks. It is split along a mesh axis,
by its name, or by the number of its parts: then along the first axis of as many that is free.
"""

import re
from collections.abc import Mapping
from math import prod

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.graph.facts import Facts
from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import decide_by_wish
from partc.passes.layouts.decisions import decide_axes, divides, has_open_parts, whole_axis
from partc.passes.layouts.layouts import REPLICAS, WORKER, Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.layouts.strategy_meshes import BATCH
from partc.passes.rules.sharding_rules import NodeFacts, node_facts
from partc.runtime.errors import BadStrategy, some_of

DIMENSION = re.compile(
    r"batch|(?:out:(?P<out>\d+)|in:(?P<operand>\d+):(?P<axis>\d+))(?:/(?P<outer>[1-9]\d*))?"
)


def wishes_of(
    analysis: Analysis, node: gs.Node, split: Mapping[str, int | str], mesh: Mesh, at: str
) -> dict[int, Wish]:
    """Return what a node splits along every mesh axis: nothing along those that are not named."""
    wishes = {axis: Wish(None) for axis in range(len(mesh.grid))}
    known = node_facts(node, analysis.facts, analysis.zeros)
    decisions = [whole_axis(node) for _ in mesh.axes]
    for dimension, parts in split.items():
        where = f"{at}: split: {dimension}"
        wish = _wish(node, analysis.facts, dimension, where)
        for axis in _mesh_axes(mesh, parts, wishes, where):
            if mesh.size(axis) == 1:
                continue
            if wish is None:
                _check_divides_samples(mesh, axis, where)
                del wishes[axis]
                continue
            wishes[axis] = wish
            decision = decide_by_wish(known, wish, mesh.size(axis))
            decisions[axis] = decision or whole_axis(node)
            together = decide_axes(mesh, decisions)
            if decision is None or not divides(mesh, known, together):
                along = [mesh.size(a) for a, other in wishes.items() if other == wish]
                if len(along) > 1 and _can_cut_along_one_axis(known, wish, prod(along)):
                    raise _refusal_along_several(node, dimension, along, where)
                count = prod(along)
                shortage = _shortage(node, analysis.facts, wish, count)
                raise _refusal(node, dimension, count, shortage, has_open_parts(known, together), where)
    return wishes


def _can_cut_along_one_axis(known: NodeFacts, wish: Wish, count: int) -> bool:
    decision = decide_by_wish(known, wish, count)
    mesh = Mesh(WORKER, (("parts", count),))
    return decision is not None and divides(mesh, known, decide_axes(mesh, [decision]))


def _refusal_along_several(node: gs.Node, dimension: str, along: list[int], at: str) -> BadStrategy:
    count = prod(along)
    return BadStrategy(
        f"{node.op} {node.name!r} cannot split {dimension} into {count} parts along {len(along)} mesh axes: "
        "its windows reach over into neighbours along one alone",
        at=at,
        fix=f'name its own `devices`, and write the number of parts: "{dimension}": {count}',
    )


def _shortage(node: gs.Node, facts: Facts, wish: Wish, count: int) -> str:
    """Tell that a dimension has fewer entries than parts, or is no such blocks; "" where neither is known."""
    if wish.split is None:
        return ""
    tensor = node.outputs[0] if wish.operand is None else node.inputs[wish.operand]
    size, outer = facts.fixed_size(tensor.name, wish.split.axis), wish.split.outer
    if size is None:
        return ""
    if size % outer:
        return f": {tensor.name!r} has {size} entries there, which {outer} blocks do not divide"
    if size // outer >= count:
        return ""
    return f": it has {size // outer} entries" + (
        f", a part of {size} in {outer} blocks" if outer > 1 else ""
    )


def _refusal(node: gs.Node, dimension: str, count: int, shortage: str, is_open: bool, at: str) -> BadStrategy:
    if not is_open:
        return BadStrategy(
            f"{node.op} {node.name!r} cannot split {dimension} into {count} parts{shortage}",
            at=at,
            fix="`partc inspect --groups` lists what each op may split",
        )
    return BadStrategy(
        f"{node.op} {node.name!r} cannot split {dimension} into {count} parts of different sizes: "
        "a size of what it reads or makes is told by the data alone",
        at=at,
        fix="write a number of parts that divides it, or leave the op whole",
    )


def _check_divides_samples(mesh: Mesh, axis: int, at: str) -> None:
    if axis != REPLICAS:
        raise BadStrategy(
            f"samples along {mesh.axes[axis][0]!r}, which does not tell replicas apart",
            at=at,
            fix=f"divide them along {mesh.axes[REPLICAS][0]!r}, the mesh's first axis",
        )


def _wish(node: gs.Node, facts: Facts, dimension: str, at: str) -> Wish | None:
    """Return what a dimension means for a node; None for the samples, which data parallelism splits."""
    match = DIMENSION.fullmatch(dimension)
    if match is None:
        fix = "write batch, out:A or in:I:A, with /N behind it for the factor behind N blocks"
        raise BadStrategy(f"no dimension {dimension!r}", at=at, fix=fix)
    if dimension == BATCH:
        return None
    is_output = match["out"] is not None
    operand = None if is_output else int(match["operand"])
    if operand is not None and operand >= len(node.inputs):
        fix = f"it has operands 0 to {len(node.inputs) - 1}"
        raise BadStrategy(f"{node.name!r} has no operand {operand}", at=at, fix=fix)
    axis = int(match["out"] if is_output else match["axis"])
    tensor = node.outputs[0] if operand is None else node.inputs[operand]
    if axis >= (rank := len(facts.shape(tensor.name))):
        fix = f"axes count from 0: {tensor.name!r} has {rank}"
        raise BadStrategy(f"{node.name!r} has no dimension {dimension}", at=at, fix=fix)
    return Wish(Split(axis, int(match["outer"] or 1)), operand, at)


def _mesh_axes(mesh: Mesh, parts: int | str, used: Mapping[int, Wish], at: str) -> list[int]:
    """Return the mesh axes that a dimension is split along."""
    names = [name for name, _ in mesh.grid]
    if isinstance(parts, str):
        if unknown := [name for name in parts.split("*") if name not in names]:
            raise BadStrategy(f"unknown mesh axis {unknown[0]!r}", at=at, fix=f"use one of {some_of(names)}")
        axes = [names.index(name) for name in parts.split("*")]
        if taken := [a for n, a in enumerate(axes) if a in axes[:n] or _is_taken(used, a)]:
            raise BadStrategy(
                f"mesh axis {names[taken[0]]!r} splits two dimensions of one op",
                at=at,
                fix="name each axis once for an op",
            )
        return axes
    free = [a for a in range(len(names)) if not _is_taken(used, a) and mesh.size(a) == parts]
    if not free and parts != 1:
        sizes = ", ".join(f"{name} has {size}" for name, size in mesh.grid)
        raise BadStrategy(
            f"no mesh axis of {parts} parts is left",
            at=at,
            fix=f"use those there are: {sizes}; or write the `devices` that the op is divided among",
        )
    return free[:1]


def _is_taken(used: Mapping[int, Wish], axis: int) -> bool:
    """Tell whether an axis splits a dimension already; one that divides samples has no wish."""
    return axis not in used or used[axis].split is not None
