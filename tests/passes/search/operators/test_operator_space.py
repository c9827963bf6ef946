"""What is drawn of operators' configurations can be asked for, and nothing that can be is left out."""

import itertools
from dataclasses import replace

import numpy as np

from partc.passes.search.operators.find_groups import OperatorGroup
from partc.passes.search.operators.operator_space import OperatorConfig, OperatorSpace, SplitDegrees, kinds_of

WORKERS = (0, 1, 2, 3)


def group(name: str, op: str = "MatMul", columns: int = 6) -> OperatorGroup:
    return OperatorGroup(name, op, (8, columns), (), 0, {"out:0": 8, "out:1": columns, "in:0:1": 4})


def drawn(samples: int = 8, columns: int = 6) -> set[tuple[SplitDegrees, tuple[int, ...]]]:
    space = OperatorSpace(kinds_of([group("x", columns=columns)]), len(WORKERS), samples)
    rng = np.random.default_rng(0)
    found = (space.draw(rng)[1] for _ in range(3000))
    return {(config.split, config.workers) for config in found}


def test_operators_that_are_alike_are_one_kind() -> None:
    kinds = kinds_of([group("x"), group("y"), group("z", columns=5), group("w", op="Gemm")])

    assert [kind.groups for kind in kinds] == [(0, 1), (2,), (3,)]


def test_operators_of_one_parameter_are_a_kind_of_a_family() -> None:
    layers = [replace(group(f"{layer}/{step}"), reads=(layer,)) for step in range(2) for layer in "ab"]

    assert [(kind.groups, kind.family) for kind in kinds_of(layers)] == [
        ((0, 2), (0, 1, 2, 3)),
        ((1, 3), (0, 1, 2, 3)),
    ]


def test_a_neighbour_has_the_same_workers_and_divides_what_it_can() -> None:
    space = OperatorSpace(kinds_of([group("x"), group("y", columns=5)]), len(WORKERS), samples=8)
    columns = OperatorConfig((("batch", 1), ("out:1", 2)), (2, 3))
    sums = OperatorConfig((("batch", 2), ("in:0:1", 2)), WORKERS)

    assert space.fitted(0, columns) == columns
    assert space.fitted(1, columns) == OperatorConfig((("batch", 2),), (2, 3))
    assert space.fitted(1, sums) == sums
    assert replace(space, samples=7).fitted(1, columns) is None


def test_replicas_are_neighbours_or_of_every_host() -> None:
    space = OperatorSpace(kinds_of([group("x")]), len(WORKERS), samples=2)

    assert [config.workers for config in space.replicas()] == [(0,), (0, 1), (0, 2)]


def test_all_degrees_on_blocks_and_on_every_host_are_drawn() -> None:
    blocks = {
        1: [(worker,) for worker in WORKERS],
        2: [WORKERS[:2], WORKERS[2:], WORKERS[::2], WORKERS[1::2]],
        4: [WORKERS],
    }
    expected = set()
    for samples, other in itertools.product((1, 2, 4), (1, 2, 4)):
        if samples * other > 4:
            continue
        dimensions = [d for d, most in (("out:1", 6), ("in:0:1", 4)) if other > 1 and most % other == 0]
        for dimension in dimensions or ([None] if other == 1 else []):
            split = (("batch", samples), *(((dimension, other),) if dimension else ()))
            expected |= {(split, workers) for workers in blocks[samples * other]}

    assert drawn() == expected


def test_samples_are_divided_equally_and_so_is_everything_else() -> None:
    splits = {split for split, _ in drawn(samples=3, columns=5)}

    assert splits == {(("batch", 1),), (("batch", 1), ("in:0:1", 2)), (("batch", 1), ("in:0:1", 4))}


def test_repeated_layers_are_one_kind_where_they_are_configured_together() -> None:
    layers = [replace(group(f"{layer}/{step}"), reads=(layer,)) for step in range(2) for layer in "ab"]

    assert [kind.groups for kind in kinds_of(layers, "layers")] == [(0, 1, 2, 3)]
    assert kinds_of(layers, "steps") == kinds_of(layers)


def test_workers_are_resized_to_half_or_twice_as_many_of_which_some_are_the_same() -> None:
    space, rng = OperatorSpace(kinds_of([group("x")]), workers=4, samples=8), np.random.default_rng(0)
    found = {space.resized(rng, (2, 3)) for _ in range(100)}

    assert found == {(2, 3), (2,), (3,), WORKERS}
    assert {space.resized(rng, WORKERS) for _ in range(100)} == {WORKERS, (0, 1), (2, 3), (0, 2), (1, 3)}
    assert {space.resized(rng, (0, 1, 2)) for _ in range(100)} >= {(0, 1, 2), (1,)}


def test_as_many_workers_are_drawn_as_are_asked_for() -> None:
    space, rng = OperatorSpace(kinds_of([group("x")]), workers=4, samples=8), np.random.default_rng(0)

    assert {space.draw_workers(rng, 2) for _ in range(100)} == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert {len(set(space.draw_workers(rng, 3))) for _ in range(100)} == {3}
