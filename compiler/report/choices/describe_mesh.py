"""The workers' mesh, and what each of its axes splits."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from partc.compiler.compilation import Compilation
from partc.compiler.report.describe_program import is_idle
from partc.compiler.report.units import count, join_words, operations, plural, size, some_ranges
from partc.cost.strategy import Strategy
from partc.passes.layouts.layouts import Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Plan, Run, Site, Start


@dataclass(frozen=True, slots=True)
class PartedVariables:
    """Variables of one shape that are kept alike."""

    names: tuple[str, ...]
    shape: str
    split: str
    part: str


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of a pipeline: its ranks, what each keeps and computes, and what it sends to other stages."""

    name: str
    ranks: str
    variables: str
    computes: str
    sends: str


@dataclass(frozen=True, slots=True)
class MeshDescription:
    """A mesh of several workers a replica, or whose replicas share variables."""

    axes: str
    sentences: tuple[str, ...]
    parted: tuple[PartedVariables, ...]
    stages: tuple[StageRow, ...]  # of a pipeline
    uneven_stages: str  # why they have unequal work, if they have


def describe_mesh(compilation: Compilation) -> MeshDescription | None:
    """Return what the strategy's mesh is and does; None where every worker is a replica of its own."""
    if not compilation.strategy.has_meshes:
        return None
    meshes, plan = compilation.lowered.meshes, compilation.plan
    return MeshDescription(
        describe_grid(compilation.strategy, meshes, " \u00d7 "),
        (_replicas(compilation), *_microbatches(plan), _held(plan), _operators(compilation)),
        _parted(compilation, meshes),
        tuple(_stage(plan, site) for site in meshes.sites) if len(meshes.each) > 1 else (),
        compilation.uneven_stages,
    )


def describe_grid(strategy: Strategy, meshes: Meshes, times: str) -> str:
    """Return the workers' meshes in words: the grids of stages, operators' own, and micro-batches."""
    grid = [("pipeline", strategy.stages)] if strategy.stages > 1 else []
    words = times.join(f"{name} {parts}" for name, parts in (*grid, *strategy.mesh.items()))
    own = len(meshes.each) - (strategy.stages if strategy.mesh else 0)
    if own:
        devices = f"{plural(own, 'group')} of operators\u2019 own devices"
        words = f"{words}, {devices}" if words else devices
    return f"{words}, {strategy.microbatches} micro-batches" if strategy.microbatches > 1 else words


def _microbatches(plan: Plan) -> list[str]:
    if plan.microbatches == 1:
        return []
    return [
        f"Each replica\u2019s batch passes in {plan.microbatches} micro-batches, one after the other; "
        "gradients are summed as they come, and variables are updated once."
    ]


def _stage(plan: Plan, site: Site) -> StageRow:
    ranks = [rank for rank in plan.ranks if site in rank.sites]
    shapes = {variable.name: variable.shape for variable in plan.variables}
    pieces = ranks[0].pieces
    elements = sum(prod(local_shape(shapes[h.variable], h.box)) for h in pieces)
    runs = [i for i in plan.instructions if isinstance(i, Run) and i.site == site]
    sent: dict[Site, int] = {}
    for start in plan.instructions:
        if isinstance(start, Start) and start.senders == site != start.receivers:
            sent[start.receivers] = sent.get(start.receivers, 0) + start.payload_bytes
    return StageRow(
        site,
        some_ranges([rank.rank for rank in ranks]),
        f"{count(len(pieces))} ({count(elements)} elements)",
        operations(sum(run.flops for run in runs)),
        join_words([f"{size(nbytes)} to {target}" for target, nbytes in sent.items()]) or "nothing",
    )


def _replicas(compilation: Compilation) -> str:
    plan = compilation.plan
    workers = sum(rank.replica is not None and not is_idle(plan, rank) for rank in plan.ranks)
    each = plural(workers // plan.replicas, "worker")
    sentence = f"{plural(plan.replicas, 'replica')} of {each}"
    if compilation.strategy.variables and plan.replicas == workers and _columns_by_replicas(compilation):
        return f"{sentence}: they divide the samples of some operators, and the columns of others."
    return f"{sentence}: samples are divided among replicas alone."


def _columns_by_replicas(compilation: Compilation) -> bool:
    """Tell whether the strategy gives replicas other dimensions than samples."""
    splits = [op.split or {} for op in compilation.strategy.ops]
    return any(axis == "data" and name != "batch" for split in splits for name, axis in split.items())


def _held(plan: Plan) -> str:
    shapes = {variable.name: variable for variable in plan.variables}
    first = next((rank for rank in plan.ranks if rank.pieces), plan.ranks[0])
    parts = [piece for piece in first.pieces if piece.box is not None]
    whole = len(first.pieces) - len(parts)
    if not parts:
        return f"Rank {first.rank} keeps {plural(whole, 'variable')}, whole."
    return (
        f"Rank {first.rank} keeps a part of {plural(len(parts), 'variable')} "
        f"({count(sum(prod(local_shape(shapes[h.variable].shape, h.box)) for h in parts))} elements of "
        f"{count(sum(prod(shapes[h.variable].shape) for h in parts))}) and {count(whole)} whole."
    )


def _operators(compilation: Compilation) -> str:
    of_site: dict[Site, int] = {}
    for run in compilation.plan.instructions:
        if isinstance(run, Run):
            of_site[run.site] = of_site.get(run.site, 0) + run.flops
    computed = operations(max(of_site.values(), default=0))
    entry_count = len(compilation.strategy.ops)
    entries = f"{count(entry_count)} entries for ops" if entry_count > 1 else "entry for an op"
    source = f"the strategy’s {entries}, and else " if entry_count else ""
    return (
        f"A worker computes {computed} a step. What an op splits follows from {source}what its operands are."
    )


def _parted(compilation: Compilation, meshes: Meshes) -> tuple[PartedVariables, ...]:
    """Return variables that are kept in parts; those of which all that is told is equal together."""
    shapes = {variable.name: variable.shape for variable in compilation.plan.variables}
    alike: dict[tuple[str, str, str], list[str]] = {}
    boxes = {piece.variable: piece.box for rank in compilation.plan.ranks for piece in rank.pieces}
    for state in compilation.lowered.states:
        layout, shape = compilation.lowered.meanings[state.value][1], shapes[state.variable]
        if layout.splits() and not layout.rows_of:
            mesh = meshes.of(layout.site)
            split = join_words([_split(mesh, axis, split) for axis, split in layout.splits()])
            part = local_shape(shape, boxes[state.variable])
            alike.setdefault((_times(shape), split, _times(part)), []).append(state.variable)
    return tuple(PartedVariables(tuple(names), *description) for description, names in alike.items())


def _times(shape: Iterable[int]) -> str:
    return " \u00d7 ".join(map(count, shape))


def _split(mesh: Mesh, mesh_axis: int, split: Split) -> str:
    name, parts = mesh.axes[mesh_axis]
    within = f" within each of {split.outer} blocks" if split.outer > 1 else ""
    return f"axis {split.axis}{within} in {parts} along {name}"
