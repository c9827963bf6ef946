"""Walks find what exhaustion finds, and a climb ends where no change of a kind is quicker."""

import time
from collections import Counter
from dataclasses import replace
from itertools import product
from math import exp

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Momentum
from partc.compiler.search.operators import walk_tasks as walk_module
from partc.compiler.search.operators.walk_tasks import (
    COLDEST,
    HOTTEST,
    BestStates,
    StepConfigs,
    TaskWalk,
    climb,
    cooled,
    fewer_replicas,
    highest_accepted,
    kinds_apart,
    near_kinds,
    walk_tasks,
)
from partc.models.catalogue import build_model
from partc.passes.search.operators.operator_space import OperatorConfig
from tests.compiler.task_graphs.test_step_tasks import STEPS, Priced, priced


def two_layers() -> Priced:
    def build() -> object:
        forward = build_model("mlp", sizes=(96, 768, 16), batch=8)
        return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))

    STEPS.setdefault("two layers", build)  # type: ignore[arg-type]
    return Priced("two layers")


def exhausted(of: Priced) -> tuple[float, int]:
    """Return the shortest step of all, and how many there are."""
    each = [list(dict.fromkeys(of.space.configs(kind))) for kind in range(len(of.space.kinds))]
    steps = []
    of.tasks.begin(of.start)
    for state in product(*each):
        step_s = of.tasks.move(dict(enumerate(state)))
        if step_s is not None:
            steps.append(step_s)
    return min(steps), len(steps)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_walk_finds_the_quickest_of_all(seed: int) -> None:
    of = two_layers()
    assert [kind.groups for kind in of.space.kinds] == [(0,), (1,)]
    least_s, states = exhausted(of)
    assert states > 300

    best, rng = BestStates(), np.random.default_rng(seed)
    walk_tasks(of.tasks, of.space, [of.start], best, rng, time.monotonic() + 4.0)
    climbed, step_s, is_done = climb(of.tasks, of.space, best.in_order()[0], time.monotonic() + 30.0)

    assert is_done
    assert step_s == of.tasks.begin(climbed)
    assert abs(step_s / least_s - 1) < 1e-5


def test_no_change_of_a_kind_is_quicker_than_where_a_climb_ends() -> None:
    of = two_layers()
    state, step_s, is_done = climb(of.tasks, of.space, of.start, time.monotonic() + 60.0)
    assert is_done
    assert step_s < of.tasks.begin(of.start)  # type: ignore[operator]

    for kind in range(len(of.space.kinds)):
        for config in of.space.configs(kind):
            changed: StepConfigs = tuple(
                config if number in of.space.kinds[kind].groups else own for number, own in enumerate(state)
            )
            found_s = of.tasks.begin(changed)
            assert found_s is None or found_s >= step_s * (1 - 1e-5)


def test_equal_seeds_walk_alike() -> None:
    of = two_layers()
    ends = []
    for _ in range(2):
        best = BestStates()
        TaskWalk(of.tasks, of.space, best, of.start).advance(np.random.default_rng(5), 200)
        ends.append(best.seconds)

    assert ends[0] == ends[1]
    assert len(ends[0]) > 1


def test_replicas_are_as_few_as_are_quickest() -> None:
    of = two_layers()
    state = fewer_replicas(of.tasks, of.space)

    assert len(set(state)) == 1
    least_s = min(of.tasks.begin((config,) * len(state)) for config in of.space.replicas())  # type: ignore[type-var]
    assert of.tasks.begin(state) == least_s


def test_kinds_that_are_apart_share_no_workers_and_divide_samples_alike() -> None:
    of = two_layers()
    state = kinds_apart(of.tasks, of.space)

    assert state is not None
    assert len({config.split for config in state}) == 1
    used = [worker for config in set(state) for worker in config.workers]
    assert len(used) == len(set(used))
    assert len(set(state)) == len(of.space.kinds) == 2
    apart_s = of.tasks.begin(state)
    others = [[OperatorConfig((("batch", 1),), (worker,)) for worker in pair] for pair in ((0, 1), (1, 2))]
    assert apart_s is not None
    assert all(apart_s <= (of.tasks.begin(other) or 0.0) for other in others)


def test_one_worker_leaves_nothing_to_lie_apart() -> None:
    of = two_layers()

    assert kinds_apart(of.tasks, replace(of.space, workers=1)) is None


