"""What is drawn of operators' configurations can be asked for, and nothing that can be is left out."""

import itertools

import numpy as np

from partc.passes.search.find_groups import OperatorGroup
from partc.passes.search.operator_space import OperatorSpace, kinds_of

DEVICES = ("a0", "a1", "b0", "b1")


def group(name: str, op: str = "MatMul", columns: int = 6) -> OperatorGroup:
    return OperatorGroup(name, op, (8, columns), (), 0, {"out:0": 8, "out:1": columns, "in:0:1": 4})


def drawn(samples: int = 8, columns: int = 6) -> set[tuple[tuple[tuple[str, int], ...], tuple[str, ...]]]:
    space = OperatorSpace(kinds_of([group("x", columns=columns)]), DEVICES, samples)
    rng = np.random.default_rng(0)
    found = (space.draw(rng)[1] for _ in range(3000))
    return {(config.split, config.devices) for config in found if config is not None}


def test_operators_that_are_alike_are_one_kind() -> None:
    kinds = kinds_of([group("x"), group("y"), group("z", columns=5), group("w", op="Gemm")])

    assert [kind.operators for kind in kinds] == [("x", "y"), ("z",), ("w",)]


def test_an_entry_is_written_for_each_operator_of_a_kind() -> None:
    space = OperatorSpace(kinds_of([group("x"), group("y")]), DEVICES, 8)
    rng = np.random.default_rng(3)
    number, config = next((n, own) for n, own in (space.draw(rng) for _ in range(100)) if own is not None)

    entries = list(config.entries(space.kinds[number]))

    assert [entry.op for entry in entries] == ["x", "y"]
    assert {entry.devices for entry in entries} == {config.devices}


def test_all_degrees_on_blocks_and_on_every_host_are_drawn() -> None:
    blocks = {
        1: [(d,) for d in DEVICES],
        2: [DEVICES[:2], DEVICES[2:], DEVICES[::2], DEVICES[1::2]],
        4: [DEVICES],
    }
    expected = set()
    for samples, other in itertools.product((1, 2, 4), (1, 2, 4)):
        if samples * other > 4:
            continue
        dimensions = [d for d, most in (("out:1", 6), ("in:0:1", 4)) if other > 1 and most % other == 0]
        for dimension in dimensions or ([None] if other == 1 else []):
            split = (("batch", samples), *(((dimension, other),) if dimension else ()))
            expected |= {(split, devices) for devices in blocks[samples * other]}

    assert drawn() == expected


def test_samples_are_divided_equally_and_so_is_everything_else() -> None:
    splits = {split for split, _ in drawn(samples=3, columns=5)}

    assert splits == {(("batch", 1),), (("batch", 1), ("in:0:1", 2)), (("batch", 1), ("in:0:1", 4))}
