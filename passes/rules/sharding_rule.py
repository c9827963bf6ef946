"""Sharding rules: an op's dimensions named as factors, as in an einsum.

A tensor's dimension is an ordered product of factors, outermost first; `()` is a dimension of
size 1 that broadcasts. A rule names the factors of inputs and outputs, and says how the output is a
sum of products of the inputs (its terms):

    MatMul  b m k, b k n -> b m n   terms (A B)        sums k
    Gemm    m k, k n, n -> m n      terms (A B) + (C)  sums k
    Add     a b, a b -> a b         terms (A) + (B)

This is FlexFlow's table 1 (flexflow.txt, section 4) for every op: a factor of output and data is a
sample factor, of output and a weight a parameter factor, of inputs only a reduction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

Fill = Literal["zero", "lowest"]
Axis = tuple[str, ...]
Dims = tuple[Axis, ...]
Combine = Literal["sum", "mean", "max", "min"]
LINEAR_IN_FIRST = frozenset({0})


@dataclass(frozen=True, slots=True)
class Halo:
    """Entries of an operand's axis that a part of the op reads around its own, and what pads the ends."""

    axis: int
    before: int
    after: int
    fill: Fill = "zero"


@dataclass(frozen=True, slots=True)
class Reach:
    """Entries of an operand's axis that a part of another factor reads, and what pads the axis' ends.

    `entries_of`: the part's [start, stop) -> the operand's [first, last), perhaps beyond its `size` entries.
    """

    axis: int
    size: int
    entries_of: Callable[[int, int], tuple[int, int]]
    fill: Fill = "zero"


