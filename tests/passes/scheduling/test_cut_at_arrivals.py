"""Segments are cut where a message is waited for, and nodes stay behind what they read."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.cost.cluster.profiles import SLOT_S
from partc.passes.scheduling.cut_at_arrivals import cut_at_arrivals
from partc.passes.scheduling.schedule import Chunk, Communication, Item

LONG_S, SHORT_S = 2 * SLOT_S, SLOT_S / 8


def node(name: str, *reads: str) -> gs.Node:
    return gs.Node("Op", name, {}, [gs.Variable(read) for read in reads], [gs.Variable(name)])


def message(name: str, *reads: str) -> Communication:
    return Communication((node(name, *reads),), None)


def seconds(item: Item) -> float:
    return sum(LONG_S if each.name.startswith("long") else SHORT_S for each in item.nodes)


def names(items: Sequence[Item]) -> list[list[str]]:
    return [[each.name for each in item.nodes] for item in items]


def test_what_reads_the_first_to_arrive_does_not_wait_for_the_last() -> None:
    update = Chunk("worker", [node("longA", "a"), node("longB", "b"), node("longC", "longB")])

    cut = cut_at_arrivals([message("b", "db"), message("a", "da"), update], seconds)

    assert names(cut) == [["b"], ["a"], ["longB", "longC"], ["longA"]]


def test_what_is_short_waits_for_what_follows_it() -> None:
    update = Chunk("worker", [node("shortA", "a"), node("longB", "b"), node("shortC", "c")])

    cut = cut_at_arrivals([message("a"), message("b"), message("c"), update], seconds)

    assert names(cut)[3:] == [["shortA", "longB"], ["shortC"]]


def test_micro_batches_stay_whole() -> None:
    repeated = Chunk("worker", [node("longA", "a"), node("longB", "b")], is_repeated=True)

    assert cut_at_arrivals([message("a"), message("b"), repeated], seconds)[2:] == [repeated]


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

    cut = cut_at_arrivals(items, seconds)

    assert sorted(chain(*names(cut))) == sorted(chain(*names(items)))
    there = {"data"}
    for item in cut:
        for each in item.nodes:
            assert {tensor.name for tensor in each.inputs} <= there
            there.add(each.name)
    before = {name: place for place, item in enumerate(names(items)) for name in item}
    arrivals = [place for place, item in enumerate(items) if isinstance(item, Communication)]
    assert [item for item in cut if isinstance(item, Communication)] == [items[place] for place in arrivals]
    for each in cut:
        assert len({before[name] for name in names([each])[0]}) == 1, "of one segment"
