"""The seconds of an order: against every worker, wire and lane by itself."""

from collections import defaultdict

import numpy as np
import pytest

from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.passes.scheduling.resources import Resources, step_s
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from tests.builders.graphs.random_items import WORKERS, ends_of, random_items


def played_s(
    items: list[Item],
    seconds: dict[str, float],
    lanes: dict[tuple[str, ...], list[int]],
    handed_on_s: dict[str, float],
) -> float:
    """Return how long the items take, worker by worker."""
    free: dict[object, float] = defaultdict(float)
    made: dict[str, float] = defaultdict(float)
    for one in items:
        node = one.nodes[0]
        workers = {worker for end in ends_of(one) for worker in WORKERS[end]}
        taken: list[object] = [("core", worker) for worker in workers]
        if not isinstance(one, Chunk):
            for core in taken:
                free[core] += PER_COMMUNICATION_S
        begin = max(*(free[each] for each in taken), *(made[read.name] for read in node.inputs), 0.0)
        if not isinstance(one, Chunk):
            taken = [("wire", worker) for worker in workers] + [
                ("lane", lane) for lane in lanes[ends_of(one)]
            ]
            begin = max(begin, *(free[each] for each in taken))
        made[node.name] = begin + seconds[node.name]
        for each in taken:
            free[each] = made[node.name] - handed_on_s.get(node.name, 0.0)
    return max(*free.values(), *made.values())


@pytest.mark.parametrize("seed", range(30))
def test_resources_that_count_as_one_change_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lowered, items = random_items(seed)
    seconds = {one.nodes[0].name: float(rng.random()) for one in items}
    ends = {ends_of(one) for one in items}
    lanes = {each: rng.choice(6, rng.integers(4), replace=False).tolist() for each in sorted(ends)}

    def lasts(one: Item) -> float:
        own_s = 0.0 if isinstance(one, Chunk) else PER_COMMUNICATION_S
        return seconds[one.nodes[0].name] + own_s

    handed_on_s = {
        one.nodes[0].name: float(rng.random()) * seconds[one.nodes[0].name]
        for one in items
        if isinstance(one, Communication) and rng.random() < 0.5
    }
    resources = Resources(
        lowered,
        items,
        lasts,
        lambda message: lanes[ends_of(message)],
        lambda message: handed_on_s.get(message.nodes[0].name, 0.0),
    )

    assert step_s(items, resources) == pytest.approx(played_s(items, seconds, lanes, handed_on_s))
