"""Which segments and messages wait for which."""

from collections.abc import Sequence
from dataclasses import dataclass

from partc.passes.scheduling.schedule import Item


@dataclass(frozen=True, slots=True)
class Dependencies:
    """missing: how many items each waits for     after: the numbers of those that wait for it"""

    missing: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]

    def in_order(self) -> list[int]:
        """Return the numbers of all items, each behind what it waits for."""
        missing = list(self.missing)
        order = [number for number, count in enumerate(missing) if not count]
        for number in order:
            for following in self.after[number]:
                missing[following] -= 1
                if not missing[following]:
                    order.append(following)
        assert len(order) == len(missing), "items wait for each other"
        return order


def dependencies_of(items: Sequence[Item]) -> Dependencies:
    """Return what waits for what: for all that an item reads, and another makes."""
    makers = {tensor.name: number for number, i in enumerate(items) for n in i.nodes for tensor in n.outputs}
    missing: list[int] = []
    after: list[list[int]] = [[] for _ in items]
    for number, item in enumerate(items):
        sources = {makers[t.name] for node in item.nodes for t in node.inputs if t.name in makers} - {number}
        missing.append(len(sources))
        for source in sources:
            after[source].append(number)
    return Dependencies(tuple(missing), tuple(map(tuple, after)))
