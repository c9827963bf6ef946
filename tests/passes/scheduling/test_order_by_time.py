"""Meshes that work at the same time: the clock by hand and at random, and a recurrence of two layers."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lowered_graph import COMMUNICATION_DOMAIN, LoweredGraph, is_communication
from partc.passes.scheduling.order_by_time import lead_first, simulate_items
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from partc.runtime.plan.program import Run, Start, Wait
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)

WORKERS: dict[str, tuple[object, ...]] = {"a": (0,), "b": (1,), "both": (0, 1)}


def taken(one: Item) -> tuple[object, ...]:
    return WORKERS[one.site] if isinstance(one, Chunk) else ()


def item(site: str | None, output: str, *inputs: str) -> Item:
    node = gs.Node("Op", output, {}, [gs.Variable(name) for name in inputs], [gs.Variable(output)])
    return Communication((node,), None) if site is None else Chunk(site, [node])


def seconds(one: Item) -> float:
    return 1.0 if isinstance(one, Chunk) else 0.5


def test_a_layer_begins_with_the_first_step_that_arrives() -> None:
    items = [
        *(item(None, f"sent{t}", f"a{t}") for t in range(3)),
        *(item("a", f"a{t}", *([f"a{t - 1}"] if t else [])) for t in range(3)),
        *(item("b", f"b{t}", f"sent{t}", *([f"b{t - 1}"] if t else [])) for t in range(3)),
    ]

    times = simulate_items(items, taken, seconds)

    assert [time.begin_s for time in times] == [1, 2, 3, 0, 1, 2, 1.5, 2.5, 3.5]


def test_meshes_that_share_a_worker_take_turns() -> None:
    items = [item("a", "x"), item("both", "y"), item("b", "z")]

    times = simulate_items(items, taken, seconds)

    assert [time.begin_s for time in times] == [0, 1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_no_worker_does_two_things_and_nothing_begins_before_what_it_reads(seed: int) -> None:
    rng = np.random.default_rng(seed)
    items: list[Item] = []
    for number in range(40):
        reads = rng.choice(number, min(number, int(rng.integers(3))), replace=False) if number else []
        items.append(item(rng.choice(["a", "b", "both"]), str(number), *map(str, reads)))
    rng.shuffle(items)  # type: ignore[arg-type]

    times = simulate_items(items, taken, seconds)

    ends = {one.nodes[0].name: time.end_s for one, time in zip(items, times, strict=True)}
    for one, time in zip(items, times, strict=True):
        assert all(ends[tensor.name] <= time.begin_s for tensor in one.nodes[0].inputs)
    for worker in (0, 1):
        busy = sorted(
            (time.begin_s, time.end_s)
            for one, time in zip(items, times, strict=True)
            if worker in WORKERS[one.site]  # type: ignore[union-attr]
        )
        assert all(one[1] <= other[0] for one, other in pairwise(busy))


RECURRENCE = """
step (double[256,1024] x0, double[256,1024] x1, double[256,1024] x2, double[1024,1024] W, double[1024,1024] V)
    => (double loss, double[1024,1024] W_next, double[1024,1024] V_next) {
    y0 = MatMul (x0, W) a0 = Tanh (y0)
    i1 = Add (a0, x1) y1 = MatMul (i1, W) a1 = Tanh (y1)
    i2 = Add (a1, x2) y2 = MatMul (i2, W) a2 = Tanh (y2)
    z0 = MatMul (a0, V) b0 = Tanh (z0)
    j1 = Add (b0, a1) z1 = MatMul (j1, V) b1 = Tanh (z1)
    j2 = Add (b1, a2) z2 = MatMul (j2, V) b2 = Tanh (z2)
    loss = ReduceMean <keepdims = 0> (b2)
    xt = Transpose <perm = [1, 0]> (x0) at = Transpose <perm = [1, 0]> (a0)
    dW = MatMul (xt, a2) dV = MatMul (at, b2)
    W_next = Sub (W, dW) V_next = Sub (V, dV)
}
"""


@pytest.fixture(scope="module")
def recurrence() -> TrainingGraph:
    return import_text(RECURRENCE, sample_axes={"x0": 0, "x1": 0, "x2": 0})


def test_two_layers_of_a_recurrence_work_at_the_same_time(tmp_path: Path, recurrence: TrainingGraph) -> None:
    readers = {tensor.name: node.name for node in recurrence.graph.nodes for tensor in node.outputs}
    layers = {"host0/cpu0": ("y0", "y1", "y2"), "host0/cpu1": ("z0", "z1", "z2")}
    ops = tuple(
        OpConfig(readers[value], {}, devices=(device,))
        for device, values in layers.items()
        for value in values
    )
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops)

    compiled = compile_step(recurrence, tmp_path / "out", "1x2", strategy, "global")

    order = [i for i in compiled.plan.instructions if isinstance(i, Run | Start)]
    runs = [i.site for i in order if isinstance(i, Run)]
    first, second = runs[0], next(site for site in runs if site != runs[0])
    assert runs.index(second) < max(place for place, site in enumerate(runs) if site == first) - 1, runs
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


def layers(count: int) -> str:
    """Return a step of layers of two products each, gradients of weights before that of what they read."""
    inputs, outputs, body = ["double[128,512] h0"], ["double loss"], []
    for n in range(1, count + 1):
        body.append(f"u{n} = MatMul (h{n - 1}, A{n}) a{n} = Tanh (u{n}) h{n} = MatMul (a{n}, B{n})")
        inputs.append(f"double[512,1024] A{n}, double[1024,512] B{n}")
        outputs.append(f"double[512,1024] A{n}_next, double[1024,512] B{n}_next")
    body.append(f"loss = ReduceMean <keepdims = 0> (h{count}) g{count} = Tanh (h{count})")
    for n in range(count, 0, -1):
        body.append(
            f"""at{n} = Transpose <perm = [1, 0]> (a{n}) dB{n} = MatMul (at{n}, g{n})
            B{n}_next = Sub (B{n}, dB{n})
            Bt{n} = Transpose <perm = [1, 0]> (B{n}) da{n} = MatMul (g{n}, Bt{n}) du{n} = Mul (da{n}, a{n})
            ht{n} = Transpose <perm = [1, 0]> (h{n - 1}) dA{n} = MatMul (ht{n}, du{n})
            A{n}_next = Sub (A{n}, dA{n})
            At{n} = Transpose <perm = [1, 0]> (A{n}) g{n - 1} = MatMul (du{n}, At{n})"""
        )
    return f"step ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(body)} }}"


PRODUCT_FLOPS = 2 * 512 * 128 * 512


def in_parts(folder: Path, recompute_bytes: int | None = None) -> Compiled:
    """Return a plan that divides columns of A and rows of B: g2 and g1 are sums, behind dB and dA."""
    parts = {"A": {"tensor": AxisSplit(1)}, "B": {"tensor": AxisSplit(0)}}
    variables = {f"{name}{n}": split for name, split in parts.items() for n in (1, 2, 3)}
    strategy = Strategy(
        MESH_STRATEGY_FORMAT,
        "global",
        {},
        mesh={"data": 1, "tensor": 2},
        variables=variables,
        recompute_bytes=recompute_bytes,
    )
    return compile_step(import_text(layers(3), sample_axes={"h0": 0}), folder, "2x1", strategy, "global")


def hidden_flops(compiled: Compiled, summed: str) -> int:
    """Return what is computed while a sum is under way."""
    order = [i for i in compiled.plan.instructions if isinstance(i, Run | Start | Wait)]
    starts = ((place, i) for place, i in enumerate(order) if isinstance(i, Start))
    begun, start = next((place, i) for place, i in starts if summed in i.label)
    waits = (place for place, i in enumerate(order) if isinstance(i, Wait) and i.tag_id == start.tag_id)
    return sum(i.flops for i in order[begun : next(waits)] if isinstance(i, Run))


def test_gradients_of_weights_are_computed_while_sums_that_work_waits_for_are_under_way(
    tmp_path: Path,
) -> None:
    compiled = in_parts(tmp_path / "out")

    assert min(hidden_flops(compiled, summed) for summed in ("g1", "g2")) >= PRODUCT_FLOPS
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


def test_where_memory_is_limited_too(tmp_path: Path) -> None:
    """In the schedule that keeps to the graph both products of a layer are computed beside the first sum."""
    compiled = in_parts(tmp_path / "out", recompute_bytes=10**12)

    assert hidden_flops(compiled, "g2") >= 2 * PRODUCT_FLOPS
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


def node(op: str, output: str, *inputs: str) -> gs.Node:
    domain = COMMUNICATION_DOMAIN if op in ("Exchange", "AllReduce") else None
    return gs.Node(op, output, {}, [gs.Variable(n) for n in inputs], [gs.Variable(output)], domain=domain)


def graph(*nodes: gs.Node) -> tuple[LoweredGraph, dict[str, int]]:
    lowered = LoweredGraph(Meshes((Mesh("a", (("data", 2),)),)), list(nodes))
    return lowered, {n.name: place for place, n in enumerate(nodes) if not is_communication(n)}


BACK = (
    node("Transpose", "turned", "W"),
    node("MatMul", "dW", "x", "dy"),
    node("ReduceSum", "db", "dy"),
    node("MatMul", "dx", "dy", "turned"),
    node("Where", "masked", "mask", "dx"),
)
SUMS = (node("AllReduce", "dW.whole", "dW"), node("AllReduce", "db.whole", "db"))
UPDATES = (node("Sub", "W_next", "W", "dW.whole"), node("Sub", "b_next", "b", "db.whole"))
BELOW = (
    node("Exchange", "sent", "masked"),
    node("MatMul", "dV", "sent", "h"),
    node("AllReduce", "dV.whole", "dV"),
)


def in_order(places: dict[str, int]) -> list[str]:
    return sorted(places, key=lambda name: places[name])


def test_gradients_of_weights_go_behind_what_is_sent_to_the_mesh_before() -> None:
    lowered, position_of = graph(*BACK, *SUMS, *BELOW, *UPDATES)

    assert in_order(lead_first(lowered, position_of))[:5] == ["turned", "dx", "masked", "dW", "db"]


def test_nothing_changes_where_nobody_waits_for_the_message() -> None:
    lowered, position_of = graph(*BACK, *SUMS, node("Exchange", "sent", "masked"), *UPDATES)

    assert in_order(lead_first(lowered, position_of)) == list(position_of)


def test_nothing_changes_where_all_that_is_read_leads_further() -> None:
    """As where gradients are clipped by their norm: each sum is waited for."""
    norm = (node("Add", "norm", "dW.whole", "db.whole"), node("AllReduce", "norm.whole", "norm"))
    lowered, position_of = graph(*BACK, *SUMS, *norm, *BELOW)

    assert in_order(lead_first(lowered, position_of)) == list(position_of)
