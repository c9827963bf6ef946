"""The most that a part of an operator may compute."""

from collections.abc import Mapping
from fractions import Fraction

from partc.passes.rules.sharding_rule import ShardingRule


def most_flops(rule: ShardingRule, parts: Mapping[str, int]) -> Fraction:
    """Return the operations of the largest part. `parts`: dimension, as a strategy spells it -> how many.

    Dimensions of several operands may be one factor: it is cut into parts of parts.
    """
    factors: dict[tuple[str, int], int] = {}
    for dimension, number in parts.items():
        factor = _factor_of(rule, dimension)
        factors[factor] = factors.get(factor, 1) * number
    flops = Fraction(rule.flops)
    for (_, entries), number in factors.items():
        flops *= Fraction(-(-entries // number), entries)
    return flops


def entries_of(rule: ShardingRule, dimension: str) -> int:
    """Return the size of a dimension."""
    return _factor_of(rule, dimension)[1]


def _factor_of(rule: ShardingRule, dimension: str) -> tuple[str, int]:
    place, _, outer = dimension.partition("/")
    *of, axis = place.split(":")
    dims = rule.outputs[0] if of == ["out"] else rule.inputs[int(of[1])]
    found = rule.factor_at(dims or (), int(axis), int(outer or 1))
    assert found is not None, f"{dimension} is no factor"
    refined, factor = found
    return factor, refined.sizes[factor]
