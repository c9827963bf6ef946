"""Partitions of large variables: t(P) from the cost model, and the shards that follow."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import partc
from partc.compiler.options import Partitioner
from partc.compiler.planning.choose_partitions import measure_partitions, quickest
from partc.compiler.verification.verify import launch_in_process
from partc.cost.assignment.partitions import partition_evenly, search_partitions
from partc.cost.assignment.synchronisation import choose_strategy
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Link
from partc.cost.strategy import Shard, SyncFacts
from partc.cost.strategy_check import check_strategy
from partc.runtime.errors import BadUsage, NoPlacement
from partc.runtime.plan.boxes import is_empty, local_shape
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from tests.builders.plans.compiled_steps import cluster_of
from tests.checks.command_line import CLUSTER, done, make_mlp, refused

TABLE = SyncFacts("E", rows=100_000, row_bytes=512, slot_row_bytes=512, sparse=True, touched_rows=2_000)
SMALL = SyncFacts("b", rows=64, row_bytes=4, slot_row_bytes=4, sparse=False, touched_rows=64)
FOUR = cluster_of("4x1")


def price_on(cluster: Cluster, *facts: SyncFacts):  # type: ignore[no-untyped-def]
    def price_s(partitions: int) -> float:
        _, costs = choose_strategy(facts, cluster, "hybrid", "per-replica", partitions=partitions)
        return costs.totals_s["hybrid"]

    return price_s


def shards_of(partitions: int, *facts: SyncFacts, cluster: Cluster = FOUR) -> dict[str, tuple[Shard, ...]]:
    strategy, _ = choose_strategy(facts, cluster, "ps", "per-replica", partitions=partitions)
    check_strategy(strategy, facts, cluster)
    return {name: choice.shards for name, choice in strategy.parameters.items()}


@pytest.mark.parametrize("partitions", [1, 2, 3, 4])
def test_a_large_variable_has_as_many_even_shards_in_host_order(partitions: int) -> None:
    shards = shards_of(partitions, TABLE, SMALL)

    sizes = [shard.stop - shard.start for shard in shards["E"]]
    assert len(sizes) == partitions
    assert max(sizes) - min(sizes) <= 1
    assert [s.host for s in shards["E"]] == sorted(s.host for s in shards["E"])
    assert len(shards["b"]) == 1


def test_several_large_variables_go_to_different_servers() -> None:
    tables = [_named(name) for name in "ABCD"]

    shards = shards_of(1, *tables)

    assert {of_one[0].host for of_one in shards.values()} == {host.name for host in FOUR.hosts}


def _named(name: str) -> SyncFacts:
    return SyncFacts(name, 100_000, 512, 512, sparse=True, touched_rows=2_000)


def test_on_equal_hosts_the_price_falls_with_every_partition_and_all_servers_are_taken() -> None:
    search = search_partitions(price_on(FOUR, TABLE), FOUR)

    prices = list(search.predicted_s.values())
    assert list(search.predicted_s) == [1, 2, 3, 4]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] > 1.5 * prices[-1]
    assert search.chosen == 4


def test_a_slow_host_is_left_out() -> None:
    """Every host pulls and pushes as a worker; to serve as well would make the slow one the busiest."""
    links = tuple(
        Link(link.ends, 1e6 if "host0" in link.ends else 125e6, link.latency_s) for link in FOUR.links
    )
    cluster = msgspec.structs.replace(FOUR, links=links)

    search = search_partitions(price_on(cluster, TABLE), cluster)

    assert search.chosen == 3
    strategy, _ = choose_strategy([TABLE], cluster, "hybrid", "per-replica", partitions=3)
    assert {shard.host for shard in strategy.parameters["E"].shards} == {"host1", "host2", "host3"}


def test_what_does_not_fit_is_passed_over_and_if_nothing_fits_the_reason_is_given() -> None:
    def tight(partitions: int) -> float:
        if partitions < 3:
            raise NoPlacement("too small", at="host0", fix="more partitions")
        return 1.0 + partitions

    def never(partitions: int) -> float:
        raise NoPlacement("too small", at="host0", fix="more memory")

    assert search_partitions(tight, FOUR).chosen == 3
    with pytest.raises(NoPlacement, match="more memory"):
        search_partitions(never, FOUR)


def test_ties_go_to_the_greater_number_which_spreads_memory() -> None:
    assert search_partitions(lambda partitions: 1.0, FOUR, 2).chosen == 4


def test_a_variable_that_balance_does_not_split_stays_whole() -> None:
    strategy, _ = choose_strategy([SMALL, TABLE], FOUR, "ps", "per-replica", partitions=4)

    assert len(strategy.parameters["b"].shards) == 1


@pytest.mark.parametrize("partitions", [5, 7, 8, 13])
def test_more_partitions_than_servers_are_dealt_out_to_all_of_them(partitions: int) -> None:
    (shards,) = shards_of(partitions, TABLE).values()

    assert [shard.host for shard in shards] == [host.name for host in FOUR.hosts]
    assert [shards[0].start, *(s.stop for s in shards)] == [*(s.start for s in shards), TABLE.rows]
    of_each = [round((shard.stop - shard.start) * partitions / TABLE.rows) for shard in shards]
    assert sum(of_each) == partitions
    assert max(of_each) - min(of_each) <= 1
    for shard, number in zip(shards, of_each, strict=True):
        assert shard.stop - shard.start == pytest.approx(number * TABLE.rows / partitions, abs=1)


def test_more_partitions_than_rows_are_as_many_as_rows() -> None:
    shards = partition_evenly([replace(TABLE, rows=6)], FOUR, 1_000)["E"]

    assert sorted(shard.stop - shard.start for shard in shards) == [1, 1, 2, 2]


def test_beyond_the_servers_prices_go_up_to_as_many_on_each() -> None:
    assert list(search_partitions(price_on(FOUR, TABLE), FOUR, 5).predicted_s) == [5, 6, 7, 8]
    with pytest.raises(BadUsage, match="ask for at least one"):
        search_partitions(lambda partitions: 1.0, FOUR, 0)


def test_a_step_of_three_partitions_on_two_servers_trains_what_one_device_trains(tmp_path: Path) -> None:
    sizes = {"vocab": 51, "embedding": 4, "cells": 4, "projection": 4, "steps": 2, "samples": 3}
    forward = partc.build_model("lm", batch=2, dtype="float64", **sizes)
    model = partc.build_training_graph(forward, loss="loss", optimizer=partc.SGD(0.1))
    plan = partc.compile(
        model, cluster_of("2x2"), tmp_path / "out", strategy="ps", partitions=3, batch="per-replica"
    )

    rows = [
        local_shape((51, 4), piece.box)[0]
        for rank in plan.plan.ranks
        for piece in rank.pieces
        if piece.variable == "embedding"
    ]
    assert sorted(rows) == [17, 34]  # one partition, and two next to each other
    assert partc.verify(plan, steps=2, launcher=launch_in_process).passed


# ---------------------------------------------------------------- the public way


def test_the_partitioner_is_parallaxs() -> None:
    assert partc.get_partitioner(2) == Partitioner(2, "model")
    assert partc.get_partitioner(2, search_partitions=False) == Partitioner(2, "off")
    with pytest.raises(BadUsage, match="at least one"):
        partc.get_partitioner(0)


def test_without_a_search_the_minimum_is_used(tmp_path: Path) -> None:
    make_mlp(tmp_path)
    shards: list[set[str]] = []
    for search in ("off", "model"):
        out = tmp_path / search
        options = ("--strategy", "ps", "--search-partitions", search)
        shown = done("compile", tmp_path / "train.onnx", "-c", CLUSTER, *options, "-o", out)
        assert f"servers: {1 if search == 'off' else 2}" in shown
        plan = read_plan_folder(out).plan
        shards.append({h.variable for r in plan.ranks for h in r.pieces if not is_empty(h.box)})
    assert shards[0] == shards[1]
    compile_ = ("compile", tmp_path / "train.onnx", "-c", CLUSTER, "-o", tmp_path / "x")
    for searched in (("--search-partitions", "off"), ("--search-partitions", "model")):
        refused(*compile_, *searched, "--min-partitions", 0, what="0 partitions", fix="at least one")


def test_every_candidate_is_run_and_the_quickest_of_measured_ones_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[int] = []
    rates = {1: [50.0, 10.0, 50.0], 2: [60.0, 60.0, 60.0], 3: [40.0, 90.0, 40.0]}

    class Result:
        def __init__(self, steps_per_s: float) -> None:
            self.steps_per_s = steps_per_s

    class FakeRunner:
        def __init__(self, plan: int) -> None:
            self._plan = plan

        def train(self, data: str, steps: int, save: bool) -> Result:
            return Result(rates[self._plan].pop())

    monkeypatch.setattr("partc.compiler.planning.choose_partitions.Runner", FakeRunner)

    def compile_with(partitions: int, folder: Path) -> PlanFolder:
        compiled.append(partitions)
        return partitions  # type: ignore[return-value]

    step_s = measure_partitions((1, 2, 3), compile_with)

    assert compiled == [1, 2, 3]
    assert step_s == {1: 1 / 50, 2: 1 / 60, 3: 1 / 40}
    assert quickest(step_s) == 2
