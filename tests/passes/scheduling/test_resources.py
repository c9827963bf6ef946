"""The seconds of an order: against every worker, wire and lane by itself."""

from collections import defaultdict

import numpy as np
import pytest

from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.passes.scheduling.resources import MessageLevel, Resources, step_s
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from tests.builders.graphs.random_items import WORKERS, ends_of, random_items


def played_s(items: list[Item], seconds: dict[str, float], levels: dict[str, list[MessageLevel]]) -> float:
    """Return how long the items take, worker by worker."""
    free: dict[object, float] = defaultdict(float)
    made: dict[str, float] = defaultdict(float)
    for one in items:
        node = one.nodes[0]
        cores = [("core", worker) for end in ends_of(one) for worker in WORKERS[end]]
        if not isinstance(one, Chunk):
            for core in set(cores):
                free[core] += PER_COMMUNICATION_S
        at = max(*(free[each] for each in cores), *(made[read.name] for read in node.inputs), 0.0)
        if isinstance(one, Chunk):
            at += seconds[node.name]
            free.update(dict.fromkeys(cores, at))
        own_s = PER_COMMUNICATION_S
        for level in levels.get(node.name, []):
            taken: list[object] = [("wire", worker) for site in level.sites for worker in WORKERS[site]]
            taken += [("lane", lane) for lane in level.lanes]
            at = max(at, *(free[each] for each in taken)) + level.seconds - own_s
            free.update(dict.fromkeys(taken, at - level.handed_on_s))
            own_s = 0.0
        made[node.name] = at
    return max(*free.values(), *made.values())


@pytest.mark.parametrize("seed", range(30))
def test_resources_that_count_as_one_change_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lowered, items = random_items(seed)
    seconds = {one.nodes[0].name: float(rng.random()) for one in items}
    taken = {}  # by the levels of messages between the same meshes
    for ends in sorted({ends_of(one) for one in items}):
        both = [ends, (ends[0],)][: rng.integers(1, 3)]
        taken[ends] = [
            (sites, tuple(rng.choice(6, rng.integers(4), replace=False).tolist())) for sites in both
        ]

    def level(sites: tuple[str, ...], lanes: tuple[int, ...]) -> MessageLevel:
        lasts = float(rng.random())
        return MessageLevel(sites, lanes, PER_COMMUNICATION_S + lasts, lasts * float(rng.random() < 0.5) / 2)

    levels = {
        one.nodes[0].name: [level(*each) for each in taken[ends_of(one)]]
        for one in items
        if isinstance(one, Communication)
    }
    resources = Resources(
        lowered,
        items,
        lambda one: seconds[one.nodes[0].name],
        lambda message: levels[message.nodes[0].name],
    )

    assert step_s(items, resources) == pytest.approx(played_s(items, seconds, levels))
