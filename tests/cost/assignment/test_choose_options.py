"""The ILP against every combination tried, and against the paper's rules."""

from itertools import chain, combinations_with_replacement, product
from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.cost.assignment.choose_options import ALONE_SHARE, DETERMINISTIC_LIMIT, choose_options
from partc.cost.assignment.price_options import Prices, SyncOptions, options_of, possible_methods
from partc.cost.assignment.synchronisation import choose_strategy
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.strategy import SyncFacts, Synchronisation
from tests.sampling import sampled

EXAMPLES = Path(__file__).parents[3] / "examples"
CLUSTERS = {name: read_cluster(EXAMPLES / f"cluster-{name}.json") for name in ("2x2", "8x6-titanxp")}


def drawn_facts(seed: int, count: int) -> tuple[SyncFacts, ...]:
    """Draw parameters of every kind, from bytes to tens of megabytes."""
    rng = np.random.default_rng(seed)
    facts = []
    for index in range(count):
        rows = int(10 ** rng.uniform(1, 5))
        is_sparse = bool(rng.integers(2))
        facts.append(
            SyncFacts(
                f"p{index}",
                rows,
                int(4 * 10 ** rng.uniform(0, 2.5)),
                slot_row_bytes=int(rng.integers(0, 100)),
                sparse=is_sparse,
                touched_rows=rows * rng.uniform(0.001, 1) if is_sparse else rows,
                has_post_aggregation=bool(rng.integers(2)),
                boundary_ops=("cut",) if rng.integers(2) else (),
                boundary_share=0.5,
            )
        )
    return tuple(facts)


def all_options(facts: tuple[SyncFacts, ...], cluster: Cluster) -> dict[str, SyncOptions]:
    return {fact.name: options_of(fact, possible_methods(fact, cluster), ()) for fact in facts}


def objective_s(facts: tuple[SyncFacts, ...], chosen: dict[str, Synchronisation], prices: Prices) -> float:
    """Return what the ILP minimises, computed from the prices themselves."""
    total = np.zeros(len(prices.groups.network.lanes))
    extra_s = 0.0
    for fact in facts:
        price = prices.price(fact, chosen[fact.name])
        extra_s += price.latency_s + price.seconds / ALONE_SHARE
        total += price.loads
    return extra_s + prices.groups.network.busiest_s(total)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CLUSTERS)
def test_no_combination_is_better(name: str, seed: int) -> None:
    cluster, facts = CLUSTERS[name], drawn_facts(seed, 3)
    options, prices = all_options(facts, cluster), Prices(cluster)

    solution = choose_options(facts, options, cluster, prices)

    assert solution is not None
    assert solution.status == "OPTIMAL"
    best_s = min(
        objective_s(facts, dict(zip(options, choice, strict=True)), prices)
        for choice in product(*options.values())
    )
    assert objective_s(facts, solution.chosen, prices) == pytest.approx(best_s, rel=1e-4, abs=1e-9)
    assert solution.bound_s <= solution.objective_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CLUSTERS)
def test_no_other_share_of_alike_ones_is_better(name: str, seed: int) -> None:
    """Layers as recurrent models have them: of eight alike some are best one way, some another."""
    rng = np.random.default_rng(seed)
    kinds = [
        [
            SyncFacts(f"{kind}.{n}", int(rows), 4 * int(row), int(slots), False, int(rows))
            for n in range(count)
        ]
        for kind, (count, rows, row, slots) in enumerate(
            zip((8, 4, 2, 1), *(10 ** rng.uniform(2, 4, (2, 4))), rng.integers(0, 100, 4), strict=True)
        )
    ]
    facts, cluster = tuple(fact for kind in kinds for fact in kind), CLUSTERS[name]
    options, prices = all_options(facts, cluster), Prices(cluster)

    solution = choose_options(facts, options, cluster, prices)

    assert solution is not None
    assert solution.status == "OPTIMAL"
    shares = [combinations_with_replacement(options[kind[0].name], len(kind)) for kind in kinds]
    best_s = min(
        objective_s(facts, dict(zip(options, chain(*share), strict=True)), prices)
        for share in product(*shares)
    )
    assert objective_s(facts, solution.chosen, prices) == pytest.approx(best_s, rel=1e-6)


