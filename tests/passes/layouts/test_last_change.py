"""The way from one layout to another: it ends, every step is one axis, and every stop divides the tensor."""

import numpy as np
import pytest

from partc.passes.layouts.last_change import last_change
from partc.passes.layouts.layouts import Layout, Partial, Replicate, Split
from partc.passes.layouts.meshes import Mesh

SHAPES = (24, 16), (20, 14), (22, 27)


def random_layout(
    mesh: Mesh, shape: tuple[int, int], rng: np.random.Generator, *, may_be_partial: bool
) -> Layout:
    layout = Layout("worker")
    for axis in range(len(mesh.axes)):
        choices = [Replicate(), *(Split(a, outer) for a in range(2) for outer in (1, 2))]
        choices += [Partial("sum")] if may_be_partial else []
        tried = layout.with_along(axis, choices[int(rng.integers(len(choices)))])
        tried = mesh.nest_splits(tried, shape)
        layout = tried if mesh.divides(tried, shape) else layout
    return layout


@pytest.mark.parametrize("seed", range(300))
def test_every_way_ends_and_changes_one_axis_at_a_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = SHAPES[seed % 3]
    mesh = Mesh("worker", tuple((f"axis{n}", int(rng.integers(2, 4))) for n in range(rng.integers(1, 4))))
    native = random_layout(mesh, shape, rng, may_be_partial=True)
    wanted = random_layout(mesh, shape, rng, may_be_partial=False)

    steps = 0
    while wanted != native:
        change = last_change(native, wanted, lambda layout: mesh.divides(layout, shape))
        changed = [a for a in range(len(mesh.axes)) if change.before.along(a) != wanted.along(a)]
        assert changed == [change.axis]
        assert mesh.divides(change.before, shape)
        assert_only_the_innermost_moves(change.before, wanted, change.axis)
        wanted, steps = change.before, steps + 1

    assert steps <= 2 * len(mesh.axes)


def assert_only_the_innermost_moves(before: Layout, after: Layout, axis: int) -> None:
    """An axis that is cut or gathered lies within all others that cut at the same place."""
    place = before.along(axis) if isinstance(before.along(axis), Split) else after.along(axis)
    if isinstance(place, Split):
        here = [a for a, s in before.splits() if (s.axis, s.outer) == (place.axis, place.outer)]
        assert all(other <= axis for other in here)


def test_a_local_cut_comes_before_a_gathering() -> None:
    native, wanted = Layout("worker", Split(0)), Layout("worker", Replicate(), Split(1))

    change = last_change(native, wanted, lambda layout: True)

    assert (change.before, change.axis) == (Layout("worker", Split(0), Split(1)), 0)


def test_a_partial_is_scattered_before_another_axis_is_gathered() -> None:
    native, wanted = Layout("worker", Partial("sum"), Split(1)), Layout("worker", Split(0))

    change = last_change(native, wanted, lambda layout: True)

    assert (change.before, change.axis) == (Layout("worker", Split(0), Split(1)), 1)


def test_micro_batches_are_summed_before_a_partial_is_scattered() -> None:
    native, wanted = Layout("worker", Partial("sum"), Partial("sum")), Layout("worker", Split(0))

    change = last_change(native, wanted, lambda layout: True, moments=1)

    assert (change.before, change.axis) == (Layout("worker", Partial("sum")), 0)


def test_a_local_cut_comes_before_micro_batches_are_summed() -> None:
    native, wanted = Layout("worker", Replicate(), Partial("sum")), Layout("worker", Split(0))

    change = last_change(native, wanted, lambda layout: True, moments=1)

    assert (change.before, change.axis) == (Layout("worker", Split(0), Partial("sum")), 1)
