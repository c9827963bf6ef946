"""The order of a pipeline's turns: one forward, one backward, and nothing before what it reads."""

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.passes.microbatches.find_repeated import Repeated
from partc.passes.microbatches.take_turns import Turn, take_turns
from partc.passes.scheduling.schedule import Chunk, Communication, Item


def chunk(site: str, reads: list[str], writes: list[str], repeated: bool = True) -> Chunk:
    inputs, outputs = ([gs.Variable(name, dtype=np.dtype("float32")) for name in n] for n in (reads, writes))
    return Chunk(site, [gs.Node("Op", f"{site}.{writes[0]}", {}, inputs, outputs)], repeated)


def message(source: str, target: str) -> Communication:
    inputs, outputs = ([gs.Variable(name, dtype=np.dtype("float32"))] for name in (source, target))
    return Communication((gs.Node("ToStage", f"send.{source}", {}, inputs, outputs),), None)


def pipeline(stages: int, count: int) -> tuple[list[Item], Repeated]:
    """Return a chain of stages, forward and back, and an update of each."""
    items: list[Item] = []
    for stage in range(stages):
        items.append(chunk(f"stage{stage}", [f"in{stage}"], [f"out{stage}", f"kept{stage}"]))
        if stage + 1 < stages:
            items.append(message(f"out{stage}", f"in{stage + 1}"))
    for stage in reversed(range(stages)):
        reads = [f"kept{stage}", f"din{stage}" if stage + 1 < stages else f"out{stage}"]
        items.append(chunk(f"stage{stage}", reads, [f"dout{stage}"]))
        if stage:
            items.append(message(f"dout{stage}", f"din{stage - 1}"))
    values = {
        tensor.name for item in items for node in item.nodes for tensor in (*node.inputs, *node.outputs)
    }
    nodes = {node.name for item in items for node in item.nodes}
    return items, Repeated(count, frozenset(values), frozenset(nodes))


def order(stages: int, count: int) -> list[Turn]:
    items, repeated = pipeline(stages, count)
    sites = [f"stage{stage}" for stage in range(stages)]
    return take_turns(items, repeated, [], sites, lambda item: isinstance(item, Chunk) * 1.0)


def of_stage(turns: list[Turn], stage: int) -> str:
    """Return a stage's turns, such as F0 F1 B0 B1."""
    words = []
    for turn in turns:
        if isinstance(turn.item, Chunk) and turn.item.site == f"stage{stage}":
            is_forward = turn.item.nodes[0].outputs[0].name.startswith("out")
            words.append(f"{'F' if is_forward else 'B'}{turn.microbatch}")
    return " ".join(words)


def test_one_forward_one_backward() -> None:
    turns = order(2, 4)

    assert of_stage(turns, 0) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert of_stage(turns, 1) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 8), (3, 5), (4, 8), (4, 2)])
def test_a_stage_has_few_under_way_and_takes_no_longer_than_it_must(stages: int, count: int) -> None:
    turns = order(stages, count)

    for stage in range(stages):
        begun = 0
        for word in of_stage(turns, stage).split():
            begun += 1 if word[0] == "F" else -1
            assert 0 <= begun <= stages - stage
    assert length(turns) == 2 * (count + stages - 1)  # forward and backward take 1 each


def length(turns: list[Turn]) -> float:
    """Play the turns, each mesh's in the order of the list; messages take no time."""
    free: dict[str, float] = {}
    done: dict[str, float] = {}
    for turn in turns:
        reads = [f"{t.name}#{turn.microbatch}" for node in turn.item.nodes for t in node.inputs]
        stop = max([0.0, *(done.get(name, 0.0) for name in reads)])
        if isinstance(turn.item, Chunk):
            stop = max(stop, free.get(turn.item.site, 0.0)) + 1
            free[turn.item.site] = stop
        done.update((f"{t.name}#{turn.microbatch}", stop) for node in turn.item.nodes for t in node.outputs)
    return max(free.values())


def test_nothing_comes_before_what_it_reads() -> None:
    made: set[str] = {f"in0#{number}" for number in range(6)}
    for turn in order(3, 6):
        for node in turn.item.nodes:
            assert all(f"{tensor.name}#{turn.microbatch}" in made for tensor in node.inputs)
            made.update(f"{tensor.name}#{turn.microbatch}" for tensor in node.outputs)


def test_what_writes_over_a_variable_comes_behind_all_who_read_it() -> None:
    reads = chunk("stage0", ["microbatch", "w"], ["y"])
    update = chunk("stage0", ["total"], ["w_next"], repeated=False)
    repeated = Repeated(3, frozenset({"microbatch", "y"}), frozenset({"stage0.y"}))

    turns = take_turns([reads, update], repeated, [("w", "w_next")], ["stage0"], lambda item: 1.0)

    assert [turn.microbatch for turn in turns] == [0, 1, 2, None]


def test_a_batch_that_meets_before_it_goes_on_is_not_stuck() -> None:
    """All micro-batches' first halves are summed before any second half: more are under way than allowed."""
    first = chunk("stage0", ["microbatch"], ["half"])
    join = chunk("stage0", ["half#0", "half#1", "half#2"], ["sum"], repeated=False)
    second = chunk("stage0", ["half", "sum"], ["whole"])
    repeated = Repeated(
        3, frozenset({"microbatch", "half", "whole"}), frozenset({"stage0.half", "stage0.whole"})
    )

    turns = take_turns([first, join, second], repeated, [], ["stage0"], lambda item: 1.0)

    assert [turn.microbatch for turn in turns] == [0, 1, 2, None, 0, 1, 2]
