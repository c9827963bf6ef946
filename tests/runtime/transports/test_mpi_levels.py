"""Sums by levels: members begin each level's collectives in one order, whichever sums are complete first."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from partc.runtime.plan.program import Start
from partc.runtime.transports import mpi_levels
from partc.runtime.transports.communication import Part
from partc.runtime.transports.mpi_levels import LevelGroup, LevelsHandle
from partc.runtime.transports.sum_levels import level_parts

HOSTS = ((0, 1), (2, 3, 4), (5,))
ROLES = {  # of a member: its levels, and among whom
    0: [("reduce", (0, 1)), ("all_reduce", (0, 2, 5)), ("broadcast", (0, 1))],
    1: [("reduce", (0, 1)), ("broadcast", (0, 1))],
    3: [("reduce", (2, 3, 4)), ("broadcast", (2, 3, 4))],
    5: [("all_reduce", (0, 2, 5))],
}


def part_of_sum(number: int, member: int) -> Part:
    start = Start(number, "all_reduce", "workers", "worker", "worker", ("x",), ("x",), by_levels=True)
    return Part(start, tuple(range(6)), member, True, True, hosts=HOSTS)


@pytest.mark.parametrize("member", ROLES)
def test_a_member_takes_part_in_its_levels(member: int) -> None:
    levels = level_parts(part_of_sum(0, member))

    assert [(level.start.kind, level.members) for level in levels] == ROLES[member]
    assert all(level.members[level.position] == member and not level.hosts for level in levels)


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("member", ROLES)
def test_levels_begin_in_the_order_of_the_sums(
    order: tuple[int, ...], member: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order collectives under way end in."""
    begun: list[tuple[str, int]] = []
    ended: set[tuple[str, int]] = set()

    class Collective:
        def __init__(self, part: Part, group: Any, progress: Callable[[], None]) -> None:
            self.key = part.start.kind, part.start.tag_id
            begun.append(self.key)

        def advance(self) -> bool:
            return self.key in ended

    monkeypatch.setattr(mpi_levels, "DenseHandle", Collective)
    no_group: Any = None
    groups = {level: LevelGroup(no_group) for level in ROLES[member]}
    sums = [LevelsHandle(part_of_sum(number, member), groups, lambda: None) for number in range(3)]

    complete: list[int] = []
    while len(complete) < 3:
        under_way = [key for key in begun if key not in ended]
        ended.add(min(under_way, key=lambda key: order.index(key[1])))
        complete += [n for n, one in enumerate(sums) if n not in complete and one.advance()]

    for kind, _ in ROLES[member]:
        assert [number for of, number in begun if of == kind] == [0, 1, 2]
