"""The order of a pipeline's turns: one forward, one backward, and nothing before what it reads."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf

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
    return take_turns(items, repeated, [], sites, lambda item: isinstance(item, Chunk) * 1.0)[-1].turns


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

    turns = take_turns([reads, update], repeated, [("w", "w_next")], ["stage0"], lambda item: 1.0)[-1].turns

    assert [turn.microbatch for turn in turns] == [0, 1, 2, None]


def test_a_batch_that_meets_before_it_goes_on_is_not_stuck() -> None:
    """All micro-batches' first halves are summed before any second half: more are under way than allowed."""
    first = chunk("stage0", ["microbatch"], ["half"])
    join = chunk("stage0", ["half#0", "half#1", "half#2"], ["sum"], repeated=False)
    second = chunk("stage0", ["half", "sum"], ["whole"])
    repeated = Repeated(
        3, frozenset({"microbatch", "half", "whole"}), frozenset({"stage0.half", "stage0.whole"})
    )

    turns = take_turns([first, join, second], repeated, [], ["stage0"], lambda item: 1.0)[-1].turns

    assert [turn.microbatch for turn in turns] == [0, 1, 2, None, 0, 1, 2]


def test_a_micro_batch_goes_on_before_the_next_begins() -> None:
    first, then = chunk("stage0", ["in0"], ["half"]), chunk("stage0", ["half"], ["out0"])
    other = chunk("stage1", ["in1"], ["dout1"])
    back = chunk("stage0", ["din0"], ["done"])
    items = [first, then, message("out0", "in1"), other, message("dout1", "din0"), back]
    nodes = {node.name for item in items for node in item.nodes}
    repeated = Repeated(3, frozenset("in0 half out0 in1 dout1 din0 done".split()), frozenset(nodes))

    turns = take_turns(items, repeated, [], ["stage0", "stage1"], lambda item: isinstance(item, Chunk) * 1.0)[
        -1
    ].turns

    sent = [(turn.item, turn.microbatch) for turn in turns if turn.item in (first, then)]
    assert sent[:4] == [(first, 0), (then, 0), (first, 1), (then, 1)]


def test_micro_batches_in_which_nothing_is_repeated_are_no_pipeline() -> None:
    """All samples are of one operator's reduction, say, so that every item runs once."""
    first, second = (chunk("stage0", [value], [f"{value}'"], repeated=False) for value in "xy")

    turns = take_turns([first, second], Repeated(4, frozenset(), frozenset()), [], ["stage0"], lambda _: 1.0)[
        -1
    ].turns

    assert [turn.item for turn in turns] == [first, second]


# ---------------------------------------------------------------- drawn chains, against a player of their own

Order = list[str]  # a stage's turns, such as F0 F1 B0 B1


@dataclass(frozen=True)
class Chain:
    """Seconds of each stage forward and back, and of the messages between stages, up and down."""

    forward: Sequence[float]
    back: Sequence[float]
    up: Sequence[float]
    down: Sequence[float]

    def seconds(self, item: Item) -> float:
        node = item.nodes[0]
        if isinstance(item, Chunk):
            of_stages = self.forward if node.outputs[0].name.startswith("out") else self.back
            return of_stages[int(item.site.removeprefix("stage"))]
        source = node.inputs[0].name
        if source.startswith("out"):
            return self.up[int(source.removeprefix("out"))]
        return self.down[int(source.removeprefix("dout")) - 1]

    def orders(self, count: int, are_few: bool = False) -> list[Order]:
        """Return what each stage does, in which order, as `take_turns` has it."""
        items, repeated = pipeline(len(self.forward), count)
        sites = [f"stage{stage}" for stage in range(len(self.forward))]
        turns = take_turns(items, repeated, [], sites, self.seconds)[0 if are_few else -1].turns
        return [of_stage(turns, stage).split() for stage in range(len(sites))]

    def play(self, orders: Sequence[Order]) -> float:
        """Return when the last stage is done, each in its order; inf where they wait for each other."""
        left = [deque(order) for order in orders]
        done = {(-1, word): 0.0 for word in orders[0]}
        free = [0.0] * len(orders)
        while any(left):
            ready = [n for n, order in enumerate(left) if order and self._source(n, order[0])[0] in done]
            if not ready:
                return inf
            for stage in ready:
                word = left[stage].popleft()
                source, message = self._source(stage, word)
                takes = self.forward[stage] if word[0] == "F" else self.back[stage]
                free[stage] = done[stage, word] = max(free[stage], done[source] + message) + takes
        return max(free)

    def _source(self, stage: int, word: str) -> tuple[tuple[int, str], float]:
        """Return of which stage's turn one reads, and what the message takes."""
        if word[0] == "F":
            return (stage - 1, word), self.up[stage - 1] if stage else 0.0
        if stage == len(self.back) - 1:
            return (stage, f"F{word[1:]}"), 0.0
        return (stage + 1, word), self.down[stage]


