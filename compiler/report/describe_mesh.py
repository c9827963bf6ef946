"""The workers' mesh, and what each of its axes splits."""

from dataclasses import dataclass
from math import prod

from partc.compiler.compilation import Compilation
from partc.compiler.report.units import count, join_words, operations, plural
from partc.passes.layouts.layouts import Layout, Mesh
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Plan


@dataclass(frozen=True, slots=True)
class PartedVariables:
    """Variables of one shape that are kept alike."""

    names: tuple[str, ...]
    shape: str
    split: str
    part: str


@dataclass(frozen=True, slots=True)
class MeshDescription:
    """A mesh of several workers a replica, or whose replicas share variables."""

    axes: str
    sentences: tuple[str, ...]
    parted: tuple[PartedVariables, ...]


def describe_mesh(compilation: Compilation) -> MeshDescription | None:
    """Return what the strategy's mesh is and does; None where every worker is a replica of its own."""
    if not compilation.strategy.mesh:
        return None
    mesh, plan = compilation.lowered.mesh, compilation.plan
    return MeshDescription(
        " \u00d7 ".join(f"{name} {parts}" for name, parts in mesh.axes),
        (_replicas(plan), _held(plan), _operators(compilation)),
        _parted(compilation, mesh),
    )


def _replicas(plan: Plan) -> str:
    workers = sum(rank.replica is not None for rank in plan.ranks)
    each = plural(workers // plan.replicas, "worker")
    return f"{plural(plan.replicas, 'replica')} of {each}: samples are divided among replicas alone."


def _held(plan: Plan) -> str:
    shapes = {variable.name: variable for variable in plan.variables}
    parts = [held for held in plan.ranks[0].held if held.box is not None]
    whole = len(plan.ranks[0].held) - len(parts)
    return (
        f"Rank 0 keeps a part of {plural(len(parts), 'variable')} "
        f"({count(sum(prod(local_shape(shapes[h.variable].shape, h.box)) for h in parts))} elements of "
        f"{count(sum(prod(shapes[h.variable].shape) for h in parts))}) and {count(whole)} whole."
    )


def _operators(compilation: Compilation) -> str:
    computed = operations(sum(compilation.lowered.flops.values()))
    asked = len(compilation.strategy.ops)
    told = f"the strategy’s {count(asked)} entries for ops, and else " if asked else ""
    return f"A worker computes {computed} a step. What an op splits follows from {told}what its operands are."


def _parted(compilation: Compilation, mesh: Mesh) -> tuple[PartedVariables, ...]:
    variables = {variable.name: variable.shape for variable in compilation.plan.variables}
    alike: dict[tuple[tuple[int, ...], Layout], list[str]] = {}
    boxes = {held.variable: held.box for rank in compilation.plan.ranks for held in rank.held}
    for state in compilation.lowered.states:
        layout = compilation.lowered.meanings[state.value][1]
        if layout.splits():
            alike.setdefault((variables[state.variable], layout), []).append(state.variable)
    return tuple(
        PartedVariables(
            tuple(names),
            " \u00d7 ".join(map(count, shape)),
            join_words([_split(mesh, axis, split.axis, split.outer) for axis, split in layout.splits()]),
            " \u00d7 ".join(map(count, local_shape(shape, boxes[names[0]]))),
        )
        for (shape, layout), names in alike.items()
    )


def _split(mesh: Mesh, mesh_axis: int, axis: int, outer: int) -> str:
    name, parts = mesh.axes[mesh_axis]
    within = f" within each of {outer} blocks" if outer > 1 else ""
    return f"axis {axis}{within} in {parts} along {name}"
