"""What every rank of a plan has of its own: where it runs, whom it meets, and what it holds."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod

from partc.cost.cluster.cluster import Cluster, ClusterRank, groups_of, ranks_of
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.boxes import box_of
from partc.passes.layouts.layouts import MICROBATCHES, WORKER
from partc.passes.layouts.meshes import Meshes
from partc.passes.lowering.lowered_graph import LoweredGraph, State
from partc.passes.scheduling.levels import name_way
from partc.passes.scheduling.make_program import Program
from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.program import IDLE, Instruction, Rank, Site, Slice, Start
from partc.runtime.plan.variables import Box, VariablePiece

OwnedRows = Mapping[str, tuple[tuple[int, int], ...]]  # parameter -> rows [start, stop) per server
RankGroups = Mapping[str, tuple[tuple[int, ...], ...]]


def ranks_at_sites(cluster: Cluster, meshes: Meshes) -> dict[Site, tuple[int, ...]]:
    """Return the ranks of every mesh of workers, in the mesh's order, and those of the hosts' servers."""
    workers = [rank.rank for rank in ranks_of(cluster) if rank.replica is not None]
    at = {mesh.name: tuple(workers[worker] for worker in mesh.workers) for mesh in meshes.each}
    return at | {"server": groups_of(cluster)["servers"][0]}


def describe_groups(
    cluster: Cluster, lowered: LoweredGraph, instructions: Iterable[Instruction]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the ranks that meet under each name."""
    groups = {name: tuple(filter(None, members)) for name, members in groups_of(cluster).items()}
    return groups | _mesh_groups(lowered, groups["workers"][0], instructions)


