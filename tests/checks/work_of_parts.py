"""The most that a part of an operator may compute."""

from collections.abc import Mapping
from fractions import Fraction

from partc.passes.rules.sharding_rule import ShardingRule


def most_flops(rule: ShardingRule, parts: Mapping[str, int]) -> Fraction:
    """Return the operations of the largest part. `parts`: dimension, as a strategy spells it -> how many."""
    flops = Fraction(rule.flops)
    for dimension, number in parts.items():
        place, _, outer = dimension.partition("/")
        *of, axis = place.split(":")
        dims = rule.outputs[0] if of == ["out"] else rule.inputs[int(of[1])]
        found = rule.factor_at(dims or (), int(axis), int(outer or 1))
        assert found is not None, f"{dimension} is no factor"
        entries = found[0].sizes[found[1]]
        flops *= Fraction(-(-entries // number), entries)
    return flops
