from itertools import product
from pathlib import Path

import msgspec
import pytest

from partc.cost.assignment.synchronisation import StrategyCosts, choose_strategy
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.strategy import Mode, Shard, Strategy, SyncFacts, Synchronisation, encode_strategy
from partc.cost.strategy_check import check_strategy
from partc.runtime.errors import NoPlacement

EXAMPLES = Path(__file__).parents[3] / "examples"
TITANS = read_cluster(EXAMPLES / "cluster-8x6-titanxp.json")
TWO_BY_TWO = read_cluster(EXAMPLES / "cluster-2x2.json")


def dense(name: str, rows: int, row_bytes: int) -> SyncFacts:
    return SyncFacts(name, rows, row_bytes, slot_row_bytes=row_bytes, sparse=False, touched_rows=rows)


def sparse(name: str, rows: int, row_bytes: int, touched_rows: float) -> SyncFacts:
    return SyncFacts(name, rows, row_bytes, slot_row_bytes=row_bytes, sparse=True, touched_rows=touched_rows)


# Parallax's LM: batch 128 x 20 words, 8,192 sampled classes, LSTM 2,048 projected to 512.
LM = (
    sparse("embedding", 800_000, 512 * 4, touched_rows=2_500),
    sparse("softmax", 800_000, 512 * 4, touched_rows=10_500),
    dense("lstm", 1_024, 8_192 * 4),
    dense("projection", 2_048, 512 * 4),
    dense("bias", 8_192, 4),
    SyncFacts("scale", 1, 4, slot_row_bytes=0, sparse=False, touched_rows=1, servable=False),
)


def methods(strategy: Strategy) -> dict[str, str]:
    return {name: synchronisation.method for name, synchronisation in strategy.parameters.items()}


def reason(costs: StrategyCosts, name: str) -> str:
    return next(choice.reason for choice in costs.choices if choice.variable == name)


def test_the_lm_gets_its_tables_on_servers_and_its_dense_weights_all_reduced() -> None:
    strategy, costs = choose_strategy(LM, TITANS, "auto", "per-replica")

    assert methods(strategy) == {
        "embedding": "servers",
        "softmax": "servers",
        "lstm": "all_reduce",
        "projection": "all_reduce",
        "bias": "all_reduce",
        "scale": "all_reduce",
    }
    assert [shard.stop - shard.start for shard in strategy.parameters["embedding"].shards] == [100_000] * 8
    assert costs.assignment is not None
    assert costs.assignment.status == "OPTIMAL"
    check_strategy(strategy, LM, TITANS)


def test_a_small_table_that_is_used_nearly_whole_is_all_reduced() -> None:
    strategy, costs = choose_strategy([sparse("small", 64, 256, touched_rows=60)], TITANS, "auto", "global")

    assert methods(strategy) == {"small": "all_reduce"}
    assert costs.assignment is None
    seconds = costs.choices[0].seconds
    assert seconds["all_reduce"] == min(seconds.values())


def test_a_dense_parameter_between_cpu_hosts_is_a_tie_and_goes_to_all_reduce() -> None:
    strategy, costs = choose_strategy([dense("W", 4_096, 4_096)], TWO_BY_TWO, "auto", "global")

    seconds = costs.choices[0].seconds
    assert seconds["servers"] == pytest.approx(seconds["all_reduce"], rel=0.01)
    assert methods(strategy) == {"W": "all_reduce"}


@pytest.mark.parametrize(
    ("mode", "table", "weight"),
    [
        ("hybrid", "servers", "all_reduce"),
        ("allreduce", "all_gather", "all_reduce"),
        ("ps", "servers", "servers"),
    ],
)
def test_a_mode_forces_its_methods_by_kind(mode: Mode, table: str, weight: str) -> None:
    strategy, costs = choose_strategy(LM, TITANS, mode, "global")

    chosen = methods(strategy)
    assert chosen["embedding"] == table
    assert chosen["lstm"] == weight
    assert chosen["scale"] == "all_reduce"  # it cannot live on a server
    assert f"--strategy {mode} says so" in reason(costs, "lstm")
    check_strategy(strategy, LM, TITANS)