def test_a_translation_model_s_options_are_proven_best_at_once() -> None:
    """Two tables, four LSTM of 1,024 cells, attention, a projection: the parameters of FlexFlow's NMT."""
    dense = {"weight": (8, 1024, 16384), "bias": (4, 4096, 4), "attention": (1, 1024, 4096)}
    dense |= {"attended": (1, 2048, 4096), "projection": (1, 1024, 128_000)}
    facts = (
        *(SyncFacts(f"table{n}", 32_000, 4096, 0, True, 79.9) for n in range(2)),
        *(
            SyncFacts(f"{name}{n}", rows, row, 0, False, rows)
            for name, (count, rows, row) in dense.items()
            for n in range(count)
        ),
    )
    cluster = CLUSTERS["8x6-titanxp"]

    solution = choose_options(facts, all_options(facts, cluster), cluster, Prices(cluster))

    assert solution is not None
    assert solution.status == "OPTIMAL"
    assert solution.deterministic_time < DETERMINISTIC_LIMIT / 4


@pytest.mark.parametrize("seed", sampled(range(2), range(1)))
def test_many_parameters_are_never_predicted_slower_than_by_the_paper_s_rules(seed: int) -> None:
    facts = drawn_facts(seed, 40)

    _, costs = choose_strategy(facts, CLUSTERS["8x6-titanxp"], "auto", "global")

    assert costs.totals_s["busiest link"] <= costs.totals_s["hybrid"] * 1.01


def test_every_mechanism_is_used_where_it_saves_bytes() -> None:
    table = SyncFacts(
        "E",
        100_000,
        2048,
        0,
        True,
        2_000,
        has_post_aggregation=True,
        boundary_ops=("cut",),
        boundary_share=0.5,
    )

    strategy, _ = choose_strategy([table], CLUSTERS["8x6-titanxp"], "auto", "per-replica")

    how = strategy.parameters["E"]
    assert (how.method, how.local_aggregation, how.post_aggregation) == ("servers", True, "server")
    assert how.on_servers == ("cut",)


def test_a_mechanism_that_is_switched_off_is_not_used() -> None:
    table = SyncFacts(
        "E",
        100_000,
        2048,
        0,
        True,
        2_000,
        has_post_aggregation=True,
        boundary_ops=("cut",),
        boundary_share=0.5,
    )
    off = ("local-aggregation", "post-aggregation", "boundary-ops")

    strategy, costs = choose_strategy([table], CLUSTERS["8x6-titanxp"], "ps", "per-replica", without=off)

    assert strategy.parameters["E"] == Synchronisation(
        "servers", strategy.parameters["E"].shards, local_aggregation=False, post_aggregation="worker"
    )
    _, on = choose_strategy([table], CLUSTERS["8x6-titanxp"], "ps", "per-replica")
    assert costs.totals_s["ps"] > 2 * on.totals_s["ps"]
    assert "one by one" in costs.choices[0].reason


def test_what_the_servers_have_no_room_for_stays_with_the_workers() -> None:
    hosts = tuple(msgspec.structs.replace(host, memory_bytes=2**24) for host in CLUSTERS["2x2"].hosts)
    cluster = msgspec.structs.replace(CLUSTERS["2x2"], hosts=hosts)
    facts = tuple(SyncFacts(f"E{i}", 10_000, 1024, 0, True, 100) for i in range(4))

    solution = choose_options(facts, all_options(facts, cluster), cluster, Prices(cluster))

    assert solution is not None
    served = [fact for fact in facts if solution.chosen[fact.name].method == "servers"]
    assert 0 < len(served) < len(facts)
