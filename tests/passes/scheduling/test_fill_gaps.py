"""What goes first, what goes into gaps, and that nothing is done twice at once."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.passes.scheduling.fill_gaps import fill_gaps
from partc.passes.scheduling.resources import MessageLevel, Resources, Time
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from tests.builders.graphs.random_items import WORKERS, ends_of, item, random_items

LANES = {("a", "b"): (7,), ("b", "a"): (7,), ("a",): (8,)}


def seconds(one: Item) -> float:
    return 1.0 + int(one.nodes[0].name) % 3 if isinstance(one, Chunk) else 0.5 + PER_COMMUNICATION_S


def lanes(message: Communication) -> Iterable[int]:
    return LANES.get(ends_of(message), ())


def one_level(message: Communication) -> list[MessageLevel]:
    return [MessageLevel(ends_of(message), tuple(lanes(message)), seconds(message))]


def do_not_overlap(times: Iterable[Time]) -> bool:
    in_order = sorted((time.begin_s, time.end_s) for time in times)
    return all(one[1] <= other[0] for one, other in pairwise(in_order))


@pytest.mark.parametrize("seed", range(30))
def test_nobody_does_two_things_and_nothing_begins_before_what_it_reads(seed: int) -> None:
    lowered, items = random_items(seed)

    times = fill_gaps(items, Resources(lowered, items, seconds, one_level))

    ends = {one.nodes[0].name: time.end_s for one, time in zip(items, times, strict=True)}
    both = list(zip(items, times, strict=True))
    for one, time in both:
        own_s = PER_COMMUNICATION_S if isinstance(one, Communication) else 0.0
        assert time.begin_s >= max((ends[read.name] for read in one.nodes[0].inputs), default=0.0) + own_s
        assert time.end_s - time.begin_s == pytest.approx(seconds(one) - own_s)
    for kind in (Chunk, Communication):
        of_kind = [(one, time) for one, time in both if isinstance(one, kind)]
        for worker in (0, 1):
            assert do_not_overlap(
                time for one, time in of_kind if any(worker in WORKERS[end] for end in ends_of(one))
            )
    for lane in (7, 8):
        assert do_not_overlap(
            time for one, time in both if isinstance(one, Communication) and lane in lanes(one)
        )


def test_a_message_begins_when_members_of_the_one_before_are_free() -> None:
    items = [item(None, name, ends={"site": "a", "axes": (0,)}) for name in ("1", "2")]
    lowered, _ = random_items(0)

    def begins_s(handed_on_s: float) -> list[float]:
        levels = [MessageLevel(("a",), (), 0.5 + PER_COMMUNICATION_S, handed_on_s)]
        resources = Resources(lowered, items, seconds, lambda _: levels)
        return sorted(time.begin_s for time in fill_gaps(items, resources))

    assert begins_s(0.0) == pytest.approx([PER_COMMUNICATION_S, PER_COMMUNICATION_S + 0.5])
    assert begins_s(0.2) == pytest.approx([PER_COMMUNICATION_S, PER_COMMUNICATION_S + 0.3])


def test_levels_of_a_message_go_one_behind_the_other_and_others_between_them() -> None:
    """Two pushes, from a to b and then within b: a's own sum waits for a first level only."""
    pushes = [item(None, name, ends={"site": "a", "to": "b"}) for name in ("1", "2")]
    items = [*pushes, item(None, "sum", ends={"site": "a", "axes": (0,)})]
    lowered, _ = random_items(0)
    own_s = PER_COMMUNICATION_S
    push = [MessageLevel(("a", "b"), (), 1 + own_s), MessageLevel(("b",), (), 3.0)]

    def levels(message: Communication) -> list[MessageLevel]:
        return push if message in pushes else [MessageLevel(("a",), (), 2 + own_s)]

    first, second, of_a = fill_gaps(items, Resources(lowered, items, seconds, levels))

    assert (first.begin_s, first.end_s) == pytest.approx((own_s, 4 + own_s))
    assert (second.begin_s, second.end_s) == pytest.approx((4 + own_s, 8 + own_s))
    assert (of_a.begin_s, of_a.end_s) == pytest.approx((1 + own_s, 3 + own_s))


def test_servers_that_share_a_process_with_a_worker_wait_for_it() -> None:
    items = [item("a", "1"), item("server", "2"), item("both", "3")]
    lowered, _ = random_items(0)

    def begins_s(servers: tuple[int, ...]) -> list[float]:
        resources = Resources(lowered, items, lambda _: 1.0, lambda _: (), servers)
        return sorted(time.begin_s for time in fill_gaps(items, resources))

    assert begins_s((0,)) == [0, 1, 2]
    assert begins_s((-1,)) == [0, 0, 1]


def test_what_most_comes_after_goes_first_and_other_things_wait_for_a_gap() -> None:
    """Of 3, which leads to a sum alone, and 6, whose result b waits for; a waits for b's answer."""
    items = [
        item("a", "3"),
        item("a", "6"),
        item(None, "sum", "3", ends={"site": "a", "axes": (0,)}),
        item(None, "sent", "6", ends={"site": "a", "to": "b"}),
        item("b", "9", "sent"),
        item(None, "back", "9", ends={"site": "b", "to": "a"}),
        item("a", "12", "back"),
    ]
    lowered, _ = random_items(0)

    def lasts(one: Item) -> float:
        if isinstance(one, Communication):
            return 0.5 + PER_COMMUNICATION_S
        return 3.0 if one.nodes[0].name == "12" else 1.0

    def levels(message: Communication) -> list[MessageLevel]:
        return [MessageLevel(ends_of(message), (), lasts(message))]

    times = fill_gaps(items, Resources(lowered, items, lasts, levels))

    begins = {one.nodes[0].name: time.begin_s for one, time in zip(items, times, strict=True)}
    assert begins["6"] == 0 < begins["3"] == 1 < begins["12"]
    assert begins["12"] == pytest.approx(3, abs=1e-3)
    assert begins["sent"] < begins["sum"]
