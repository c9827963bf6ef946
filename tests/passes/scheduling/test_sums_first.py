"""Which sums begin first, and that nodes stay behind what they read."""

from collections.abc import Mapping
from itertools import permutations

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lowered_graph import COMMUNICATION_DOMAIN, LoweredGraph
from partc.passes.scheduling.sums_first import sums_first

NO_TAILS: Mapping[str, float] = {}


def graph(nodes: dict[str, list[str]]) -> LoweredGraph:
    """Return a graph of nodes by what they read; those whose names begin with `sum` are communications."""
    made = []
    for name, reads in nodes.items():
        domain = COMMUNICATION_DOMAIN if name.startswith("sum") else None
        inputs = [gs.Variable(read) for read in reads]
        made.append(gs.Node("Op", name, {}, inputs, [gs.Variable(name)], domain=domain))
    return LoweredGraph(Meshes((Mesh("worker", (("data", 2),)),)), made)


def in_order(
    lowered: LoweredGraph, seconds: dict[str, float], tail_s: Mapping[str, float] = NO_TAILS
) -> list[str]:
    places = {node.name: number for number, node in enumerate(lowered.nodes)}
    new = sums_first(
        lowered, places, lambda node: seconds.get(node.name, 1.0), lambda node: tail_s.get(node.name, 0.0)
    )
    return sorted(new, key=new.__getitem__)


def test_a_recurrence_goes_back_layer_by_layer() -> None:
    nodes: dict[str, list[str]] = {}
    for step in (3, 2, 1):
        behind = [f"b{step + 1}"] if step < 3 else []
        nodes[f"b{step}"] = behind
        nodes[f"a{step}"] = [f"b{step}", *([f"a{step + 1}"] if step < 3 else [])]
    nodes |= {"dA": ["a1", "a2", "a3"], "dB": ["b1", "b2", "b3"]}
    nodes |= {"sumA": ["dA"], "sumB": ["dB"], "A": ["sumA"], "B": ["sumB"]}

    order = in_order(graph(nodes), {})

    assert order == ["b3", "b2", "b1", "dB", "sumB", "a3", "a2", "a1", "dA", "sumA", "A", "B"]


@pytest.mark.parametrize("seed", range(20))
def test_each_sum_is_the_one_that_least_work_leads_to(seed: int) -> None:
    """Against adding up all that each sum still needs."""
    rng = np.random.default_rng(seed)
    nodes: dict[str, list[str]] = {}
    for number in range(25):
        reads = rng.choice(number, min(number, int(rng.integers(3))), replace=False) if number else []
        nodes[f"n{number}"] = [f"n{read}" for read in reads]
    sums = rng.choice(25, 4, replace=False).tolist()
    nodes |= {f"sum{number}": [f"n{number}"] for number in sums}
    seconds = {name: float(rng.random()) for name in nodes}

    def needs(name: str) -> set[str]:
        return {name}.union(*(needs(read) for read in nodes[name]))

    order = in_order(graph(nodes), seconds)

    assert all(order.index(read) < order.index(name) for name, reads in nodes.items() for read in reads)
    done: set[str] = set()
    left = {f"sum{number}": needs(f"n{number}") for number in sums}
    for sum_ in sorted(left, key=order.index):
        work = {other: sum(seconds[name] for name in needed - done) for other, needed in left.items()}
        assert work[sum_] <= min(work.values()) + 1e-9
        done |= left.pop(sum_)
        assert set(order[: order.index(sum_)]) >= done


def test_the_least_work_first_is_the_best_of_all_orders_of_equal_sums() -> None:
    """Sums of 2 s each of nodes in a row, which take 1, 2 and 3 s: tried in all orders."""
    seconds = {"n0": 1.0, "n1": 2.0, "n2": 3.0}

    def took_s(order: list[str]) -> float:
        computed_s = sent_s = 0.0
        for name in order:
            computed_s += seconds[name]
            sent_s = max(sent_s, computed_s) + 2.0
        return sent_s

    nodes = {"n2": [], "n1": [], "n0": [], "sum2": ["n2"], "sum1": ["n1"], "sum0": ["n0"]}
    order = [name for name in in_order(graph(nodes), seconds) if name in seconds]

    assert took_s(order) == min(took_s(list(each)) for each in permutations(seconds))


def test_of_sums_that_are_ready_the_one_that_is_handed_on_longest_goes_first() -> None:
    """Dense layers on the way back, the largest last: each holds the wire, then is handed on within hosts."""
    seconds, wire_s = {"n0": 0.1, "n1": 0.1, "n2": 0.1}, {"n0": 1.0, "n1": 4.0, "n2": 9.0}
    tail_s = {"sum0": 0.5, "sum1": 2.0, "sum2": 6.0}
    nodes = {"n0": [], "n1": ["n0"], "n2": ["n1"]}
    nodes |= {f"d{n}": [f"n{n}"] for n in range(3)} | {f"sum{n}": [f"d{n}"] for n in range(3)}

    def took_s(sums: list[str]) -> float:
        made_s = sent_s = end_s = 0.0
        for place, name in enumerate(sums):
            made_s = max(made_s, sum(seconds[f"n{n}"] for n in range(int(name[3:]) + 1)) + 0.1 * (place + 1))
            sent_s = max(sent_s, made_s) + wire_s[f"n{name[3:]}"]
            end_s = max(end_s, sent_s + tail_s[name])
        return end_s

    taken, before = (
        [name for name in in_order(graph(nodes), dict.fromkeys(nodes, 0.1), tails) if name in tail_s]
        for tails in (tail_s, NO_TAILS)
    )

    assert before == ["sum0", "sum1", "sum2"]
    assert took_s(taken) == min(took_s(list(each)) for each in permutations(tail_s))
    assert took_s(taken) < took_s(before)
