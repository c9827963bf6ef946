"""No step is shorter than its bound, nor than that of any part of its configurations."""

import numpy as np
import pytest

from partc.compiler.search.operators.own_space import Kinds, kinds_of_space
from partc.compiler.search.operators.step_bound import StepBound
from partc.passes.search.operators.operator_space import OperatorConfig
from tests.compiler.search.operators.test_walk_tasks import two_layers
from tests.compiler.task_graphs.test_step_tasks import priced


@pytest.mark.parametrize("name", ["mlp", pytest.param("words", marks=pytest.mark.long), "attention"])
def test_no_step_is_shorter_than_its_bounds(name: str) -> None:
    of = priced(name)
    kinds = kinds_of_space(of.tasks, of.space)
    kinds = Kinds(kinds.groups, tuple(configs[::4] for configs in kinds.configs))
    bound, rng = StepBound(of.tasks, kinds), np.random.default_rng(0)
    unknown = np.array([len(configs) for configs in kinds.configs])
    states = np.array([rng.integers(unknown) for _ in range(60)], np.int16)
    steps_s = np.array([of.tasks.begin(kinds.state(tuple(state.tolist()))) for state in states])

    bounds_s = bound(states)
    assert (bounds_s <= steps_s).all()
    assert np.median(bounds_s / steps_s) > 0.4, "it tells something"
    for known in reversed(range(len(unknown))):
        states[:, known] = unknown[known]
        less_s = bound(states)
        assert (less_s <= bounds_s * (1 + 1e-12)).all(), "what is known less is bounded lower"
        bounds_s = less_s


@pytest.mark.parametrize(
    "name", ["two layers", "mlp", pytest.param("words", marks=pytest.mark.long), "attention"]
)
def test_no_step_of_kinds_that_are_all_alike_is_shorter_than_its_bound(name: str) -> None:
    of = two_layers() if name == "two layers" else priced(name)
    every = kinds_of_space(of.tasks, of.space)
    common = [config for config in every.configs[0] if all(config in configs for configs in every.configs)]
    common = [of.start[0], *common[::3]]
    kinds = Kinds(every.groups, (tuple(common),) * len(every.groups))
    states = np.tile(np.arange(len(common), dtype=np.int16)[:, None], len(every.groups))

    bounds_s = StepBound(of.tasks, kinds)(states)

    for config, bound_s in zip(common, bounds_s.tolist(), strict=True):
        step_s = of.tasks.begin((config,) * len(of.groups))
        assert step_s is not None
        assert bound_s <= step_s


def test_everything_on_one_worker_is_bounded_by_its_work() -> None:
    of = priced("mlp")
    alone = OperatorConfig((("batch", 1),), (1,))
    groups = tuple(kind.groups for kind in of.space.kinds)
    step_s = of.tasks.begin((alone,) * len(of.groups))

    bounds_s = StepBound(of.tasks, Kinds(groups, ((alone,),) * len(groups)))(
        np.zeros((1, len(groups)), np.int16)
    )

    assert bounds_s[0] == pytest.approx(step_s, rel=1e-6)