def _mesh_groups(
    lowered: LoweredGraph, workers: Sequence[int], instructions: Iterable[Instruction]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the workers that meet along each axis of a mesh, and from one mesh to another."""
    meshes = lowered.meshes
    members = {mesh.name: tuple(workers[worker] for worker in mesh.workers) for mesh in meshes.each}
    joint = {mesh.name: _joint_axes(lowered, mesh.name) for mesh in meshes.each}
    of_replicas = meshes.are_replicas  # `workers` is their only group
    groups = {
        mesh.group(axes): tuple(tuple(members[mesh.name][at] for at in line) for line in mesh.lines(axes))
        for mesh in meshes.each
        for axes in (() if of_replicas else [*((axis,) for axis in range(len(mesh.grid))), *joint[mesh.name]])
    }
    for start in instructions:
        if isinstance(start, Start) and start.exchange is not None:
            groups[start.group] = (tuple(dict.fromkeys(members[start.senders] + members[start.receivers])),)
        elif isinstance(start, Start) and start.group == name_way(start.senders, start.receivers):
            groups[start.group] = tuple(zip(members[start.senders], members[start.receivers], strict=True))
    return groups


def _joint_axes(lowered: LoweredGraph, site: Site) -> list[tuple[int, ...]]:
    """Return the axes of a mesh along which its ranks meet in one communication, where these are several."""
    axes_of_nodes = (node.attrs.get("axes", ()) for node in lowered.nodes if node.attrs.get("site") == site)
    return sorted({axes for axes in axes_of_nodes if len(axes) > 1})


def describe_ranks(
    training: TrainingGraph,
    lowered: LoweredGraph,
    program: Program,
    rows: OwnedRows,
    cluster: Cluster,
    groups: RankGroups,
) -> tuple[Rank, ...]:
    """Return all ranks. `rows`: what each server owns of each parameter there."""
    numbers: dict[int, dict[str, int]] = {}
    for name, instances in groups.items():
        for number, members in enumerate(instances):
            for rank in members:
                numbers.setdefault(rank, {})[name] = number
    servers = {rank: position for position, rank in enumerate(groups["servers"][0])}
    whole = {
        state.value: VariablePiece(state.variable, state.value, None)
        for state in lowered.states
        if lowered.meanings[state.value][1].is_whole
    }
    boxes: dict[Hashable, Box] = {}
    return tuple(
        _Describer(training, lowered, program, rows, placed, servers.get(placed.rank), whole, boxes).describe(
            numbers[placed.rank]
        )
        for placed in ranks_of(cluster)
    )


def _places_of(meshes: Meshes, worker: int) -> Iterable[tuple[Site, tuple[int, ...]]]:
    """Yield the meshes that a worker is in, and its place there."""
    for mesh in meshes.each:
        if worker in mesh.workers:
            yield mesh.name, mesh.coordinates(mesh.workers.index(worker))


class _Describer:
    """Describes one rank: its place among the servers, and along every axis of the workers' meshes."""

    def __init__(
        self,
        training: TrainingGraph,
        lowered: LoweredGraph,
        program: Program,
        rows: OwnedRows,
        placed: ClusterRank,
        server: int | None,
        whole: Mapping[str, VariablePiece],
        boxes: dict[Hashable, Box],
    ) -> None:
        self._training = training
        self._lowered = lowered
        self._program = program
        self._rows = rows
        self._placed = placed
        self._server = server
        self._whole = whole  # what ranks keep whole, by value: alike on all
        self._boxes = boxes  # of all ranks so far, by layout, shape and place
        self._places: dict[Site, tuple[int, ...]] = {}
        self._sites = placed.sites
        self._replica: int | None = None
        if placed.replica is not None:
            self._places = dict(_places_of(lowered.meshes, placed.replica))
            own = tuple(self._places) or (IDLE,)
            self._sites = tuple(
                name for site in placed.sites for name in (own if site == WORKER else (site,))
            )
            self._replica = lowered.meshes.replica_of(placed.replica)

    def describe(self, groups: dict[str, int]) -> Rank:
        placed = self._placed
        return Rank(
            rank=placed.rank,
            host=placed.host,
            device=placed.device,
            kind=placed.kind,
            device_index=placed.device_index,
            threads=placed.threads,
            sites=self._sites,
            replica=self._replica,
            groups=groups,
            constants=self._constants(),
            slices=self._slices(),
            pieces=tuple(
                self._whole.get(state.value) or self._hold(state)
                for state in self._lowered.states
                if state.site in self._sites
            ),
        )

    def _constants(self) -> dict[str, tuple[int, ...]]:
        values: dict[str, tuple[int, ...]] = {}
        for value, constant in self._lowered.constants.items():
            if constant.holds == "coordinate" and (place := self._place_in(constant.site)) is not None:
                if value != MICROBATCHES:  # which the plan tells all ranks
                    values[value] = (place[constant.axis],)
            elif constant.holds == "numbers" and (place := self._place_in(constant.site)) is not None:
                mesh = self._lowered.meshes.of(constant.site or WORKER)
                for moment, name in enumerate(self._program.moments.get(value, (value,))):
                    values[name] = constant.numbers_at((*place, moment), mesh)
            elif constant.parameter is not None and self._server is not None:
                start, stop = self._rows[constant.parameter][self._server]
                if constant.holds == "first_row":
                    values[value] = (start,)
                elif constant.holds == "row_count":
                    values[value] = (stop - start,)
        return values

    def _place_in(self, site: Site | None) -> tuple[int, ...] | None:
        """Return the rank's place in a mesh; None: in the only one that it is in."""
        return next(iter(self._places.values()), None) if site is None else self._places.get(site)

    def _slices(self) -> tuple[Slice, ...]:
        """Return where the rank's pieces lie in the buckets of the whole: parts, or a server's rows."""
        slices: list[Slice] = []
        for value, parameter, bucket, index in self._program.owned_slices:
            if parameter is None and (place := self._places.get(bucket.site)) is not None:
                piece = bucket.pieces[index][place[bucket.axes[0]]]
                slices.append(Slice(value, bucket.name, piece.offset, piece.shape))
            elif parameter is not None and self._server is not None:
                row = bucket.shapes[index][1:]
                start, stop = self._rows[parameter][self._server]
                offset = bucket.offsets[index] + start * prod(row)
                slices.append(Slice(value, bucket.name, offset, (stop - start, *row)))
        return tuple(slices)

    def _hold(self, state: State) -> VariablePiece:
        layout = self._lowered.meanings[state.value][1]
        shape = self._training.variables[state.variable].shape
        box = None
        if layout.rows_of and self._server is not None:
            box = rows_box(shape, *self._rows[layout.rows_of][self._server])
        elif layout.splits() and (place := self._places.get(state.site)) is not None:
            key = state.site, layout, shape, place
            if key not in self._boxes:
                self._boxes[key] = box_of(self._lowered.meshes.of(state.site), layout, shape, place)
            box = self._boxes[key]
        return VariablePiece(state.variable, state.value, box)
