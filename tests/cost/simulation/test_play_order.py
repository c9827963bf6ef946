"""Ranks of different programs meet in a plan's order, and take links in that of time."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.play_order import order_of_play
from partc.cost.simulation.timeline import simulate
from partc.runtime.plan.program import Plan, Run, Start, Wait, numbered_instructions_of
from tests.builders.plans.compiled_steps import cluster_of
from tests.cost.simulation.test_timeline import (
    SECOND_ON_THE_WIRE,
    TWO_BY_TWO,
    compute,
    events,
    plan_of,
    start,
)

Groups = dict[str, tuple[tuple[int, ...], ...]]


def of_stages(cluster: Cluster, stages: Sequence[int], groups: Groups, *program: Run | Start | Wait) -> Plan:
    """Return a plan whose ranks are each at a stage, by number, and meet in groups of these."""
    plan = plan_of(cluster, *program)
    ranks = tuple(
        msgspec.structs.replace(
            rank,
            sites=(f"stage{stage}",),
            groups={
                name: number
                for name, instances in groups.items()
                for number, members in enumerate(instances)
                if rank.rank in members
            },
        )
        for rank, stage in zip(plan.ranks, stages, strict=True)
    )
    return msgspec.structs.replace(plan, ranks=ranks, groups=groups)


def at(stage: int, seconds: float) -> Run:
    return msgspec.structs.replace(compute(seconds), site=f"stage{stage}")


def test_what_another_stage_sends_later_holds_up_nothing() -> None:
    """Over the same links, and listed first: it begins when they are free again."""
    groups: Groups = {"first": ((0, 2),), "second": ((1, 3),)}
    program = (
        at(0, 1.5),
        start(0, SECOND_ON_THE_WIRE, group="first"),
        start(1, SECOND_ON_THE_WIRE, group="second"),
        Wait(0),
        Wait(1),
    )

    timeline = simulate(of_stages(TWO_BY_TWO, (0, 1, 0, 1), groups, *program), TWO_BY_TWO)

    (late,) = events(timeline, 0, "communication")
    (early,) = events(timeline, 1, "communication")
    assert early.start_s == pytest.approx(0.0, abs=1e-3)
    assert late.start_s == pytest.approx(1.5, rel=1e-3)


def test_pairs_that_share_links_in_a_chain_take_as_long_as_the_busiest_link() -> None:
    """0 > 3, 1 > 4 and 2 > 5 leave h0, h0 and h1 for h1, h2 and h2: two over a link, not three in a row."""
    cluster = cluster_of("3x2")
    message = start(0, SECOND_ON_THE_WIRE, "broadcast", "pairs")

    def of_pairs(*pairs: tuple[int, int]) -> Plan:
        return of_stages(cluster, (0, 0, 0, 1, 1, 1), {"pairs": pairs}, message, Wait(0))

    alone, chain = of_pairs((0, 3)), of_pairs((0, 3), (1, 4), (2, 5))

    alone_s, chain_s = (simulate(plan, cluster).step_s for plan in (alone, chain))

    assert chain_s == pytest.approx(2 * alone_s, rel=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_keeps_its_order_and_the_first_to_begin_comes_first(seed: int) -> None:
    drawn = random.Random(seed)
    stages = [drawn.randrange(4) for _ in range(6)]
    cluster = cluster_of("3x2")
    groups: Groups = {}
    program: list[Run | Start | Wait] = []
    for number in range(12):
        members = tuple(sorted(drawn.sample(range(6), drawn.randint(2, 4))))
        groups[f"group{number}"] = (members,)
        program += [at(drawn.randrange(4), drawn.random()), start(number, 8, group=f"group{number}")]
        program += [Wait(number)] if drawn.random() < 0.5 else []
    plan = of_stages(cluster, stages, groups, *program)
    begins = [drawn.random() for _ in program]
    asked: list[int] = []

    def begins_s(number: int) -> float:
        asked.append(number)
        return begins[number]

    played = list(order_of_play(plan, begins_s))

    place = {number: position for position, number in enumerate(played)}
    programs = [[number for number, _ in numbered_instructions_of(plan, rank)] for rank in plan.ranks]
    assert sorted(played) == sorted({number for own in programs for number in own}) == sorted(asked)
    for own in programs:
        assert [place[number] for number in own] == sorted(place[number] for number in own)
    done: set[int] = set()
    for number in played:
        ready = {
            other
            for other in set(played) - done
            if all(set(own[: own.index(other)]) <= done for own in programs if other in own)
        }
        assert number == min(ready, key=lambda other: (begins[other], other))
        done.add(number)
