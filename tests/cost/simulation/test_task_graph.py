"""Full and delta simulation against each other, and against a slow one without queue and replay."""

import importlib.util
import math
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from partc.cost.simulation import task_graph
from partc.cost.simulation.task_graph import BlockTasks, TaskGraph, Timed
from tests.builders.task_blocks import Contents, RandomMoves, block_of, blocks_of, run_by_ready, sources_of
from tests.sampling import sampled


def benchmark(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


synthetic_steps = benchmark("synthetic_steps")


def assert_same_timeline(expected: Timed, actual: Timed) -> None:
    for field in fields(Timed):
        one, other = (getattr(timed, field.name) for timed in (expected, actual))
        assert np.array_equal(one, other), f"{field.name}: {one} {other}"


def graph_of(contents: Contents, blocks: int, resources: int, launcher: int | None = None) -> TaskGraph:
    graph = TaskGraph(sources_of(blocks), resources, launcher)
    graph.replace(blocks_of(contents))
    return graph


def times_of(graph: TaskGraph, contents: Contents) -> dict[tuple[int, int], tuple[float, float]]:
    times = {}
    for block in contents:
        found = graph.times(block)
        columns = (found.ready.tolist(), found.end.tolist())
        for index, values in enumerate(zip(*columns, strict=True)):
            times[block, index] = values
    return times


def test_a_resource_runs_what_is_ready_first_and_of_equals_the_earlier_block() -> None:
    contents: Contents = {
        0: ([[(0, 1.0)], [(1, 2.0)]], []),
        1: ([[(2, 5.0)]], [(0, 1, 0)]),
        2: ([[(2, 1.0)], [(2, 1.0)]], [(0, 0, 1), (0, 1, 0)]),
    }
    graph = graph_of(contents, blocks=3, resources=3)

    assert graph.full() == 8.0
    assert graph.times(2).ready.tolist() == [2.0, 1.0]
    assert graph.times(2).end.tolist() == [8.0, 2.0]  # ready with block 1's, which comes first
    assert graph.times(1).end.tolist() == [7.0]


def test_a_task_takes_each_of_its_resources_when_that_is_free_and_ends_with_the_last() -> None:
    contents: Contents = {
        0: ([[(0, 3.0)]], []),
        1: ([[(0, 1.0), (1, 2.0)], []], [(1, 0, 1)]),
        2: ([[(1, 1.0)]], [(1, 1, 0)]),
    }
    graph = graph_of(contents, blocks=3, resources=2)

    assert graph.full() == 5.0
    assert graph.times(1).end.tolist() == [4.0, 4.0]
    assert graph.times(2).ready.tolist() == [4.0]


def test_launches_go_ahead_while_the_device_is_busy() -> None:
    contents: Contents = {
        0: ([[(2, 1.0), (0, 5.0)], [(2, 2.0), (0, 1.0)], [(2, 2.0), (0, 1.0)]], [(0, 0, 1), (0, 1, 2)]),
        1: ([[(1, 9.0)]], []),
        2: ([[(2, 1.0), (0, 0.5)]], [(1, 0, 0)]),
    }
    graph = graph_of(contents, blocks=3, resources=3, launcher=2)

    assert graph.full() == 10.0
    assert graph.times(0).end.tolist() == [5.0, 6.0, 7.0]  # launched at 1, 3 and 5
    assert graph.times(2).end.tolist() == [10.0]  # the device had waited for another: so does the launch


def test_what_a_host_does_last_of_a_task_waits_for_what_the_task_waits_for() -> None:
    contents: Contents = {
        0: ([[(1, 1.0), (0, 5.0)], [(0, 2.0), (1, 2.0)], [(1, 1.0), (0, 1.0)]], [(0, 0, 1), (0, 1, 2)]),
    }
    graph = graph_of(contents, blocks=1, resources=2, launcher=1)

    assert graph.full() == 8.0
    assert graph.times(0).end.tolist() == [5.0, 7.0, 8.0]  # the last is launched at 7, not at 1


@pytest.mark.parametrize("seed", range(20))
def test_full_simulation_agrees_with_relaxation(seed: int) -> None:
    moves = RandomMoves(seed, blocks=16, resources=4)
    graph = graph_of(moves.contents, moves.blocks, moves.resources, moves.launcher)

    seconds = graph.full()

    expected = run_by_ready(moves.contents, moves.launcher)
    assert times_of(graph, moves.contents) == expected
    assert seconds == max((end for _, end in expected.values()), default=0.0)


@pytest.mark.parametrize("seed", range(10))
def test_delta_simulation_agrees_with_relaxation_move_for_move(seed: int) -> None:
    moves = RandomMoves(seed, blocks=13, resources=3)
    graph = graph_of(moves.contents, moves.blocks, moves.resources, moves.launcher)
    graph.full()

    for _ in range(30):
        graph.replace(blocks_of(moves.propose()))
        graph.delta()
        assert times_of(graph, moves.contents) == run_by_ready(moves.contents, moves.launcher)


def change_of(moves: RandomMoves) -> dict[int, BlockTasks]:
    return blocks_of(moves.propose())


def follow(moves: RandomMoves, count: int) -> None:
    """Make moves in two graphs, one simulated anew; undo some; compare every task of every move."""
    graph, other = (graph_of(moves.contents, moves.blocks, moves.resources, moves.launcher) for _ in range(2))
    assert graph.delta() == other.full()
    for _ in range(count):
        change = change_of(moves)
        graph.replace(change)
        other.replace(change)
        assert graph.delta() == other.full()
        assert_same_timeline(other.timeline(), graph.timeline())
        if moves.chance(0.6):
            graph.undo()
            other.undo()
            moves.take_back()
            assert_same_timeline(other.timeline(), graph.timeline())


@pytest.mark.parametrize("seed", sampled(range(40), range(0, 40, 3)))
def test_full_and_delta_simulation_are_equal_to_the_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    follow(RandomMoves(seed, int(rng.integers(3, 36)), int(rng.integers(1, 7))), 150)


@pytest.mark.long
def test_full_and_delta_simulation_are_equal_over_a_million_moves() -> None:
    for seed in range(2000):
        follow(RandomMoves(1000 + seed, 3 + 2 * (seed % 6), 1 + seed % 5), 500)


@pytest.mark.long
def test_full_and_delta_simulation_are_equal_on_a_large_recurrence() -> None:
    rng = np.random.default_rng(0)
    blocks = synthetic_steps.Blocks(synthetic_steps.recurrence(40, 2), 64)
    strategy = blocks.data_parallel()
    graph, other = blocks.graph(), blocks.graph()
    for each in (graph, other):
        each.replace(blocks.all_contents(strategy))
        each.full()
    for _ in range(10_000):
        proposed = list(strategy)
        operator = int(rng.integers(len(strategy)))
        proposed[operator] = blocks.draw(rng)
        change = blocks.contents(proposed, operator)
        graph.replace(change)
        other.replace(change)
        assert graph.delta() == other.full()
        assert_same_timeline(other.timeline(), graph.timeline())
        if rng.random() < 0.7 or graph.tasks > 70_000:  # random strategies grow to three times that
            graph.undo()
            other.undo()
        else:
            strategy = proposed


def test_an_undone_move_leaves_no_trace_however_it_was_simulated() -> None:
    moves = RandomMoves(5, blocks=22, resources=3)
    graph = graph_of(moves.contents, moves.blocks, moves.resources, moves.launcher)
    graph.full()
    former = graph.timeline()

    for calls in ((), ("delta",), ("full",), ("delta", "full"), ("full", "full"), ("delta", "delta")):
        graph.replace(change_of(moves))
        moves.take_back()
        for call in calls:
            getattr(graph, call)()
        graph.undo()
        assert_same_timeline(former, graph.timeline())
    assert graph.full() == former.end.max()


def test_a_move_that_was_not_simulated_is_part_of_the_next_one() -> None:
    moves = RandomMoves(6, blocks=22, resources=3)
    graph = graph_of(moves.contents, moves.blocks, moves.resources, moves.launcher)
    graph.full()

    for _ in range(20):
        graph.replace(change_of(moves))
        graph.replace(change_of(moves))
        graph.delta()
        assert times_of(graph, moves.contents) == run_by_ready(moves.contents, moves.launcher)


@pytest.mark.parametrize("seed", range(10))
def test_only_a_step_beyond_the_limit_is_not_simulated(seed: int) -> None:
    moves = RandomMoves(seed, blocks=22, resources=3)
    graph, other = (graph_of(moves.contents, moves.blocks, moves.resources, moves.launcher) for _ in range(2))
    now_s, _ = graph.full(), other.full()
    stopped = 0
    for _ in range(100):
        change = change_of(moves)
        graph.replace(change)
        other.replace(change)
        step_s, limited_s = other.full(), graph.delta(now_s)
        assert limited_s == step_s or (step_s > now_s and limited_s == math.inf)
        stopped += limited_s == math.inf
        if step_s > now_s:
            graph.undo()
            other.undo()
            moves.take_back()
        now_s = min(now_s, step_s)
        assert_same_timeline(other.timeline(), graph.timeline())
    assert stopped


CHAIN: Contents = {
    0: ([[(0, 1.0)]], []),
    1: ([[(0, 2.0)]], [(0, 0, 0)]),
    2: ([[(1, 3.0)]], [(1, 0, 0)]),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: ([], [])}, "not there"),
        ({1: ([[(0, 2.0)]], [(0, 1, 0)])}, "not there"),
        ({1: ([[(0, 2.0)]], [(0, 0, 1)])}, "not there"),
        ({1: ([[(0, 2.0)]], [(0, 0, 0), (2, 0, 0)])}, "not among the sources"),
        ({2: ([[(0, 2.0)], [(0, 1.0)]], [(2, 1, 1)])}, "forward"),
        ({1: ([[(2, 2.0)]], [(0, 0, 0)])}, "resource is not there"),
        ({1: ([[(0, math.nan)]], [(0, 0, 0)])}, "finite"),
        ({1: ([[(0, math.inf)]], [(0, 0, 0)])}, "finite"),
        ({3: ([], [])}, "blocks are 0 to 2"),
    ],
)
def test_a_change_that_is_wrong_is_refused_and_changes_nothing(change: Contents, message: str) -> None:
    graph = graph_of(CHAIN, blocks=3, resources=2)
    graph.full()
    former = graph.timeline()

    with pytest.raises(ValueError, match=message):
        graph.replace(blocks_of(change))

    graph.replace({1: block_of(1, *CHAIN[1])})
    assert graph.delta() == 6.0
    assert_same_timeline(former, graph.timeline())
    assert graph.tasks == 3
    assert graph.dependencies == 2


def test_contents_that_no_block_has_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_graph, "MOST_CONTENTS", 40)
    follow(RandomMoves(3, blocks=12, resources=3), 100)