@pytest.mark.parametrize(
    ("cluster", "rows", "touched"),
    list(product([TITANS, TWO_BY_TWO], [10, 1_000, 100_000], [1, 300])),
)
def test_auto_is_never_predicted_slower_than_a_pure_strategy(
    cluster: Cluster, rows: int, touched: int
) -> None:
    facts = (sparse("E", rows, 512, min(rows, touched)), dense("W", rows, 256), dense("b", 1, 1024))

    _, auto = choose_strategy(facts, cluster, "auto", "global")

    chosen_s = min(auto.totals_s.values())
    for mode in ("allreduce", "ps", "hybrid"):
        _, pure = choose_strategy(facts, cluster, mode, "global")
        assert chosen_s <= pure.totals_s[mode] * (1 + 1e-6)


def test_every_choice_prices_every_possible_method_and_says_why_in_english() -> None:
    _, costs = choose_strategy(LM, TITANS, "auto", "global")

    by_name = {choice.variable: choice for choice in costs.choices}
    assert set(by_name["embedding"].seconds) == {"all_reduce", "all_gather", "servers"}
    assert set(by_name["lstm"].seconds) == {"all_reduce", "servers"}
    assert set(by_name["scale"].seconds) == {"all_reduce"}
    assert "2,500 of its 800,000 rows" in by_name["embedding"].reason
    assert "against" in by_name["embedding"].reason
    assert "cannot live on a server" in by_name["scale"].reason


def test_one_worker_sends_nothing_and_keeps_sparse_gradients_sparse() -> None:
    host = msgspec.structs.replace(TWO_BY_TWO.hosts[0], devices=TWO_BY_TWO.hosts[0].devices[:1])
    cluster = msgspec.structs.replace(TWO_BY_TWO, hosts=(host,), links=())

    strategy, costs = choose_strategy(LM, cluster, "auto", "global")

    assert {fact.name: methods(strategy)[fact.name] for fact in LM} == {
        fact.name: "all_gather" if fact.sparse else "all_reduce" for fact in LM
    }
    assert "one worker only" in reason(costs, "embedding")


def test_where_no_host_is_a_server_nothing_is_served() -> None:
    hosts = tuple(msgspec.structs.replace(host, server=False) for host in TWO_BY_TWO.hosts)
    cluster = msgspec.structs.replace(TWO_BY_TWO, hosts=hosts)

    strategy, _ = choose_strategy(LM, cluster, "ps", "global")

    assert "servers" not in methods(strategy).values()


def test_pins_keep_their_method_and_shards_and_the_rest_is_chosen() -> None:
    shards = (Shard("host0", 0, 500_000), Shard("host3", 500_000, 800_000))
    pins = {"embedding": Synchronisation("servers", shards), "lstm": Synchronisation("servers")}

    strategy, costs = choose_strategy(LM, TITANS, "auto", "global", pins)

    assert strategy.parameters["embedding"].shards == shards
    assert strategy.parameters["lstm"].method == "servers"
    assert strategy.parameters["lstm"].shards != ()
    assert strategy.parameters["softmax"].method == "servers"
    assert "strategy file says so" in reason(costs, "embedding")
    check_strategy(strategy, LM, TITANS)


def test_tables_larger_than_the_servers_are_refused_under_ps_and_all_reduced_under_auto() -> None:
    hosts = tuple(msgspec.structs.replace(host, memory_bytes=2**28) for host in TITANS.hosts)
    cluster = msgspec.structs.replace(TITANS, hosts=hosts)

    with pytest.raises(NoPlacement, match="'embedding'"):
        choose_strategy(LM, cluster, "ps", "global")
    strategy, _ = choose_strategy(LM, cluster, "auto", "global")

    assert "servers" not in methods(strategy).values()


def test_choosing_twice_gives_identical_bytes() -> None:
    facts = (*LM, *(dense(f"w{i}", 37 * i + 1, 512) for i in range(100)))

    first, first_costs = choose_strategy(facts, TITANS, "ps", "global")
    second, second_costs = choose_strategy(facts, TITANS, "ps", "global")

    assert encode_strategy(first) == encode_strategy(second)
    assert first_costs == second_costs
