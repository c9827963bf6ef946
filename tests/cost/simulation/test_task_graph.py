"""Full and delta simulation against each other, and against a slow one without queue and replay."""

import numpy as np
import pytest

from partc.cost.simulation.task_graph import TaskGraph
from tests.builders.task_blocks import Contents, RandomMoves, block_of, relaxed


def assert_same_times(one: TaskGraph, other: TaskGraph, blocks: int) -> None:
    for block in range(blocks):
        for name in ("ready", "start", "end"):
            expected, actual = (getattr(graph.times(block), name) for graph in (one, other))
            assert np.array_equal(expected, actual), f"{name} of block {block}: {expected} {actual}"


def graph_of(contents: Contents, blocks: int, resources: int) -> TaskGraph:
    graph = TaskGraph(blocks, resources)
    graph.replace({block: block_of(*content) for block, content in contents.items()})
    return graph


def times_of(graph: TaskGraph, contents: Contents) -> dict[tuple[int, int], tuple[float, float, float]]:
    times = {}
    for block in contents:
        found = graph.times(block)
        columns = (found.ready.tolist(), found.start.tolist(), found.end.tolist())
        for index, values in enumerate(zip(*columns, strict=True)):
            times[block, index] = values
    return times


def test_a_resource_runs_what_is_ready_first_and_of_equals_the_earlier_block() -> None:
    contents: Contents = {
        0: ([(0, 1.0), (1, 2.0)], []),
        1: ([(2, 5.0)], [(0, 1, 1, 0)]),
        2: ([(2, 1.0), (2, 1.0)], [(0, 0, 2, 1), (0, 1, 2, 0)]),
    }
    graph = graph_of(contents, blocks=3, resources=3)

    assert graph.full() == 8.0
    assert graph.times(2).ready.tolist() == [2.0, 1.0]
    assert graph.times(2).start.tolist() == [7.0, 1.0]  # ready with block 1's, which comes first
    assert graph.times(1).start.tolist() == [2.0]


@pytest.mark.parametrize("seed", range(20))
def test_full_simulation_agrees_with_relaxation(seed: int) -> None:
    moves = RandomMoves(seed, operators=6, resources=4)
    graph = graph_of(moves.contents, moves.blocks, moves.resources)

    seconds = graph.full()

    expected = relaxed(moves.contents)
    assert times_of(graph, moves.contents) == expected
    assert seconds == max((end for _, _, end in expected.values()), default=0.0)


@pytest.mark.parametrize("seed", range(10))
def test_delta_simulation_agrees_with_relaxation_move_for_move(seed: int) -> None:
    moves = RandomMoves(seed, operators=5, resources=3)
    graph = graph_of(moves.contents, moves.blocks, moves.resources)
    graph.full()

    for _ in range(30):
        graph.replace({block: block_of(*content) for block, content in moves.propose().items()})
        graph.delta()
        assert times_of(graph, moves.contents) == relaxed(moves.contents)


def follow(moves: RandomMoves, count: int) -> None:
    """Make moves in two graphs, one simulated anew; undo some; compare every task of every move."""
    graph, other = (graph_of(moves.contents, moves.blocks, moves.resources) for _ in range(2))
    assert graph.delta() == other.full()
    for _ in range(count):
        change = {block: block_of(*content) for block, content in moves.propose().items()}
        graph.replace(change)
        other.replace(change)
        assert graph.delta() == other.full()
        assert_same_times(other, graph, moves.blocks)
        if moves.chance(0.6):
            graph.undo()
            other.undo()
            moves.take_back()
            assert_same_times(other, graph, moves.blocks)


@pytest.mark.parametrize("seed", range(20))
def test_full_and_delta_simulation_are_equal_to_the_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    follow(RandomMoves(seed, int(rng.integers(2, 16)), int(rng.integers(1, 7))), 250)
