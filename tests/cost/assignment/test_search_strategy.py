"""Of the strategies that are priced, which one is taken."""

import pytest

from partc.cost.assignment.candidates import Candidates
from partc.cost.assignment.search_strategy import search_steps
from partc.cost.assignment.synchronisation import AUTO
from partc.cost.strategy import Strategy, SyncFacts
from tests.builders.plans.compiled_steps import cluster_of

DENSE = SyncFacts("dense", 512, 2048, 0, sparse=False, touched_rows=512)
TABLE = SyncFacts("table", 4096, 256, 0, sparse=True, touched_rows=64)


class Price:
    """A mix of methods takes `mixed_s`, every other strategy longer the more of it servers own."""

    evaluations = 12

    def __init__(self, mixed_s: float, doubt: float) -> None:
        self.mixed_s, self.doubt = mixed_s, doubt

    def expect(self, strategy: Strategy | None) -> None:
        """Nothing is priced ahead."""

    def __call__(self, strategy: Strategy) -> float:
        methods = [how.method for how in strategy.parameters.values()]
        is_mixed = methods[0] == "servers" != methods[1]
        return self.mixed_s if is_mixed else 1.0 + 0.1 * methods.count("servers")


@pytest.mark.parametrize(
    ("mixed_s", "doubt", "is_taken"),
    [(0.99, 0.0, True), (0.99, 0.03, False), (0.9, 0.03, True), (0.9, 0.25, False), (1.01, 0.0, False)],
)
def test_a_mix_must_be_quicker_by_more_than_the_price_may_be_off(
    mixed_s: float, doubt: float, is_taken: bool
) -> None:
    candidates = Candidates((DENSE, TABLE), cluster_of("2x2"))

    chosen, tried = search_steps(candidates, candidates.named(AUTO), "per-replica", Price(mixed_s, doubt))

    assert (chosen.chosen["dense"].method == "servers") == is_taken
    assert tried[0].step_s == (mixed_s if is_taken else 1.0)


class ServersPrice:
    """A step takes `servers_s` where servers own all, and a second otherwise."""

    evaluations = 0

    def __init__(self, servers_s: float, doubt: float) -> None:
        self.servers_s, self.doubt = servers_s, doubt

    def expect(self, strategy: Strategy | None) -> None:
        """Nothing is priced ahead."""

    def __call__(self, strategy: Strategy) -> float:
        return self.servers_s if all(h.method == "servers" for h in strategy.parameters.values()) else 1.0


@pytest.mark.parametrize("doubt", [0.0, 0.25])
@pytest.mark.parametrize(
    ("servers_s", "method"), [(0.98, "servers"), (1.0, "all_reduce"), (1.1, "all_reduce")]
)
def test_of_simple_ways_the_quickest_is_taken_and_of_equal_ones_the_simplest(
    servers_s: float, doubt: float, method: str
) -> None:
    candidates = Candidates((DENSE, TABLE), cluster_of("2x2"))

    chosen, _ = search_steps(
        candidates, candidates.named(AUTO), "per-replica", ServersPrice(servers_s, doubt)
    )

    assert chosen.chosen["dense"].method == method
