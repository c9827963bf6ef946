"""Steps whose resources take blocks in a given order: against a slow play, and beside the queue."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from partc.cost.simulation.task_graph import TaskGraph
from tests.builders.task_blocks import Contents, RandomMoves, block_of, run_in_turn

# Block 0 makes what 1 and 2 read, 3 waits for 2 alone: what is ready first, 1, is better left for later.
LEADS_ON: Contents = {
    0: ([[(0, 1.0)]], []),
    1: ([[(0, 4.0)]], [(0, 0, 0)]),
    2: ([[(0, 1.0)]], [(0, 0, 0)]),
    3: ([[(1, 5.0)]], [(2, 0, 0)]),
    4: ([[(0, 0.5)]], [(1, 0, 0), (3, 0, 0)]),
}
SOURCES = [[], [0], [0], [2], [1, 3]]


class Drawn:
    """Random moves in a graph that has an order, drawn as well, and what it should take."""

    def __init__(self, seed: int, blocks: int = 14, resources: int = 3) -> None:
        self.moves, rng = RandomMoves(seed, blocks, resources), np.random.default_rng(seed)
        self.order = self._order(rng)
        self.is_awaited = {source for own in self.moves.sources for source in own}

    def graph(self, has_order: bool = True) -> TaskGraph:
        moves, order = self.moves, np.array(self.order, np.int32)
        graph = TaskGraph(moves.sources, moves.resources, moves.launcher, order if has_order else None)
        self.replace(graph, moves.contents)
        return graph

    def replace(self, graph: TaskGraph, contents: Contents) -> None:
        sources = self.moves.sources
        graph.replace({block: block_of(block, *own, sources[block]) for block, own in contents.items()})

    def expected_s(self) -> float:
        """Return the less of what the order and the queue take."""
        in_turn = run_in_turn(self.moves.contents, self.order, self.is_awaited, self.moves.launcher)
        return min(in_turn, self.graph(has_order=False).full())

    def _order(self, rng: np.random.Generator) -> list[int]:
        order: list[int] = []
        left = set(range(self.moves.blocks))
        while left:
            ready = sorted(block for block in left if not left & set(self.moves.sources[block]))
            order.append(int(rng.choice(ready)))
            left.remove(order[-1])
        return order


def graph_of(
    contents: Contents, sources: Sequence[Sequence[int]], order: Sequence[int] | None = None
) -> TaskGraph:
    graph = TaskGraph(sources, resources=3, order=None if order is None else np.array(order, np.int32))
    graph.replace({block: block_of(block, *own, sources[block]) for block, own in contents.items()})
    return graph


@pytest.mark.long
def test_what_leads_on_goes_before_what_is_ready_first() -> None:
    assert graph_of(LEADS_ON, SOURCES).full() == 11.5
    assert graph_of(LEADS_ON, SOURCES, [0, 1, 2, 3, 4]).full() == 11.5
    assert graph_of(LEADS_ON, SOURCES, [0, 2, 3, 1, 4]).full() == 7.5


def test_updates_do_not_hold_back_what_comes_behind_them_in_the_order() -> None:
    """Gradients of two layers, their sums on resource 1, and updates on 0, where the other gradient waits."""
    contents: Contents = {
        0: ([[(0, 1.0)]], []),
        1: ([[(0, 1.0)]], [(0, 0, 0)]),
        2: ([[(1, 3.0)], [(0, 1.0)]], [(0, 0, 0), (2, 0, 1)]),
        3: ([[(1, 1.0)], [(0, 1.0)]], [(1, 0, 0), (3, 0, 1)]),
    }
    sources = [[], [0], [0], [1]]

    assert graph_of(contents, sources, [0, 2, 1, 3]).full() == 6.0  # updates at 4 and 5
    assert graph_of(contents, sources, [0, 1, 3, 2]).full() == 6.0  # the queue's: sum of 2 first


@pytest.mark.parametrize("seed", range(60))
def test_a_step_takes_the_less_of_the_order_and_the_queue(seed: int) -> None:
    drawn = Drawn(seed)
    graph = drawn.graph()

    seconds = graph.full()

    assert seconds == drawn.expected_s()
    for _ in range(4):
        drawn.replace(graph, drawn.moves.propose())
        assert graph.delta() == drawn.expected_s()


def test_the_order_is_often_quicker_and_often_not() -> None:
    """Both are tried in these tests."""
    quicker = 0
    for seed in range(60):
        drawn = Drawn(seed)
        queued_s = drawn.graph(has_order=False).full()
        assert drawn.expected_s() <= queued_s
        quicker += drawn.expected_s() < queued_s
    assert 5 < quicker < 55


@pytest.mark.parametrize("seed", range(10))
def test_delta_simulation_is_full_simulation_whatever_limit_there_was(seed: int) -> None:
    drawn = Drawn(seed, blocks=22)
    graph, other = drawn.graph(), drawn.graph()
    now_s, _ = graph.full(), other.full()
    for _ in range(60):
        change = drawn.moves.propose()
        drawn.replace(graph, change)
        drawn.replace(other, change)
        limit_s = now_s * float(drawn.moves.chance(0.5) or 1.1)
        step_s, limited_s = other.full(), graph.delta(limit_s)
        assert limited_s == (step_s if step_s <= limit_s else math.inf) or limited_s == step_s
        if limited_s == math.inf or drawn.moves.chance(0.4):
            graph.undo()
            other.undo()
            drawn.moves.take_back()
        else:
            now_s = step_s
    assert graph.full() == other.full() == drawn.expected_s()