def drawn(rng: np.random.Generator, stages: int, longest_message: int = 5) -> Chain:
    work, messages = (1, 6, (2, stages)), (0, longest_message + 1, (2, stages - 1))
    return Chain(*rng.integers(*work).tolist(), *rng.integers(*messages).tolist())


def most_under_way(order: Order) -> int:
    return max(accumulate(1 if word[0] == "F" else -1 for word in order))


def one_forward_one_backward(stages: int, count: int) -> Iterator[Order]:
    for stage in range(stages):
        first = min(count, stages - stage)
        rest = [word for n in range(count - first) for word in (f"B{n}", f"F{first + n}")]
        yield [*(f"F{n}" for n in range(first)), *rest, *(f"B{n}" for n in range(count - first, count))]


@cache
def all_orders(count: int, begun: int = 0, returned: int = 0) -> list[Order]:
    """Return all orders of what a stage has left to do."""
    if returned == count:
        return [[]]
    orders: list[Order] = []
    if begun < count:
        orders += [[f"F{begun}", *rest] for rest in all_orders(count, begun + 1, returned)]
    if returned < begun:
        orders += [[f"B{returned}", *rest] for rest in all_orders(count, begun, returned + 1)]
    return orders


@pytest.mark.parametrize("seed", range(60))
def test_a_drawn_chain_takes_hardly_longer_than_by_1f1b(seed: int) -> None:
    """What is ready is not kept waiting for what will be: seldom, by up to 7 % of 3,000, that is longer."""
    rng = np.random.default_rng(seed)
    stages, count = int(rng.integers(1, 6)), int(rng.integers(2, 9))
    chain = drawn(rng, stages)

    assert chain.play(chain.orders(count)) <= 1.1 * chain.play(list(one_forward_one_backward(stages, count)))


@pytest.mark.parametrize("seed", [*range(40), 611, 709])  # of the last two more under way would take longer
def test_more_are_under_way_only_where_the_step_is_shorter_for_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, count = int(rng.integers(1, 6)), int(rng.integers(2, 9))
    chain = drawn(rng, stages)

    orders = chain.orders(count)

    has_more = any(most_under_way(order) > stages - stage for stage, order in enumerate(orders))
    by_1f1b = list(one_forward_one_backward(stages, count))
    assert not has_more or chain.play(orders) < chain.play(by_1f1b)


@pytest.mark.parametrize("longest_message", [0, 5])
@pytest.mark.parametrize("seed", range(15))
def test_two_stages_take_as_long_as_the_best_order_of_as_few_under_way(
    seed: int, longest_message: int
) -> None:
    rng = np.random.default_rng(seed)
    count, chain = int(rng.integers(2, 5)), drawn(rng, 2, longest_message)
    orders = chain.orders(count)

    every = all_orders(count)
    best = min(chain.play([first, second]) for first in every for second in every)
    as_few = [[o for o in every if most_under_way(o) <= most_under_way(order)] for order in orders]
    best_of_few = min(chain.play([first, second]) for first in as_few[0] for second in as_few[1])

    assert chain.play(orders) == best_of_few <= 1.5 * best


@pytest.mark.parametrize("seed", range(20))
def test_equal_stages_wait_for_messages_only_until_all_are_busy(seed: int) -> None:
    """Stage i of n is busy with 1 + (n - 1 - i) (1 + 2 message / cycle) under way: at most thrice 1F1B."""
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(1, 6))
    forward, back, quarters = (int(number) for number in rng.integers((1, 1, 0), (6, 6, 5)))
    message = quarters / 4 * (forward + back)
    chain = Chain(*([takes] * stages for takes in (forward, back, message, message)))
    behind = [stages - 1 - stage for stage in range(stages)]

    orders = chain.orders(count=24)

    shortest = 24 * (forward + back) + (stages - 1) * (forward + back + 2 * message)
    assert chain.play(orders) <= 1.04 * shortest
    assert all(most_under_way(order) <= 3 * (n + 1) for n, order in zip(behind, orders, strict=True))
    few = chain.orders(count=24, are_few=True)
    assert [most_under_way(order) for order in few] == [n + 1 for n in behind]
