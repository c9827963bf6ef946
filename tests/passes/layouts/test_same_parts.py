"""A layout is spelled on another mesh as what gives each worker the same entries, if anything does."""

from itertools import permutations, product
from math import prod

import numpy as np
import pytest

from partc.passes.layouts.boxes import box_of
from partc.passes.layouts.layouts import MICROBATCHES, Layout, Overlapping, Partial, Replicate, Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.layouts.same_parts import same_parts
from partc.runtime.plan.moves import region_of

SHAPE = (24, 24)
GRIDS = [(8,), (1, 8), (2, 4), (4, 2), (2, 2, 2), (8, 1)]
PLACES = (Replicate(), Split(0), Split(1), Split(1, outer=3))


def mesh_of(name: str, grid: tuple[int, ...], workers: tuple[int, ...]) -> Mesh:
    return Mesh(name, tuple((f"axis{n}", size) for n, size in enumerate(grid)), workers)


def parts_of(mesh: Mesh, layout: Layout) -> dict[int, object]:
    """Return the entries of each worker, by boxes."""
    places = enumerate(mesh.workers)
    return {w: region_of(box_of(mesh, layout, SHAPE, mesh.coordinates(n))) for n, w in places}


def layouts_of(mesh: Mesh) -> list[Layout]:
    every = (Layout(mesh.name, *chosen) for chosen in product(PLACES, repeat=len(mesh.axes)))
    return [layout for layout in every if mesh.divides(layout, SHAPE)]


@pytest.mark.parametrize("seed", range(12))
def test_it_is_what_trying_all_layouts_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grids = [GRIDS[int(n)] for n in rng.integers(len(GRIDS), size=2)]
    workers = tuple(range(prod(grids[0])))
    orders = [workers, tuple(rng.permutation(8).tolist()) if seed % 3 == 0 else workers]
    mesh, other = (mesh_of(*each) for each in zip(("a", "b"), grids, orders, strict=True))
    parts = {layout: parts_of(other, layout) for layout in layouts_of(other)}
    known = 0

    for layout in layouts_of(mesh):
        found, mine = same_parts(mesh, layout, other), parts_of(mesh, layout)
        alike = [each for each, theirs in parts.items() if theirs == mine]
        assert (found is None) == (not alike), layout
        if found is not None:
            assert parts_of(other, found) == mine and found.site == "b"
            known += 1
    assert known, "what is whole is whole everywhere"


def test_of_the_same_mesh_it_is_the_layout() -> None:
    mesh = mesh_of("a", (2, 4), ())
    for layout in layouts_of(mesh):
        assert same_parts(mesh, layout, mesh) == layout


def test_other_workers_terms_and_parts_that_differ_have_none() -> None:
    mesh, elsewhere = mesh_of("a", (4,), ()), mesh_of("b", (4,), (1, 2, 3, 4))
    apart = mesh_of("c", (1, 4), ())
    in_turn = Mesh("d", (("axis0", 4), (MICROBATCHES, 2)))

    assert same_parts(mesh, Layout("a", Split(0)), elsewhere) is None
    assert same_parts(mesh, Layout("a", Partial()), apart) is None
    assert same_parts(mesh, Layout("a", Split(0, uneven=7)), apart) is None
    overlapping = Overlapping(0, 8, tuple((2 * n, 2 * n + 3) for n in range(4)))
    assert same_parts(mesh, Layout("a", overlapping), apart) is None
    assert same_parts(in_turn, Layout("d", Split(0)), apart) is None


def test_workers_in_another_order_have_other_parts() -> None:
    mesh = mesh_of("a", (4,), ())
    for order in permutations(range(4)):
        found = same_parts(mesh, Layout("a", Split(0)), mesh_of("b", (4,), order))
        assert (found is not None) == (order == (0, 1, 2, 3))
