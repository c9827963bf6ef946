"""The meshes that a strategy file makes of the cluster's devices, and what it may not say."""

import pytest

from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.passes.layouts.layouts import Layout, Replicate, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.layouts.strategy_meshes import meshes_of
from partc.runtime.errors import BadStrategy

WORKERS = ("a/0", "a/1", "b/0", "b/1")


def strategy(*ops: OpConfig, **options: object) -> Strategy:
    return Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops, **options)  # type: ignore[arg-type]


def test_parts_are_along_the_first_axis_and_those_behind() -> None:
    asked = strategy(
        OpConfig("conv", {"batch": 4}, devices=WORKERS),
        OpConfig("dense", {"out:1": 2, "batch": 2}, devices=("b/1", "a/0", "b/0", "a/1")),
        OpConfig("last", devices=("b/0",)),
    )

    assert meshes_of(asked, WORKERS).each == (
        Mesh("mesh0", (("data", 4), ("axis1", 1), ("axis2", 1)), (0, 1, 2, 3)),
        Mesh("mesh1", (("data", 2), ("axis1", 2), ("axis2", 1)), (3, 0, 2, 1)),
        Mesh("mesh2", (("data", 1), ("axis1", 1), ("axis2", 1)), (2,)),
    )


def test_entries_of_the_same_devices_and_parts_share_a_mesh() -> None:
    asked = strategy(
        OpConfig("one", {"out:1": 2}, devices=("a/0", "b/0")),
        OpConfig("two", {"out:0": 2}, devices=("a/0", "b/0")),
        OpConfig("three", {"batch": 2}, devices=("a/0", "b/0")),
        mesh={"data": 2, "tensor": 2},
    )

    meshes = meshes_of(asked, WORKERS)

    assert meshes.sites == ("worker", "mesh1", "mesh2")
    assert meshes.of("mesh1").axes == (("data", 1), ("tensor", 2))
    assert meshes.is_fed("worker") and not meshes.is_fed("mesh1")


def test_replicas_are_fed_where_they_are_at_their_places() -> None:
    asked = strategy(
        OpConfig("one", devices=("a/0", "b/0")),
        OpConfig("two", devices=("a/1", "b/1")),
        OpConfig("turned", devices=("b/1", "a/1")),
    )

    meshes = meshes_of(asked, WORKERS)

    assert [meshes.is_fed(site) for site in meshes.sites] == [True, True, False]
    assert [meshes.replica_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    assert meshes.are_strangers("mesh0", "mesh1") and not meshes.are_strangers("mesh1", "mesh2")


@pytest.mark.parametrize(
    ("config", "what", "at", "fix"),
    [
        (OpConfig("x", devices=("a/0", "c/0")), "unknown device 'c/0'", "devices", "a/0"),
        (OpConfig("x", devices=("a/0", "a/0")), "'a/0' is named twice", "devices", "once"),
        (OpConfig("x", {"out:0": 3}, devices=("a/0", "b/0")), "3 parts on 2 devices", "ops[0]", "product"),
        (OpConfig("x", {"out:0": 0}, devices=("a/0",)), "0 parts", "split: out:0", "1 or more"),
        (
            OpConfig("x", {"out:0": "tensor"}, devices=("a/0",)),
            "unknown mesh axis 'tensor'",
            "out:0",
            "parts",
        ),
    ],
)
def test_what_makes_no_mesh_is_refused(config: OpConfig, what: str, at: str, fix: str) -> None:
    with pytest.raises(BadStrategy) as refusal:
        meshes_of(strategy(config), WORKERS)

    assert what in refusal.value.what and at in refusal.value.at and fix in refusal.value.fix


@pytest.mark.parametrize(
    ("ops", "mesh", "at"),
    [
        ((), {"data": 4} | {f"axis{number}": 1 for number in range(70)}, "mesh"),
        ((OpConfig("conv", {f"out:{n}": 1 for n in range(70)}, devices=("a/0",)),), {}, "ops: split"),
    ],
)
def test_more_axes_than_an_array_has_are_refused(
    ops: tuple[OpConfig, ...], mesh: dict[str, int], at: str
) -> None:
    with pytest.raises(BadStrategy, match=r"leave out those of") as refusal:
        meshes_of(strategy(*ops, mesh=mesh), WORKERS)

    assert refusal.value.at == at


def test_a_micro_batch_is_the_same_samples_where_these_are_divided_alike() -> None:
    grid = (("data", 2), ("tensor", 2), ("microbatch", 2))
    meshes = Meshes((Mesh("a", grid, (0, 1, 2, 3)), Mesh("b", grid, (3, 2, 1, 0))))
    samples, columns, rows = Split(0), Split(1), Split(0, 4)

    assert meshes.have_same_samples(
        Layout("a", samples, columns, samples), Layout("b", samples, Replicate(), samples)
    )
    assert not meshes.have_same_samples(
        Layout("a", samples, rows, samples), Layout("b", samples, columns, samples)
    )
    assert not meshes.have_same_samples(Layout("a", samples), Layout("b", samples, columns, samples))
