"""How a node's results follow from the replicas', by its sharding rule.

    MatMul   b m k, k n -> b m n    x beside on b, W alike           -> beside on b
    MatMul   k m, k n -> m n        both beside on k, powers p, q    -> sum of power p + q
    Add      a sum of power 1 (a mean) and W alike                   -> sum of power 1
    Softmax  beside on the axis it works along                       -> coupled

Powers add in a product, are taken off by a divisor, and must agree in a sum of terms. What is not linear
takes only what needs no scaling.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from partc.passes.replicas.batch_relation import ALIKE, BatchRelation, coupled
from partc.passes.rules.sharding_rule import Axis, ShardingRule

# tensor, axis, outer, size -> are the factor's entries equal
IsUniform = Callable[[str, int, int, int], bool]


@dataclass(frozen=True)
class Operands:
    """A node, its rule, and how each operand follows from the replicas'.

    `grown`: the output's axis that is longer for a larger batch, where the node is told. `frozen`: sizes of
    batches that a constant may stand for, where it is constants that tell.
    """

    node: gs.Node
    rule: ShardingRule
    joined: Sequence[BatchRelation]
    zeros: Set[str]
    uniform: IsUniform
    grown: int | None = None
    frozen: Set[int] = frozenset()

    def is_zero(self, index: int) -> bool:
        """Tell whether an operand is zero everywhere."""
        return self.node.inputs[index].name in self.zeros

    def refuse(self, why: str) -> BatchRelation:
        """Return coupled results, with what the node does as the reason."""
        return coupled(f"node {self.node.name!r} ({self.node.op}) {why}")


def join_by_rule(operands: Operands) -> list[BatchRelation]:
    """Return how each output follows from the replicas' outputs."""
    kinds = {joined.kind for joined in operands.joined}
    if "beside" in kinds:
        return _join_beside(operands)
    if kinds & {"max", "min"}:
        result = _join_extremes(operands)
    elif "sum" in kinds:
        result = _join_sums(operands)
    else:
        result = _join_alike(operands)
    return [result for _ in operands.node.outputs]


# ---------------------------------------------------------------- samples side by side


def _join_beside(operands: Operands) -> list[BatchRelation]:
    samples = _factor_of_samples(operands)
    if isinstance(samples, BatchRelation):
        return [samples for _ in operands.node.outputs]
    rule, factor = samples
    fits = _fit_all(operands, rule, factor)
    power = fits if isinstance(fits, BatchRelation) else _power(operands, rule, _powers_beside(operands))
    if isinstance(power, BatchRelation):
        return [power for _ in operands.node.outputs]
    return [_output(operands, rule, factor, index, power) for index in range(len(operands.node.outputs))]


def _factor_of_samples(operands: Operands) -> tuple[ShardingRule, str] | BatchRelation:
    """Return the factor that holds the samples, and the rule that names it."""
    rule, factor = operands.rule, ""
    known = [(i, j) for i, j in enumerate(operands.joined) if j.kind == "beside"]
    for index, joined in sorted(known, key=lambda entry: entry[1].outer is None):
        dims = rule.inputs[index]
        if dims is None:
            return operands.refuse("reads all samples at once")
        if factor:
            position = rule.position_of(dims, factor)
            if position is None or position[0] != joined.axis or joined.outer not in (None, position[1]):
                return operands.refuse("takes samples together with other samples")
            continue
        rule_and_factor = _anywhere(operands, dims[joined.axis]) if joined.outer is None else None
        rule_and_factor = rule_and_factor or rule.factor_at(dims, joined.axis, joined.outer or 1)
        if rule_and_factor is None:
            return operands.refuse("lays samples out in another order")
        rule, factor = rule_and_factor
    if factor in rule.whole:
        return operands.refuse("works along the samples")
    if not _may_grow(operands, rule, factor):
        return operands.refuse("takes samples together")
    return rule, factor


def _may_grow(operands: Operands, rule: ShardingRule, factor: str) -> bool:
    """Tell whether a larger batch makes a factor larger, and not another of the samples' factors."""
    position = rule.position_of(rule.outputs[0], factor)
    if operands.grown is None or (position is not None and position[0] == operands.grown):
        return True
    return any(rule.sizes[factor] % size == 0 for size in operands.frozen)


def _anywhere(operands: Operands, factors: Axis) -> tuple[ShardingRule, str] | None:
    """Return the factor that is known to grow, of those that equal entries lie on."""
    rule, grown = operands.rule, operands.grown
    known = set() if grown is None else set(rule.outputs[0][grown])
    return next(((rule, factor) for factor in factors if factor in known and rule.sizes[factor] > 1), None)


