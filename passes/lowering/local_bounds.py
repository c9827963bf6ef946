"""Spell the lengths, starts and pads of an op for a rank's part of what it cuts.

Slice of [B, 3 H] from H to 2 H, split in two behind 3 blocks    a rank slices [B, 3 H / 2] from H / 2 to H
"""

from collections.abc import Callable

from partc.passes.lowering.lowered_graph import Number
from partc.passes.rules.sharding_rule import ShardingRule


def local_bounds(rule: ShardingRule, local: Callable[[int, int], Number]) -> dict[int, tuple[Number, ...]]:
    """Return input index -> numbers, for the inputs whose numbers differ on a part.

    `local`: of an axis of input 0 and a number of its entries, how many of these a rank has. Those inputs are
    then spelled anew; all others stay as they are.
    """
    bounds: dict[int, tuple[Number, ...]] = {}
    for index, numbers in rule.bounds.items():
        own = tuple(number if axis is None else local(axis, number) for number, axis in numbers)
        if own != tuple(number for number, _ in numbers):
            bounds[index] = own
    return bounds