@dataclass(frozen=True)
class ShardingRule:
    """How one node's inputs and outputs share factors.

    inputs        per input its factors, or None where the op needs the whole (axes, shapes, ...)
    outputs       per output its factors
    sizes         factor -> size
    terms         the output is the sum, over terms, of the product of these inputs; empty: not linear
    linear        inputs that may be partial sums (a product's divisor may not)
    combine       factor of inputs only -> how the op reduces it
    whole         factors that must not be split
    shape_inputs  input index -> the output whose shape that input spells
    moves         the op only moves elements, so any kind of partial passes through
    indexed       factors reached by index: not every entry is visited
    divides       inputs of a term that divide it
    picks         the op picks the largest, or the smallest, of its operands, point by point
    windows       factor of `whole` that may be split all the same where parts of operands are widened: input
                  index -> halo; inputs that are not listed are read as they are cut
    reaches       factor whose parts may be of any size -> input index -> what they read of that operand,
                  which lacks the factor
    apart         the rule in which space that windows read and space that they make are factors of their own:
                  its `reaches` tell what this one's `windows` cannot
    bounds        input index -> its numbers, each with the axis of input 0 that it counts entries of, or None

    Bounds are an op's lengths, starts or pads: known, counted from the front and within the axis. They are
    those of the whole. A rank whose input 0 has one n-th of an axis needs an n-th of each number that counts
    its entries (passes/lowering/lower_node.py); where the parts of the axis allow no split, n is 1.
    """

    inputs: tuple[Dims | None, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    terms: tuple[tuple[int, ...], ...] = ()
    linear: frozenset[int] = frozenset()
    combine: Mapping[str, Combine] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    shape_inputs: Mapping[int, int] = field(default_factory=dict)
    moves: bool = False
    indexed: frozenset[str] = frozenset()
    divides: frozenset[int] = frozenset()
    picks: Literal["max", "min"] | None = None
    bounds: Mapping[int, tuple[tuple[int, int | None], ...]] = field(default_factory=dict)
    windows: Mapping[str, Mapping[int, Halo]] = field(default_factory=dict)
    reaches: Mapping[str, Mapping[int, Reach]] = field(default_factory=dict)
    apart: "ShardingRule | None" = None

    @cached_property
    def flops(self) -> int:
        """Operations of one execution: a multiply-add counts 2, a point of another op 1, a move 0."""
        if self.moves:
            return 0
        return max(map(self._points, self.outputs), default=0) * (2 if self.is_contraction else 1)

    @property
    def is_contraction(self) -> bool:
        """Tell whether the op sums products of its operands."""
        return bool(self.combine) and any(len(term) > 1 for term in self.terms)

    def _points(self, output: Dims) -> int:
        factors = {factor for axis in output for factor in axis} | set(self.combine)
        return prod(self.sizes[factor] for factor in factors - self.indexed)

    def may_split(self, factor: str, parts: int, widens: bool = True) -> bool:
        """Tell whether a factor may be cut into equal parts. `widens`: operands may be had with a halo.

        A halo is no more than what one neighbour has.
        """
        if self.sizes[factor] % parts:
            return False
        if factor not in self.windows or not widens:
            return factor not in self.whole
        return all(
            max(halo.before, halo.after) <= self._entries(index, factor) // parts
            for index, halo in self.windows[factor].items()
        )

    def may_split_unevenly(self, factor: str, parts: int, widens: bool = True) -> bool:
        """Tell whether a factor may be cut into parts of which earlier ones have one entry more.

        `widens`: a part of space may be cut that is read as it is cut.
        """
        is_free = factor not in self.whole or (widens and self.windows.get(factor) == {})
        return is_free and self.sizes[factor] >= parts

    def reaching(self, index: int, axis: int) -> str | None:
        """Return the factor whose parts read, or have, parts of an operand's axis of space."""
        for factor, reached in self.reaches.items():
            if index in reached and reached[index].axis == axis:
                return factor
            if index not in reached and ((factor,),) == (self.inputs[index] or ())[axis : axis + 1]:
                return factor
        return None

    def may_reach(self, factor: str, parts: int) -> bool:
        """Tell whether a factor of `reaches` may be cut into parts, equal or not."""
        return factor in self.reaches and self.sizes[factor] >= parts

    def _entries(self, index: int, factor: str) -> int:
        """Return the size of an operand's axis that has a factor."""
        (axis,) = [axis for axis in self.inputs[index] or () if factor in axis]
        return prod(self.sizes[name] for name in axis)

    def factor_at(
        self, dims: Dims, axis: int, outer: int, size: int = 0
    ) -> "tuple[ShardingRule, str] | None":
        """Return the factor of `axis` that has `outer` blocks before it, and the rule that names it.

        Where a factor straddles the place it is taken apart: MatMul's m of size T B, split after T,
        becomes two factors, in a rule of its own. `size`: the factor's, where no larger one will do.
        """
        rule_and_factor = self._factor_behind(dims, axis, outer)
        if rule_and_factor is None or not size or rule_and_factor[0].sizes[rule_and_factor[1]] == size:
            return rule_and_factor
        rule, factor = rule_and_factor
        is_apart = size > 1 and rule.sizes[factor] % size == 0 and factor not in rule.whole
        return (rule._take_apart(factor, size)[0], f"{factor}.outer") if is_apart else None

    def _factor_behind(self, dims: Dims, axis: int, outer: int) -> "tuple[ShardingRule, str] | None":
        before = 1
        for factor in dims[axis]:
            size = self.sizes[factor]
            if before == outer and size > 1:
                return self, factor
            blocks = outer // before
            if outer % before == 0 and 1 < blocks < size and size % blocks == 0:
                return None if factor in self.whole else self._take_apart(factor, blocks)
            before *= size
        return None

    def _take_apart(self, factor: str, blocks: int) -> "tuple[ShardingRule, str]":
        """Replace a factor by two, the outer one of size `blocks`; return the inner one's name."""
        parts = (f"{factor}.outer", f"{factor}.inner")

        def spell(dims: Dims) -> Dims:
            return tuple(
                tuple(name for f in axis for name in (parts if f == factor else (f,))) for axis in dims
            )

        sizes = {**self.sizes, parts[0]: blocks, parts[1]: self.sizes[factor] // blocks}
        del sizes[factor]
        combine = {name: how for f, how in self.combine.items() for name in (parts if f == factor else (f,))}
        inputs = tuple(None if dims is None else spell(dims) for dims in self.inputs)
        outputs = tuple(spell(dims) for dims in self.outputs)
        return replace(self, inputs=inputs, outputs=outputs, sizes=sizes, combine=combine), parts[1]

    def position_of(self, dims: Dims, factor: str) -> tuple[int, int] | None:
        """Return (axis, outer) of a factor, or None if the tensor lacks it."""
        for axis, factors in enumerate(dims):
            if factor in factors:
                ahead = factors[: factors.index(factor)]
                return axis, prod(self.sizes[name] for name in ahead)
        return None