def _fit_all(operands: Operands, rule: ShardingRule, factor: str) -> BatchRelation | None:
    """Refuse operands that are not beside and cannot be."""
    for index, joined in enumerate(operands.joined):
        dims, name = rule.inputs[index], operands.node.inputs[index].name
        if joined.kind == "beside" or not name or operands.is_zero(index):
            continue
        if joined.kind in ("sum", "max", "min"):
            return operands.refuse("reads what all samples make together, beside single ones")
        position = None if dims is None else rule.position_of(dims, factor)
        if position is not None and not operands.uniform(name, *position, rule.sizes[factor]):
            return operands.refuse(f"reads {name!r}, which has an entry for every place in the batch")
    return None


def _powers_beside(operands: Operands) -> list[int]:
    return [joined.power for joined in operands.joined]


def _power(operands: Operands, rule: ShardingRule, powers: Sequence[int]) -> int | BatchRelation:
    """Return the power of the output, if every term has the same."""
    in_terms = {index for term in rule.terms for index in term}
    for index, power in enumerate(powers):
        if index not in in_terms and power:
            return operands.refuse("is not linear in what the size of the batch scales")
    signs = [-1 if index in rule.divides else 1 for index in range(len(powers))]
    operand_powers = {
        sum(signs[index] * powers[index] for index in term)
        for term in rule.terms
        if not any(operands.is_zero(index) for index in term)
    }
    if len(operand_powers) > 1:
        return operands.refuse("adds what grows with the batch to what does not")
    return operand_powers.pop() if operand_powers else 0


def _output(operands: Operands, rule: ShardingRule, factor: str, index: int, power: int) -> BatchRelation:
    position = rule.position_of(rule.outputs[index], factor)
    if position is not None:
        axis, outer = position
        entries = [j for i, j in enumerate(operands.joined) if j.kind == "beside" and not operands.is_zero(i)]
        is_alone = rule.outputs[index][axis] == (factor,)
        is_anywhere = is_alone and all(entry.outer is None for entry in entries)
        return BatchRelation("beside", power, axis, None if is_anywhere else outer)
    how = rule.combine.get(factor)
    if how is None or not _every_term_has(operands, rule, factor):
        return operands.refuse("takes samples together")
    if how in ("sum", "mean"):
        return BatchRelation("sum", power + (how == "mean"))
    if power:
        return operands.refuse("compares what the size of the batch scales")
    return BatchRelation("max" if how == "max" else "min")


def _every_term_has(operands: Operands, rule: ShardingRule, factor: str) -> bool:
    def has(index: int) -> bool:
        dims = rule.inputs[index]
        return dims is not None and rule.position_of(dims, factor) is not None

    return all(any(has(i) or operands.is_zero(i) for i in term) for term in rule.terms)


# ---------------------------------------------------------------- no samples any more


def _join_alike(operands: Operands) -> BatchRelation:
    power = _power(operands, operands.rule, [joined.power for joined in operands.joined])
    return power if isinstance(power, BatchRelation) else ALIKE.with_power(power)


def _join_sums(operands: Operands) -> BatchRelation:
    """A sum over samples, scaled or added to others: a term alike counts as a sum of one power more."""
    rule, joined = operands.rule, operands.joined
    sums = {index for index, operand in enumerate(joined) if operand.kind == "sum"}
    if sums & rule.divides:
        return operands.refuse("divides by what is summed over the samples, as a count of labels is")
    if not rule.terms or not sums <= rule.linear:
        return operands.refuse("is not linear in what is summed over the samples")
    powers = [operand.power for operand in joined]
    for term in rule.terms:
        if any(operands.is_zero(index) for index in term):
            continue
        if len(factors := sums.intersection(term)) > 1:
            return operands.refuse("multiplies two sums over the samples")
        if not factors:
            powers[term[0]] += -1 if term[0] in rule.divides else 1
    power = _power(operands, rule, powers)
    return power if isinstance(power, BatchRelation) else BatchRelation("sum", power)


def _join_extremes(operands: Operands) -> BatchRelation:
    """The largest of the samples' values, moved about or compared with what is alike."""
    rule, kinds = operands.rule, {joined.kind for joined in operands.joined} - {"alike"}
    others = [joined for joined in operands.joined if joined.kind == "alike"]
    passes = rule.moves and len(rule.terms) == 1
    if len(kinds) == 1 and (passes or rule.picks in kinds) and all(joined.power == 0 for joined in others):
        return BatchRelation(kinds.pop())
    return operands.refuse("is no maximum or minimum, and reads one over the samples")
