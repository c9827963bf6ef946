"""Segments are cut where a message is waited for, and nodes stay behind what they read."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.cost.cluster.profiles import SLOT_S
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lowered_graph import LoweredGraph, State
from partc.passes.scheduling.cut_at_arrivals import cut_at_arrivals
from partc.passes.scheduling.schedule import Chunk, Communication, Item

LONG_S, SHORT_S = 2 * SLOT_S, SLOT_S / 8


def node(name: str, *reads: str) -> gs.Node:
    return gs.Node("Op", name, {}, [gs.Variable(read) for read in reads], [gs.Variable(name)])


def message(name: str, *reads: str) -> Communication:
    return Communication((node(name, *reads),), None)


def cut(items: Sequence[Item], variables: Sequence[str] = ()) -> list[Item]:
    lowered = LoweredGraph(
        Meshes((Mesh("worker", (("data", 2),)),)), [n for item in items for n in item.nodes]
    )
    lowered.states += [State(name, "worker", name, f"{name}_next") for name in variables]
    return cut_at_arrivals(items, lowered, seconds)


def seconds(item: Item) -> float:
    return sum(LONG_S if each.name.startswith("long") else SHORT_S for each in item.nodes)


def names(items: Sequence[Item]) -> list[list[str]]:
    return [[each.name for each in item.nodes] for item in items]


def test_what_reads_the_first_to_arrive_does_not_wait_for_the_last() -> None:
    update = Chunk("worker", [node("longA", "a"), node("longB", "b"), node("longC", "longB")])

    assert names(cut([message("b", "db"), message("a", "da"), update])) == [
        ["b"],
        ["a"],
        ["longB", "longC"],
        ["longA"],
    ]


def test_what_is_short_waits_for_what_follows_it() -> None:
    update = Chunk("worker", [node("shortA", "a"), node("longB", "b"), node("shortC", "c")])

    assert names(cut([message("a"), message("b"), message("c"), update]))[3:] == [
        ["shortA", "longB"],
        ["shortC"],
    ]


def test_micro_batches_stay_whole() -> None:
    repeated = Chunk("worker", [node("longA", "a"), node("longB", "b")], is_repeated=True)

    assert cut([message("a"), message("b"), repeated])[2:] == [repeated]


def test_what_is_made_of_variables_alone_is_made_where_it_is_read() -> None:
    """A mean that is decayed before its gradient is there would lie in memory until then."""
    nodes = [node("longA", "m"), node("longB", "n"), node("longC", "longA", "a"), node("longD", "longB", "b")]

    pieces = cut([message("a"), message("b"), Chunk("worker", nodes)], variables=("m", "n"))

    assert names(pieces)[2:] == [["longA", "longC"], ["longB", "longD"]]


@pytest.mark.parametrize("seed", range(30))
def test_every_node_runs_once_behind_what_it_reads_and_waits_no_longer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = ["data"]
    items: list[Item] = []
    for number in range(8):
        chosen = rng.choice(made, min(2, len(made)), replace=False).tolist()
        if rng.random() < 0.5:
            items.append(message(f"message{number}", *chosen))
            made.append(f"message{number}")
            continue
        nodes = []
        for place in range(int(rng.integers(1, 7))):
            name = f"{rng.choice(['long', 'short'])}{number}.{place}"
            nodes.append(node(name, *rng.choice(made, min(2, len(made)), replace=False).tolist()))
            made.append(name)
        items.append(Chunk("worker", nodes))

    pieces = cut(items, variables=["data"] if seed % 2 else [])

    assert sorted(chain(*names(pieces))) == sorted(chain(*names(items)))
    there = {"data"}
    for item in pieces:
        for each in item.nodes:
            assert {tensor.name for tensor in each.inputs} <= there
            there.add(each.name)
    before = {name: place for place, item in enumerate(names(items)) for name in item}
    arrivals = [place for place, item in enumerate(items) if isinstance(item, Communication)]
    assert [item for item in pieces if isinstance(item, Communication)] == [
        items[place] for place in arrivals
    ]
    for each in pieces:
        assert len({before[name] for name in names([each])[0]}) == 1, "of one segment"
