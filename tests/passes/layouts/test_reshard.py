"""The way into another layout, played with sets of entries: each rank has what such steps can bring it."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from partc.passes.layouts.configuration import Configuration
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import (
    Layout,
    Overlapping,
    Partial,
    Replicate,
    Split,
    Widened,
    served_rows,
)
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.layouts.reshard import Transfer, reshard
from tests.builders.graphs.small_steps import lay_out
from tests.passes.layouts.test_last_change import random_layout
from tests.sampling import sampled

SHAPES = (24, 16), (20, 14), (22, 27)
STEP = """
step (double[8,4] x, double[{0},{1}] W) => (double[{0},{1}] W_next) {{
    t = Tanh (W)
    dW = Neg (t)
    W_next = Sub (W, dW)
}}
"""
SERVED = """
step (double[8,4] x, double[4,6] W) => (double[4,6] W_next) {
    h = MatMul (x, W)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, h)
    W_next = Sub (W, dW)
}
"""
SENT = {"AllReduce", "ReduceScatter", "AllGather", "Widen"}


@dataclass(frozen=True)
class Piece:
    """What a rank has: entries of the tensor, and the places along partial axes whose terms it added."""

    entries: frozenset[tuple[int, int]]
    terms: frozenset[tuple[int, ...]]


def graph_of(shape: tuple[int, int], *meshes: Mesh) -> LaidOutGraph:
    """Return a graph with a tensor t of a shape."""
    return lay_out(STEP.format(*shape), {"x": None}, configuration=Configuration(Meshes(meshes)))


def pieces(mesh: Mesh, layout: Layout, shape: tuple[int, int], terms: tuple[int, ...]) -> dict[int, Piece]:
    """Return what each worker of a mesh has. `terms`: how many there are along each axis."""
    found: dict[int, Piece] = {}
    for position, worker in enumerate(mesh.workers):
        place = mesh.coordinates(position)
        rows, columns = (_indices(mesh, layout, axis, size, place) for axis, size in enumerate(shape))
        own = [
            (place[a],) if isinstance(layout.along(a), Partial) else tuple(range(count))
            for a, count in enumerate(terms)
        ]
        found[worker] = Piece(frozenset(product(rows, columns)), frozenset(product(*own)))
    return found


def _indices(mesh: Mesh, layout: Layout, axis: int, size: int, place: tuple[int, ...]) -> list[int]:
    """Return the entries of a tensor's axis at a place of the mesh: of each factor, those of its parts."""
    has = np.ones(size, bool)
    splits = [(a, s) for a, s in layout.splits() if s.axis == axis]
    for outer in {split.outer for _, split in splits}:
        here = [(a, split.uneven) for a, split in splits if split.outer == outer]
        entries = np.arange(max(uneven for _, uneven in here) or size // outer)
        own = entries
        for mesh_axis, _ in here:
            own = np.array_split(own, mesh.size(mesh_axis))[place[mesh_axis]]
        blocks = np.arange(size).reshape(outer, len(entries), -1)
        has &= np.isin(np.arange(size), blocks[:, own])
    for a, widened in layout.widened():
        first, last = (size // mesh.size(a) * (place[a] + end) for end in (0, 1))
        near = range(max(0, first - widened.before), min(size, last + widened.after))
        has &= np.isin(np.arange(size), near) if widened.axis == axis else True
    for a, overlapping in layout.overlapping():
        has &= (
            np.isin(np.arange(size), range(*overlapping.ranges[place[a]]))
            if overlapping.axis == axis
            else True
        )
    return [int(index) for index in np.flatnonzero(has)]


def play(graph: LaidOutGraph, transfer: Transfer, shape: tuple[int, int], terms: tuple[int, ...]) -> None:
    """Hold what a step makes of what its ranks have against what a step of its kind can."""
    source_mesh, target_mesh = (graph.meshes.of(x.site) for x in (transfer.source, transfer.target))
    before = pieces(source_mesh, transfer.source, shape, terms)
    after = pieces(target_mesh, transfer.target, shape, terms)
    for worker, piece in after.items():
        own = before.get(worker)
        is_whole = isinstance(transfer.source.along(transfer.axis), Replicate)
        if transfer.kind in ("Cut", "Keep", "Crop") or (transfer.kind == "Widen" and is_whole):
            assert own is not None
            assert piece.entries <= own.entries
            assert piece.terms == own.terms
        elif transfer.kind in SENT:
            position = source_mesh.workers.index(worker)
            line = next(g for g in source_mesh.lines([transfer.axis]) if position in g)
            group = [before[source_mesh.workers[member]] for member in line]
            if transfer.kind in ("AllReduce", "ReduceScatter"):
                assert all(piece.entries <= member.entries for member in group)
                assert piece.terms == frozenset().union(*(member.terms for member in group))
            else:
                assert piece.entries <= frozenset().union(*(member.entries for member in group))
                assert all(piece.terms == member.terms for member in group)
        elif transfer.kind == "Exchange":
            having = [other.entries for other in before.values() if other.terms == piece.terms]
            assert piece.entries <= frozenset().union(*having)
        else:
            assert transfer.kind == "ToStage"
            assert before[source_mesh.workers[target_mesh.workers.index(worker)]] == piece


def assert_way(graph: LaidOutGraph, native: Layout, target: Layout, shape: tuple[int, int]) -> None:
    terms = tuple(size for _, size in graph.meshes.of(native.site).axes)
    way = reshard(graph, "t", target)
    at = native
    for transfer in way:
        assert transfer.source == at
        assert transfer.kind != "ReduceScatter" or ("t", transfer.axis) not in graph.made_whole
        play(graph, transfer, shape, terms)
        at = transfer.target
    assert at == target


@pytest.mark.parametrize("seed", sampled(range(200), range(0, 200, 4)))
def test_steps_of_one_mesh_bring_what_is_wanted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % 3]
    mesh = Mesh("worker", tuple((f"axis{n}", int(rng.integers(2, 4))) for n in range(rng.integers(1, 4))))
    native = random_layout(mesh, shape, rng, may_be_partial=True)
    target = random_layout(mesh, shape, rng, may_be_partial=False)
    graph = graph_of(shape, mesh)
    graph.layouts["t"] = native
    graph.made_whole = frozenset(
        ("t", axis)
        for axis, own in enumerate(native.placements)
        if isinstance(own, Partial) and not may_be_scattered(native, target, axis)
    )

    assert_way(graph, native, target, shape)


def may_be_scattered(native: Layout, target: Layout, axis: int) -> bool:
    ends = [layout.with_along(axis, Replicate()) for layout in (native, target)]
    return isinstance(target.along(axis), Split) and not any(layout.uneven() for layout in ends)


@pytest.mark.parametrize("seed", sampled(range(200), range(0, 200, 4)))
def test_steps_between_meshes_of_any_shape_bring_what_is_wanted(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    shape, axes = SHAPES[seed % 3], int(rng.integers(1, 4))
    sizes = rng.integers(1, 4, (2, axes))
    meshes = [
        Mesh(name, tuple((f"axis{n}", int(size)) for n, size in enumerate(own)), drawn_workers(own, rng))
        for name, own in zip(("first", "second"), sizes, strict=True)
    ]
    graph = graph_of(shape, *meshes)
    native, target = (
        replace_site(random_layout(mesh, shape, rng, may_be_partial=mesh is meshes[0]), mesh.name)
        for mesh in meshes
    )
    graph.layouts["t"] = native
    graph.made_whole = frozenset(
        ("t", axis) for axis, own in enumerate(native.placements) if isinstance(own, Partial)
    )

    assert_way(graph, native, target, shape)


def drawn_workers(sizes: np.ndarray, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(worker) for worker in rng.permutation(30)[: int(np.prod(sizes))])


def replace_site(layout: Layout, site: str) -> Layout:
    return Layout(site, *layout.placements)


def test_neighbours_send_what_windows_read() -> None:
    mesh = Mesh("worker", (("space", 3),))
    graph = graph_of((24, 18), mesh)

    for read in (Widened(0, 1, 2), Overlapping(0, 24, ((0, 9), (7, 17), (15, 24)))):
        for native in (Layout("worker", Split(0)), Layout("worker"), Layout("worker", Split(1))):
            graph.layouts["t"] = native
            assert_way(graph, native, Layout("worker", read), (24, 18))


def test_the_steps_are_those_that_are_known_to_be_right() -> None:
    mesh = Mesh("worker", (("data", 2), ("tensor", 2)))
    graph = graph_of((24, 16), mesh)
    graph.layouts["t"] = Layout("worker", Partial("sum"), Split(1))
    graph.made_whole = frozenset({("t", 0)})

    def kinds(target: Layout) -> list[str]:
        return [transfer.kind for transfer in reshard(graph, "t", target)]

    assert kinds(graph.layouts["t"]) == []
    assert kinds(Layout("worker")) == ["AllReduce", "AllGather"]
    graph.made_whole = frozenset()
    assert kinds(Layout("worker", Split(0), Split(1))) == ["ReduceScatter"]
    graph.layouts["t"] = Layout("worker", Split(0))
    assert kinds(Layout("worker", Split(1))) == ["Exchange"]
    assert kinds(Layout("worker", Replicate(), Split(1))) == ["Cut", "AllGather"]


def test_servers_push_and_pull() -> None:
    graph = lay_out(SERVED, {"x": 0}, methods={"W": "servers"})
    rows, whole = served_rows("W"), Layout("worker")

    assert [t.kind for t in reshard(graph, "dW", rows)] == ["Push"]
    assert reshard(graph, "dW", whole) == (
        Transfer("Push", graph.layout("dW"), rows),
        Transfer("Pull", rows, whole),
    )
    assert [t.kind for t in reshard(graph, "W", whole)] == ["Pull"]
    graph.layouts["W"] = whole
    assert [t.kind for t in reshard(graph, "W", rows)] == ["ToServers", "TakeRows"]
