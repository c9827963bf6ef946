"""Branch and bound finds what trying everything finds: the state, not only its price."""

from collections.abc import Sequence
from itertools import permutations, product

import msgspec
import numpy as np
import pytest

from partc.compiler.differentiation.updates.optimizers import Momentum
from partc.compiler.search.operators.exhaust import (
    AlikeStates,
    Exhaustion,
    check_states,
    exhaust,
    symmetries_of,
)
from partc.compiler.search.operators.own_space import Kinds, kinds_of_space
from partc.compiler.search.operators.walk_tasks import StepConfigs, random_state
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.cost.cluster.cluster import Cluster, Link
from partc.passes.search.operators.operator_space import OperatorConfig
from partc.runtime.errors import BadUsage
from tests.builders.graphs.siamese_step import siamese_step
from tests.builders.plans.compiled_steps import cluster_of
from tests.compiler.search.operators.test_walk_tasks import two_layers
from tests.compiler.task_graphs.test_step_tasks import STEPS, Priced, priced


def all_steps(tasks: StepTasks, kinds: Kinds, start: StepConfigs) -> dict[StepConfigs, float]:
    """Return every state that can be, and the seconds of its step."""
    tasks.begin(start)
    steps = {}
    for choice in product(*(range(len(configs)) for configs in kinds.configs)):
        state = kinds.state(choice)
        if (step_s := tasks.move(dict(enumerate(state)))) is not None:
            steps[state] = step_s
    return steps


def siamese() -> Priced:
    STEPS.setdefault("siamese", lambda: siamese_step(Momentum(0.1)))
    return Priced("siamese")


def some(of: Priced, every: int) -> Kinds:
    """Return the kinds with some of their configurations."""
    kinds = kinds_of_space(of.tasks, of.space)
    return Kinds(
        kinds.groups, tuple(configs[number % every :: every] for number, configs in enumerate(kinds.configs))
    )


@pytest.mark.parametrize(
    ("name", "every"),
    [("two layers", 1), ("siamese", 1), ("mlp", 4), pytest.param("words", 5, marks=pytest.mark.long)],
)
def test_it_finds_the_quickest_of_all(name: str, every: int) -> None:
    of = {"two layers": two_layers, "siamese": siamese}.get(name, lambda: priced(name))()
    kinds = some(of, every)
    steps = all_steps(of.tasks, kinds, of.start)
    least_s = min(steps.values())
    assert len(steps) > 140
    begin = min((state for state in steps if steps[state] > least_s), key=steps.__getitem__)
    shown: list[float] = []

    found = exhaust(of.tasks, kinds, begin, show=lambda each: shown.append(each.step_s))

    assert found.is_proven
    assert found.step_s == least_s == of.tasks.begin(found.state)
    images = {moved(found.state, places) for places in symmetries_of(of.tasks.prices)}
    quickest = {state for state, step_s in steps.items() if step_s == least_s}
    assert found.state in quickest
    assert images & steps.keys() <= quickest, "symmetric workers make states that are as quick"
    assert found.priced < len(steps) / 2, "most are left out"
    assert shown == sorted(shown, reverse=True)
    assert shown[-1] == least_s


def test_memory_leaves_states_out() -> None:
    of = two_layers()
    kinds = some(of, 1)
    limits = of.tasks.prices.limits_bytes
    try:
        of.tasks.prices.limits_bytes = np.full(len(limits), 0.5e6)  # of 1 MB of variables and momenta
        steps = all_steps(of.tasks, kinds, of.start)
        begin = next(iter(steps))
        found = exhaust(of.tasks, kinds, begin)
    finally:
        of.tasks.prices.limits_bytes = limits
    assert 0 < len(steps) < 441
    assert found.step_s == min(steps.values())
    assert found.state in steps


def test_it_may_be_ended() -> None:
    of = two_layers()
    turns = iter([True])

    found = exhaust(of.tasks, some(of, 1), of.start, go_on=lambda: next(turns, False))

    assert isinstance(found, Exhaustion)
    assert not found.is_proven
    assert found.step_s <= of.tasks.begin(of.start)  # type: ignore[operator]


