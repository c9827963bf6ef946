"""A linear order of groups with few families open at a time, and the states of one device along it.

Groups join or stay out one after the other. A family is open between its first and its last member; all
that matters of the past is, per open family, whether all, none or some of its members so far joined. A
family's cost is paid in the moment in which it becomes divided. With few families open at a time, states
are few.
"""

from dataclasses import dataclass

import numpy as np

from partc.cost.placement.problems.groups import Groups, Ints

NONE, ALL, SOME = 0, 1, 2
MOST_STATES = 400_000


@dataclass(frozen=True)
class Frontier:
    """Transitions: state s of position i with decision x leads to `next[first[i] + s, x]`, and pays `paid`.

    order int64[groups]; first int64[groups + 1]: rows of a position's states; next int64[rows, 2]: the state
    within the next position; paid int64[rows, 2]: ticks.
    """

    order: Ints
    first: Ints
    next: Ints
    paid: Ints


def build_frontier(groups: Groups) -> Frontier | None:
    """Order the groups and enumerate states; None where they are too many."""
    order = narrow_order(groups)
    place = {group: i for i, group in enumerate(order)}
    ends = [max(place[group] for group in family) for family in groups.families]
    states: dict[tuple[tuple[int, int], ...], int] = {(): 0}
    rows_next: list[tuple[int, int]] = []
    rows_paid: list[tuple[int, int]] = []
    first = [0]
    for i, group in enumerate(order):
        following: dict[tuple[tuple[int, int], ...], int] = {}
        touched = groups.touching[group]
        for state in states:
            statuses = dict(state)
            steps = []
            for decision in (NONE, ALL):
                after, paid = dict(statuses), 0
                for family in touched:
                    status = after.get(family, decision)
                    if status not in (decision, SOME):
                        paid += int(groups.costs[family])
                        status = SOME
                    after[family] = status
                    if ends[family] == i:
                        del after[family]
                key = tuple(sorted(after.items()))
                steps.append((following.setdefault(key, len(following)), paid))
            rows_next.append((steps[0][0], steps[1][0]))
            rows_paid.append((steps[0][1], steps[1][1]))
        states = following
        first.append(len(rows_next))
        if len(rows_next) > MOST_STATES:
            return None
    return Frontier(
        np.array(order, np.int64),
        np.array(first, np.int64),
        np.array(rows_next, np.int64).reshape(-1, 2),
        np.array(rows_paid, np.int64).reshape(-1, 2),
    )


def narrow_order(groups: Groups) -> list[int]:
    """Order groups greedily: next is the one that opens fewest families more than it closes."""
    left = set(range(groups.count))
    ordered_members = [0] * len(groups.families)
    open_families: set[int] = set()
    order: list[int] = []
    while left:
        near = {g for family in open_families for g in groups.families[family] if g in left} or left

        def growth(group: int) -> tuple[int, int, int]:
            opened = sum(ordered_members[f] == 0 for f in groups.touching[group])
            closed = sum(ordered_members[f] == len(groups.families[f]) - 1 for f in groups.touching[group])
            return opened - closed, -closed, groups.members[group][0]

        group = min(near, key=growth)
        left.discard(group)
        order.append(group)
        for family in groups.touching[group]:
            ordered_members[family] += 1
            open_families.add(family)
            if ordered_members[family] == len(groups.families[family]):
                open_families.discard(family)
    return order
