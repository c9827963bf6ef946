"""The tasks that sum the gradients of a bucket of parameters, send them where these are kept, and apply them.

Terms that a mesh makes are summed there first, together; rows of indexed gradients are gathered, or summed as
dense ones where that moves less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod

import numpy as np

from partc.compiler.task_graphs.mesh_places import MeshPlace, Where
from partc.compiler.task_graphs.task_blocks import Draft, Ends, PlacedGroup, TaskBlock
from partc.compiler.task_graphs.task_prices import ComputePrice
from partc.compiler.task_graphs.tensor_moves import Messages, SentTensor, TensorMoves
from partc.compiler.task_graphs.tensor_ways import Sum
from partc.cost.simulation.task_arrays import Ints
from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.scheduling.segment_work import Work
from partc.passes.search.operators.count_work import count_update
from partc.passes.search.operators.group_layouts import plain
from partc.passes.search.operators.grouped_step import GroupedStep


@dataclass(frozen=True, slots=True)
class GradientTerm:
    """A term of a parameter's gradient: its name and layout, who makes it, and in which slot."""

    name: str
    layout: Layout
    placed: PlacedGroup
    slot: int


@dataclass(frozen=True, slots=True)
class UpdatedParameter:
    """A parameter, its layout where it is kept, the group that keeps it, and what its gradient is made of."""

    parameter: str
    layout: Layout
    home: PlacedGroup
    terms: tuple[GradientTerm, ...]


@dataclass(slots=True)
class _OfMesh:
    """What a mesh makes of a bucket's gradients.

    slots  in which it makes them
    sums   the collectives that sum terms, one after the other -> bytes
    sent   messages
    homes  the workers that keep the parameters
    """

    placed: PlacedGroup
    slots: dict[int, None] = field(default_factory=dict)
    sums: dict[tuple[Sum, ...], int] = field(default_factory=dict)
    sent: list[Messages] = field(default_factory=list)
    homes: dict[int, None] = field(default_factory=dict)


