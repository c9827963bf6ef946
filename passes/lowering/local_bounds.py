"""Spell the lengths, starts and pads of an op for a rank's part of what it cuts.

Slice of [B, 3 H] from H to 2 H, split in two behind 3 blocks    a rank slices [B, 3 H / 2] from H / 2 to H
"""

from collections.abc import Sequence

import numpy as np

from partc.passes.rules.sharding_rule import ShardingRule


def local_bounds(rule: ShardingRule, parts: Sequence[int]) -> dict[int, np.ndarray]:
    """Return input index -> int64[n], for the inputs whose numbers differ on a part.

    `parts`: for every axis of input 0, into how many parts the decision's layout of input 0 divides it
    (`mesh.parts(decision.inputs[0], axis)`). Those inputs are then constants, in the element type that the
    whole's have; all others stay as they are.
    """
    local: dict[int, np.ndarray] = {}
    for index, numbers in rule.bounds.items():
        divisors = [1 if axis is None else parts[axis] for _, axis in numbers]
        if all(divisor == 1 for divisor in divisors):
            continue
        whole = [number for number, _ in numbers]
        assert not any(number % divisor for number, divisor in zip(whole, divisors, strict=True))
        local[index] = np.array(whole, np.int64) // np.array(divisors, np.int64)
    return local
