"""Tensors go within a mesh as plans send them: terms are summed, or scattered, and parts are gathered."""

from partc.compiler.task_graphs.mesh_places import MeshPlace, Where
from partc.compiler.task_graphs.tensor_ways import gathering, is_to_stage, summed_for
from partc.passes.layouts.layouts import Partial, Placement, Replicate, Split

WORKERS = (0, 1, 2, 3)
ROW = MeshPlace.of((("data", 4), ("axis1", 1)), WORKERS)
COLUMN = MeshPlace.of((("data", 1), ("axis1", 4)), WORKERS)
GRID = MeshPlace.of((("data", 2), ("axis1", 2)), WORKERS)
ELSEWHERE = MeshPlace.of((("data", 4), ("axis1", 1)), (4, 5, 6, 7))
WHOLE = Replicate()


def where(place: MeshPlace, *placements: Placement) -> Where:
    return Where.of(place, placements)


def test_a_sum_is_scattered_if_all_want_the_same_part() -> None:
    terms, row = where(COLUMN, WHOLE, Partial()), where(ROW, Split(0))

    sums, then = summed_for(terms, (row, where(COLUMN, WHOLE, Split(0))))

    assert sums == (("reduce_scatter", (1,)),)
    assert then is where(COLUMN, WHOLE, Split(0)) and gathering(then, row).axes == ()  # type: ignore[union-attr]


def test_it_is_made_whole_if_anyone_wants_it_so_or_is_elsewhere() -> None:
    terms, row = where(COLUMN, WHOLE, Partial()), where(ROW, Split(0))
    for other in (where(ROW), where(ROW, Split(1)), where(ELSEWHERE, Split(0))):
        sums, then = summed_for(terms, (row, other))
        assert sums == (("all_reduce", (1,)),) and then is where(COLUMN)


def test_axes_that_are_wanted_whole_are_summed_at_once_behind_what_is_scattered() -> None:
    terms = where(GRID, Partial(), Partial())

    assert summed_for(terms, (where(GRID),)) == ((("all_reduce", (0, 1)),), where(GRID))
    sums, then = summed_for(terms, (where(GRID, WHOLE, Split(1)),))
    assert sums == (("reduce_scatter", (1,)), ("all_reduce", (0,))) and then is where(GRID, WHOLE, Split(1))


def test_parts_are_gathered_along_the_axes_that_are_undone() -> None:
    grid = where(GRID, Split(0), Split(0))

    every, half = gathering(grid, where(ROW)), gathering(grid, where(GRID, Split(0)))

    assert every is not None and every.axes == (0, 1) and every.target is where(GRID)
    assert half is not None and half.axes == (1,)
    same = gathering(grid, where(ROW, Split(0)))
    assert same is not None and same.axes == () and same.target is grid


def test_to_an_equal_mesh_of_others_each_sends_its_part() -> None:
    row = where(ROW, Split(0))

    assert is_to_stage(row, where(ELSEWHERE, Split(0)))
    assert not is_to_stage(row, where(ELSEWHERE))
    assert not is_to_stage(row, where(MeshPlace.of(ROW.axes, (3, 4, 5, 6)), Split(0)))
    assert not is_to_stage(where(GRID, Split(0)), where(ELSEWHERE, Split(0)))


def test_other_parts_and_other_workers_take_messages() -> None:
    assert gathering(where(ROW, Split(0)), where(ROW, Split(1))) is None
    assert gathering(where(ROW, Split(0)), where(GRID, Split(0))) is None, "not spelled on the row"
    assert gathering(where(ROW, Split(0)), where(ELSEWHERE)) is None
