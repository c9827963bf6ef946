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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

Axis = tuple[str, ...]
Dims = tuple[Axis, ...]
Combine = Literal["sum", "mean", "max", "min"]


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

    def factor_at(self, dims: Dims, axis: int, outer: int) -> "tuple[ShardingRule, str] | None":
        """Return the factor of `axis` that has `outer` blocks before it, and the rule that names it.

        Where a factor straddles the place it is taken apart: MatMul's m of size T B, split after T,
        becomes two factors, in a rule of its own.
        """
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