def test_too_many_states_are_refused_before_it_begins() -> None:
    kinds = Kinds(((0,), (1,)), ((OperatorConfig((), (0,)),) * 10,) * 2)

    check_states(kinds, 100)
    with pytest.raises(BadUsage, match=r"1\.0e\+02 states of 2 kinds"):
        check_states(kinds, 99)


@pytest.mark.parametrize("seed", range(3))
def test_of_alike_states_one_is_looked_at(seed: int) -> None:
    of = two_layers()
    kinds = some(of, 1)
    rng = np.random.default_rng(seed)
    thinned = tuple(tuple(c for c in configs if rng.random() < 0.8) for configs in kinds.configs)
    kinds = Kinds(kinds.groups, thinned)  # not every image is in the space then
    symmetries = symmetries_of(of.tasks.prices)
    states = np.array(list(product(*(range(len(configs)) for configs in thinned))), np.int16)

    first = AlikeStates(kinds, symmetries).is_first(states, 2)

    assert not (first & ~AlikeStates(kinds, symmetries).is_first(states, 1)).any()
    orbits: dict[frozenset[StepConfigs], list[int]] = {}
    every = [kinds.state(tuple(state)) for state in states.tolist()]
    for number, state in enumerate(every):
        orbit = {state, *(moved(state, places) for places in symmetries)}
        orbits.setdefault(frozenset(orbit & set(every)), []).append(number)
    assert 1 < len(orbits) < len(states)
    for members in orbits.values():
        assert [number for number in members if first[number]] == members[:1]


def moved(state: StepConfigs, places: Sequence[int]) -> StepConfigs:
    return tuple(config.moved(places) for config in state)


def uneven() -> Cluster:
    """Return two hosts, the second of which has a slower link."""
    cluster = cluster_of("2x2")
    slower = msgspec.structs.replace(cluster.links[1], bytes_per_s=cluster.links[1].bytes_per_s / 2)
    return msgspec.structs.replace(cluster, links=(cluster.links[0], slower))


def ring() -> Cluster:
    """Return four hosts, each linked to the next: a route to the one opposite goes one way about."""
    cluster = cluster_of("4x1")
    names = [host.name for host in cluster.hosts]
    ends = zip(names, (*names[1:], names[0]), strict=True)
    links = tuple(Link(pair, bytes_per_s=125e6, latency_s=25e-6) for pair in ends)
    return msgspec.structs.replace(cluster, links=links, switches=())


@pytest.mark.parametrize(
    ("cluster", "count"),
    [
        (cluster_of("1x4"), 23),
        (cluster_of("4x1"), 23),
        (cluster_of("2x2"), 7),
        (uneven(), 3),
        (ring(), 1),
        (cluster_of("1x1"), 0),
        (cluster_of("2x4"), 2 * 6 + 1),  # exchanges of two workers of a host, and of the hosts
    ],
    ids=["one host", "four hosts", "two hosts", "uneven hosts", "ring", "one worker", "eight workers"],
)
def test_what_may_change_places(cluster: Cluster, count: int) -> None:
    found = symmetries_of(TaskPrices(cluster))

    assert len(found) == len(set(found)) == count


def test_steps_take_as_long_with_workers_in_other_places_and_only_then() -> None:
    of, rng = priced("words"), np.random.default_rng(0)
    found = symmetries_of(of.tasks.prices)
    others = 0
    for _ in range(4):
        state = random_state(of.tasks, of.space, of.start, rng, moves=6)
        step_s = of.tasks.begin(state)
        for places in permutations(range(4)):
            moved_s = of.tasks.begin(tuple(config.moved(places) for config in state))
            if places in found:
                assert moved_s == pytest.approx(step_s, rel=1e-12)
            others += moved_s != pytest.approx(step_s, rel=1e-6)
    assert others > 20
