"""Hybrid by cost, not by kind: each method wins somewhere (docs/hybrid.md)."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.assignment.synchronisation import choose_strategy
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Link
from partc.cost.strategy import STRATEGY_FORMAT, Strategy, SyncFacts, Synchronisation
from tests.builders.graphs.foreign_steps import TABLE, import_step
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    cluster_of,
    compile_step,
    random_batches,
)

TWO_BY_TWO = cluster_of("2x2")
FOUR = cluster_of("4x1")
WEIGHT = SyncFacts("W", 4_096, 4_096, slot_row_bytes=4_096, sparse=False, touched_rows=4_096)


def table(rows: int, touched: float) -> SyncFacts:
    return SyncFacts("E", rows, row_bytes=256, slot_row_bytes=256, sparse=True, touched_rows=touched)


def one_slow_host() -> Cluster:
    links = tuple(
        Link(link.ends, 1e7 if "host3" in link.ends else 125e6, link.latency_s) for link in FOUR.links
    )
    return msgspec.structs.replace(FOUR, links=links)


@pytest.mark.parametrize(
    ("rows", "touched", "method"),
    [
        (64, 60, "all_reduce"),  # nearly every row is used: the whole is one message
        (2_000, 4, "all_gather"),  # so few rows that latency decides: one collective
        (2_000, 40, "servers"),  # enough rows that two levels pay
        (100_000, 400, "servers"),
    ],
)
def test_a_sparse_table_goes_where_it_is_cheapest(rows: int, touched: float, method: str) -> None:
    strategy, costs = choose_strategy([table(rows, touched)], TWO_BY_TWO, "auto", "per-replica")

    assert strategy.parameters["E"].method == method
    (choice,) = costs.choices
    assert choice.seconds[method] == min(choice.seconds.values())  # type: ignore[index]


def step_of_table(rows: int, ids: int) -> onnx.ModelProto:
    """One table of 64 floats a row, of which each replica looks some up."""
    forward = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    lookup (int64[{ids}] ids, float[{ids}, 64] y) => (float loss) <float[{rows}, 64] E> {{
        e = Gather (E, ids)
        d = Sub (e, y)
        q = Mul (d, d)
        loss = ReduceMean <keepdims = 0> (q)
    }}""")
    forward.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((rows, 64), np.float32), "E"))
    return build_training_graph(forward, loss="loss", optimizer=Adagrad(0.1))


@pytest.mark.parametrize(
    ("rows", "ids", "method", "microseconds"),
    [
        (64, 176, "all_reduce", {"all_reduce": 407, "all_gather": 2_543, "servers": 1_902}),
        (2_000, 4, "all_gather", {"all_reduce": 4_822, "all_gather": 762, "servers": 1_634}),
        (2_000, 40, "all_gather", {"all_reduce": 4_830, "all_gather": 1_132, "servers": 1_868}),
        (100_000, 803, "servers", {"all_reduce": 230_762, "all_gather": 7_393, "servers": 6_902}),
    ],
)
def test_a_plan_takes_the_way_by_which_its_whole_step_is_quickest(
    rows: int, ids: int, method: str, microseconds: dict[str, int], tmp_path: Path
) -> None:
    model = step_of_table(rows, ids)
    steps = {
        way: compile_step(import_training_graph(model), tmp_path / way, "2x2", pinned(way)).plan
        for way in microseconds
    }

    auto = compile_step(import_training_graph(model), tmp_path / "auto", "2x2")

    found = {way: plan.predicted_step_s * 1e6 for way, plan in steps.items()}
    assert found == pytest.approx(microseconds, rel=0.01)  # as docs/hybrid.md has them
    assert auto.methods["E"] == method
    assert (
        auto.plan.predicted_step_s * 1e6 <= found[method] == min(found.values())
    )  # servers in its best form


def pinned(method: str) -> Strategy:
    how = Synchronisation(method)  # type: ignore[arg-type]
    return Strategy(STRATEGY_FORMAT, "per-replica", {"E": how})


def test_by_kind_alone_the_small_table_would_take_more_than_twice_as_long() -> None:
    small = [table(64, 60)]
    _, by_kind = choose_strategy(small, TWO_BY_TWO, "hybrid", "per-replica")
    _, by_cost = choose_strategy(small, TWO_BY_TWO, "auto", "per-replica")

    assert by_kind.totals_s["hybrid"] > 2 * min(by_cost.totals_s.values())


def test_the_plan_sums_a_small_table_whole_and_trains_as_one_device(tmp_path: Path) -> None:
    compiled = compile_step(import_step(TABLE), tmp_path / "out", "2x1", batch="global")

    (parameter,) = [variable for variable in compiled.plan.variables if variable.role == "parameter"]
    assert parameter.sparse
    assert parameter.method == "all_reduce"
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, steps=3))


def test_between_equal_hosts_a_dense_parameter_is_never_cheaper_on_servers() -> None:
    for rows in (1, 64, 4_096, 100_000):
        weight = weight_of(rows)
        _, costs = choose_strategy([weight], FOUR, "auto", "per-replica")
        seconds = costs.choices[0].seconds
        assert seconds["servers"] >= seconds["all_reduce"] * (1 - 1e-6)


def weight_of(rows: int) -> SyncFacts:
    return SyncFacts("W", rows, 1_024, slot_row_bytes=1_024, sparse=False, touched_rows=rows)


def test_with_one_slow_host_a_dense_parameter_goes_to_the_servers_of_the_others() -> None:
    """A ring sends 2 (p - 1) / p of the weight through the slow link, servers elsewhere send it once."""
    slow = one_slow_host()
    _, reduced = choose_strategy([WEIGHT], slow, "allreduce", "per-replica")

    strategy, costs = choose_strategy([WEIGHT], slow, "auto", "per-replica", partitions=3)

    served = strategy.parameters["W"]
    assert served.method == "servers"
    assert {shard.host for shard in served.shards} == {"host0", "host1", "host2"}
    ratio = reduced.totals_s["allreduce"] / min(costs.totals_s.values())
    assert ratio == pytest.approx(1.5, rel=0.02)
