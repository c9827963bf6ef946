"""Additive costs are those of the task graph's blocks: on one worker, their sum is its step."""

import numpy as np
import pytest

from partc.compiler.search.operators.own_space import Kinds, kinds_of_space
from partc.compiler.search.operators.search_additively import AdditivePrices, NoTime, price_additively
from partc.passes.search.additive.additive_costs import AdditiveCosts
from partc.passes.search.additive.eliminate_operators import eliminate_operators
from partc.passes.search.operators.operator_space import OperatorConfig
from tests.compiler.task_graphs.test_step_tasks import Priced, priced

ALONE = OperatorConfig((("batch", 1),), (2,))
APART = OperatorConfig((("batch", 1),), (0,))


def costs_of(of: Priced, *configs: OperatorConfig) -> tuple[Kinds, AdditiveCosts]:
    """Return the costs of every kind under a few configurations."""
    kinds = Kinds(tuple(kind.groups for kind in of.space.kinds), (configs,) * len(of.space.kinds))
    costs = price_additively(AdditivePrices(of.tasks, kinds), [str(k) for k in range(len(kinds.groups))])
    assert costs is not None
    return kinds, costs


@pytest.mark.parametrize("name", ["mlp", "words", "attention"])
def test_the_sum_on_one_worker_is_the_step(name: str) -> None:
    of = priced(name)
    _, costs = costs_of(of, ALONE)
    everything = (0,) * len(costs.own_s)

    assert costs.total_s(everything) == pytest.approx(of.tasks.begin((ALONE,) * len(of.groups)), rel=1e-9)
    assert not any(pair.any() for pair in costs.pair_s.values()), "nothing goes from a worker to itself"
    kept = sum(memory[0] for memory in costs.memory_bytes)
    assert not kept[[0, 1, 3]].any()
    analysis = of.first.analysis
    following = {name for name, leader in analysis.followers.items() if leader is not None}
    variables = following | analysis.training.gradients.keys()
    assert kept[2] == sum(map(analysis.facts.nbytes, variables)), "parameters, and what follows them"


@pytest.mark.parametrize("name", ["mlp", "words"])
def test_no_sum_is_below_its_step(name: str) -> None:
    of = priced(name)
    kinds, costs = costs_of(of, ALONE, APART, of.start[0])
    rng = np.random.default_rng(0)

    for _ in range(20):
        choice = tuple(int(n) for n in rng.integers(3, size=len(costs.own_s)))
        step_s = of.tasks.begin(kinds.state(choice))
        assert step_s is not None
        assert costs.total_s(choice) >= step_s * (1 - 1e-9), "nothing waits for what it does not need"


def test_fewer_configurations_hold_the_answer_of_all() -> None:
    of = priced("mlp")
    prices = AdditivePrices(of.tasks, kinds_of_space(of.tasks, of.space))
    fewer = prices.fewer(8, of.start[0])
    names = ["op"] * len(of.space.kinds)

    assert {len(configs) for configs in fewer.kinds.configs} == {8}
    assert fewer.kinds.left_out == sum(len(configs) - 8 for configs in prices.kinds.configs)
    assert all(of.start[0] in configs for configs in fewer.kinds.configs)
    every, some = price_additively(prices, names), price_additively(fewer, names)
    least_s = every.total_s(eliminate_operators(every))
    assert least_s <= some.total_s(eliminate_operators(some)) <= 1.5 * least_s


def test_there_may_be_no_time() -> None:
    of = priced("mlp")
    prices = AdditivePrices(of.tasks, kinds_of_space(of.tasks, of.space), lambda: False)

    with pytest.raises(NoTime):
        prices.fewer(4)