class UpdateWriter:
    """Writes the blocks of updates."""

    def __init__(self, step: GroupedStep, moves: TensorMoves) -> None:
        self._step = step
        self._moves, self._prices = moves, moves.prices
        self._facts = step.analysis.facts
        self._work: dict[tuple[str, int], Work] = {}
        self._followers: dict[str, list[str]] = {}
        for name, leader in step.analysis.followers.items():
            if leader is not None and leader != name:
                self._followers.setdefault(leader, []).append(name)

    def write(self, updates: Sequence[UpdatedParameter]) -> TaskBlock:
        """Return the block of a bucket's updates: behind what they wait for a segment begins."""
        workers = len(self._prices.workers)
        memory, launching_s, computing_s = (np.zeros(workers) for _ in range(3))
        meshes: dict[MeshPlace, _OfMesh] = {}
        for update in updates:
            at = list(update.home.workers)
            own = self._local(update.parameter, update.layout, update.home.layout.mesh)
            memory[at] += self._least_kept_bytes(update)
            work = self._update_work(update)
            launching_s[at] += work.launching_s[at]
            computing_s[at] += work.computing_s[at]
            for term in update.terms:
                of_mesh = meshes.setdefault(term.placed.place, _OfMesh(term.placed))
                of_mesh.slots[term.slot] = None
                of_mesh.homes.update(dict.fromkeys(update.home.workers))
                self._add_term(of_mesh, update, term, own)
        waits = any(of_mesh.sums or of_mesh.sent for of_mesh in meshes.values())
        price = self._prices.begun(ComputePrice(launching_s, computing_s), int(waits))
        draft = Draft(self._prices)
        ends = [self._bring_home(draft, of_mesh) for of_mesh in meshes.values()]
        keepers = np.flatnonzero(launching_s + computing_s).astype(np.int32)
        tasks = draft.computing(keepers, price)
        for behind in ends:
            draft.wait_for_ends(behind, keepers, tasks)
        return draft.finish(memory=memory)

    def _update_work(self, update: UpdatedParameter) -> ComputePrice:
        mesh = update.home.layout.mesh
        key = update.parameter, mesh.share(update.layout)
        if key not in self._work:
            self._work[key] = count_update(self._step, update.parameter, update.layout, mesh)
        return self._prices.work(self._work[key], 0)

    def _least_kept_bytes(self, update: UpdatedParameter) -> int:
        """Return what each worker keeps of a parameter and its followers at the least.

        Gradients and next values may be let go again within the segment that makes them.
        """
        mesh, kept_bytes = update.home.layout.mesh, 0
        for name in (update.parameter, *self._followers.get(update.parameter, ())):
            sizes = enumerate(self._facts.shape(name))
            elements = prod(size // mesh.parts(update.layout, axis) for axis, size in sizes)
            kept_bytes += elements * self._facts.dtypes[name].itemsize
        return kept_bytes

    def _local(self, tensor: str, layout: Layout, mesh: Mesh) -> int:
        return -(-self._facts.nbytes(tensor) // mesh.share(layout))

    def _add_term(self, of_mesh: _OfMesh, update: UpdatedParameter, term: GradientTerm, own: int) -> None:
        """Note how a term is summed and sent. `own`: bytes of the parameter's part where it is kept."""
        placed, layout, native = term.placed, update.layout, term.layout
        is_here = placed.place == update.home.place
        is_sparse = self._step.analysis.training.gradients[update.parameter].is_sparse
        sums, summed_layout = _sums_of(native, layout if is_here else Layout(""), is_sparse)
        nbytes = self._local(term.name, native, placed.layout.mesh)
        if is_sparse:
            nbytes *= prod(placed.layout.mesh.size(*axes) for kind, axes in sums if kind == "all_gather")
            if 2 * own < nbytes:
                sums, nbytes = (("all_reduce", tuple(sorted(chain(*(axes for _, axes in sums))))),), own
        if sums:
            of_mesh.sums[sums] = of_mesh.sums.get(sums, 0) + nbytes
        if not is_here or summed_layout.placements != layout.placements:
            shape, dtype = self._facts.shape(update.parameter), self._facts.dtypes[update.parameter]
            ends = Where.of(placed.place, plain(summed_layout)), Where.of(update.home.place, plain(layout))
            sent = self._moves.messages(SentTensor.of(shape, dtype.itemsize), *ends)
            if is_sparse:
                sent = replace(sent, nbytes=np.minimum(sent.nbytes, nbytes))
            if len(sent.nbytes):
                of_mesh.sent.append(sent)

    def _bring_home(self, draft: Draft, of_mesh: _OfMesh) -> Ends:
        """Add the collectives and messages of a mesh's gradients; return what each keeper waits for."""
        placed, workers = of_mesh.placed, len(self._prices.workers)
        if len(of_mesh.slots) == 1:
            ends = Ends.of(placed.at, next(iter(of_mesh.slots)), workers)
        else:
            ends = self._joined(draft, of_mesh)
        for sums, nbytes in of_mesh.sums.items():
            for kind, axes in sums:
                draft.collective_along(placed.place, kind, axes, nbytes, ends)
        homes: Ints = np.array(list(of_mesh.homes), np.int32)
        if of_mesh.sent:
            members = np.array(tuple(dict.fromkeys((*placed.workers, *of_mesh.homes))), np.int32)
            sent = Messages.joined(of_mesh.sent)
            moved = self._prices.exchange(sent.sources, sent.targets, sent.nbytes)
            ends.put(members, draft.communicate(moved, members, ends))
        ends_at_home = Ends(workers)
        ends_at_home.slots[homes], ends_at_home.indices[homes] = ends.slots[homes], ends.indices[homes]
        return ends_at_home

    def _joined(self, draft: Draft, of_mesh: _OfMesh) -> Ends:
        """Add a task on each worker of a mesh, which takes no time, behind all that makes gradients there."""
        placed, workers = of_mesh.placed, len(self._prices.workers)
        joins = draft.joins(len(placed.at))
        for slot in of_mesh.slots:
            draft.wait(slot, placed.at, joins)
        ends = Ends(workers)
        ends.put(placed.at, joins)
        return ends


def _sums_of(native: Layout, home: Layout, is_sparse: bool) -> tuple[tuple[Sum, ...], Layout]:
    """Return the collectives that sum a term where it is made, and its layout behind them."""
    sums: list[Sum] = []
    reduced: list[int] = []
    layout = native
    for axis, placement in enumerate(native.placements):
        home_placement = home.along(axis)
        if isinstance(placement, Partial) and isinstance(home_placement, Split):
            sums.append(("reduce_scatter", (axis,)))
            layout = layout.with_along(axis, home_placement)
        elif isinstance(placement, Partial):
            reduced.append(axis)
            layout = layout.with_along(axis, Replicate())
        elif is_sparse and isinstance(placement, Split) and placement.axis == 0:
            sums.append(("all_gather", (axis,)))
            layout = layout.with_along(axis, Replicate())
    if reduced:
        sums.append(("all_reduce", tuple(reduced)))
    return tuple(sums), layout