def test_kinds_are_near_that_exchange_tensors() -> None:
    of = priced("words")
    kind_of = {group: number for number, kind in enumerate(of.space.kinds) for group in kind.groups}
    near = near_kinds(of.tasks.step, of.space)

    named = {of.groups[kind.groups[0]].reads: number for number, kind in enumerate(of.space.kinds)}
    assert all(number not in others for number, others in enumerate(near))
    for tensor, readers in of.tasks.step.readers.items():
        if tensor in of.tasks.step.maker:
            made_by = kind_of[of.tasks.step.maker[tensor][0]]
            assert all(kind_of[group] in {made_by, *near[made_by]} for group, _ in readers)
    assert len(named) == len(of.space.kinds)
    assert 0 < sum(map(len, near)) < len(near) * (len(near) - 1)


def test_what_is_near_leaves_kinds_together_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind changes, and of others only those on its workers, as a whole and to the same workers."""
    of, rng = priced("words"), np.random.default_rng(4)
    monkeypatch.setattr(walk_module, "NEAR_SHARE", 1.0)
    pairs = [OperatorConfig((("batch", 2),), workers) for workers in ((0, 1), (2, 3))]
    start, half = list(of.start), len(of.space.kinds) // 2
    for number, kind in enumerate(of.space.kinds):
        for group in kind.groups:
            start[group] = pairs[number < half]
    walk = TaskWalk(of.tasks, of.space, BestStates(), tuple(start))

    changed_kinds = Counter[int]()
    for _ in range(300):
        changes = walk._propose(rng, 1.0)
        kinds = [n for n, kind in enumerate(of.space.kinds) if not changes.keys().isdisjoint(kind.groups)]
        changed_kinds[len(kinds)] += 1
        assert len({number < half for number in kinds}) <= 1
        assert set(changes) == {group for number in kinds for group in of.space.kinds[number].groups}
        assert len({config.workers for config in changes.values()}) <= 1
    assert changed_kinds[1] > changed_kinds[2] > 0


def test_the_slowest_walk_goes_on_from_where_another_came_and_not_from_a_start() -> None:
    """However quick a start is: if no proposal was quicker, others come no further from there."""
    of, rng = priced("mlp"), np.random.default_rng(0)
    alone = OperatorConfig((("batch", 1),), (0,))
    quick, slow = of.start, (alone,) * len(of.groups)
    walks = [TaskWalk(of.tasks, of.space, BestStates(), start) for start in (quick, slow, slow)]

    walk_module._follow(walks)
    assert [walk._state for walk in walks] == [list(quick), list(slow), list(slow)], "none has come anywhere"

    walks[1].resume()
    while walks[1].found is None:
        walks[1].advance(rng, 10)
    state, step_s = walks[1].found
    walk_module._follow(walks)
    followers = [walk for walk in (walks[0], walks[2]) if walk._state == list(state)]
    assert len(followers) == 1
    assert (followers[0].step_s, followers[0].found) == (step_s, None)


def test_steps_of_a_recurrence_stay_alike_where_they_are_configured_together() -> None:
    of = priced("words")
    space, rng, until_s = replace(of.space, is_alike=True), np.random.default_rng(2), time.monotonic() + 1e4
    assert any(len(kind.groups) > 1 for kind in space.kinds)

    best = BestStates()
    tried = walk_tasks(of.tasks, space, [of.start], best, rng, until_s, most=200)
    climbed, _, _ = climb(of.tasks, space, best.in_order()[0], until_s, most=40)

    assert tried >= 200
    for state in (*best.seconds, climbed):
        for kind in space.kinds:
            assert len({state[number] for number in kind.groups}) == 1
    assert len({*best.seconds, climbed}) > 1


TEMPERATURE = 0.02
COSTS = {0: 1.0, 1: 1.01, 2: 1.03}


def test_states_are_visited_as_often_as_the_distribution_says() -> None:
    rng = np.random.default_rng(0)
    counted: Counter[int] = Counter()
    state = 0
    for _ in range(30_000):
        proposal = int(rng.choice([other for other in COSTS if other != state]))
        if COSTS[proposal] <= highest_accepted(COSTS[state], min(COSTS.values()), TEMPERATURE, rng):
            state = proposal
        counted[state] += 1

    weights = {state: exp(-cost / TEMPERATURE) for state, cost in COSTS.items()}
    for state, weight in weights.items():
        assert abs(counted[state] / 30_000 - weight / sum(weights.values())) < 0.02


def test_what_is_quicker_is_always_taken() -> None:
    rng = np.random.default_rng(1)

    assert all(highest_accepted(1.0, 0.5, HOTTEST, rng) >= 1.0 for _ in range(1000))


def test_walks_end_cold() -> None:
    assert (cooled(0.0), cooled(1.0)) == (HOTTEST, COLDEST)
    assert cooled(0.25) / cooled(0.5) == cooled(0.5) / cooled(0.75)
