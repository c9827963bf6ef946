"""Decide how one node runs, from the layouts of its operands and what is known of it: its rule, above all.

Of a node nothing is seen here but its facts, so that nodes that are alike are decided once.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decisions import AxisDecision, whole_axis
from partc.passes.layouts.layouts import (
    Layout,
    Overlapping,
    Partial,
    Placement,
    Replicate,
    Split,
    Widened,
)
from partc.passes.rules.sharding_rule import Reach, ShardingRule
from partc.passes.rules.sharding_rules import NodeFacts
from partc.runtime.plan.boxes import part_range

# Of what ONNX Runtime selects and adds: rows of a table come from one rank each, zeros from the others.
SUMMED = frozenset(map(np.dtype, (np.float16, np.float32, np.float64, np.int32, np.int64)))


def decide_by_rule(
    node: NodeFacts,
    placements: Sequence[Placement],
    ranks: int,
    stored: Sequence[bool] = (),
    widens: bool = False,
    home: Split | None = None,
) -> AxisDecision:
    """Split the node along an axis if a split operand allows it, else keep partials, else run whole.

    `stored`: operands that come from variables alone, which give way to those that come from data.
    `widens`: parts of operands may be had with entries of their neighbours', as windows read them. `home`:
    how the first output is kept, which sends it on if it is made in other parts.
    """
    if node.rule is None or all(isinstance(placement, Replicate) for placement in placements):
        return whole_axis(node)
    return _decide_by_rule(node, tuple(placements), ranks, tuple(stored), widens, home)


@lru_cache(maxsize=1 << 16)
def _decide_by_rule(
    node: NodeFacts,
    placements: tuple[Placement, ...],
    ranks: int,
    stored: tuple[bool, ...],
    widens: bool,
    home: Split | None,
) -> AxisDecision:
    gives_way = stored or [False] * len(placements)
    for refined, factor in _split_factors(node, placements, ranks, gives_way, widens, home):
        decision = split_on(node, refined, factor, ranks)
        if decision and not _cuts_wholes_to_join(node, decision, placements, gives_way, home):
            return decision
    return keep_partial(node, placements) or whole_axis(node)


def _cuts_wholes_to_join(
    node: NodeFacts,
    decision: AxisDecision,
    placements: Sequence[Placement],
    gives_way: Sequence[bool],
    home: Split | None,
) -> bool:
    """Tell whether each rank would cut its part of as many bytes that all have as of those that are split.

    So a Concat of equal parts: its result, divided within each part, is most often gathered next, with what
    all ranks had. Where it is kept divided so, `home`, that is worth it.
    """
    rule, made = node.rule, decision.outputs[0]
    joins = rule is not None and rule.moves and len(rule.terms) > 1
    if not joins or not isinstance(made, Split) or made.outer == 1 or made == home:
        return False
    split_bytes = whole_bytes = 0
    for tensor, placement, is_stored in zip(node.inputs, placements, gives_way, strict=True):
        if isinstance(placement, Split):
            split_bytes += 0 if is_stored else tensor.nbytes
        else:
            whole_bytes += 0 if is_stored else tensor.nbytes
    return whole_bytes >= split_bytes


def gather_stored(
    node: NodeFacts, placements: Sequence[Placement], stored: Sequence[bool]
) -> AxisDecision | None:
    """Have what is stored in parts whole, beside data of which every rank has as much, or its terms.

    So a normalisation's scale beside its statistics: it can be gathered ahead with others, where a result in
    parts would be gathered, or its terms scattered, while samples wait. None: other data, or less of it.
    """
    data = list(zip(placements, node.inputs, strict=True))
    kept = [each for each, yields in zip(data, stored, strict=True) if not yields]
    parts = [each for each, yields in zip(data, stored, strict=True) if yields and isinstance(each[0], Split)]
    if not parts or not all(isinstance(placement, Replicate | Partial) for placement, _ in kept):
        return None
    if max((tensor.nbytes for _, tensor in kept), default=0) < max(tensor.nbytes for _, tensor in parts):
        return None
    if any(isinstance(placement, Partial) for placement, _ in kept):
        return keep_partial(node, [p if isinstance(p, Partial) else Replicate() for p in placements])
    return whole_axis(node)


@lru_cache(maxsize=1 << 16)
def decide_by_wish(node: NodeFacts, wish: Wish, ranks: int, widens: bool = True) -> AxisDecision | None:
    """Split the dimension that is asked for along an axis; None where that cannot be done.

    Of a dimension of several factors all, or the first, of the size that the wish says, if it says one.
    `widens`: parts of operands may be had with entries of their neighbours'.
    """
    if wish.split is None:
        return whole_axis(node)
    rule = node.rule
    if rule is None:
        return None
    rule_and_factor = _asked_factor(rule, wish.operand, wish.split)
    if rule_and_factor is None or not (
        rule_and_factor[0].may_split(rule_and_factor[1], ranks, widens)
        or rule_and_factor[0].may_split_unevenly(rule_and_factor[1], ranks, widens)
    ):
        apart = rule.apart if widens else None
        rule_and_factor = None if apart is None else _asked_factor(apart, wish.operand, wish.split)
        if rule_and_factor is None or not rule_and_factor[0].may_reach(rule_and_factor[1], ranks):
            return None
    return split_on(node, *rule_and_factor, ranks)


def _asked_factor(rule: ShardingRule, operand: int | None, split: Split) -> tuple[ShardingRule, str] | None:
    dims = rule.outputs[0] if operand is None else rule.inputs[operand]
    return None if dims is None else rule.factor_at(dims, split.axis, split.outer, split.uneven)


def decide_on_table(
    node: NodeFacts, layouts: Sequence[Layout], axis: int, result_rows: Split | None
) -> AxisDecision | None:
    """Read rows of a table, or add to them, where they are along an axis, by ids that are whole there.

    What ranks read is summed, so it has to be numbers: masks are not. `result_rows`: how what a
    ScatterND makes is kept by rows, if it is.
    """
    reads = node.op == "Gather" and node.attribute("axis", 0) == 0
    adds = node.op == "ScatterND" and node.attribute("reduction") == "add"
    in_rows = [number for number, split in layouts[0].splits() if split.axis == 0] if reads or adds else []
    rows = layouts[0].along(axis)
    is_cut = in_rows == [axis] and isinstance(rows, Split) and rows.outer == 1
    if any(isinstance(layout.along(axis), Split) for layout in layouts[1:]):
        return None
    if reads and is_cut and node.outputs[0].dtype in SUMMED:
        return AxisDecision((rows, Replicate()), (Partial("sum"),), cuts_table=True)
    table_placement = rows if is_cut else None if in_rows else result_rows
    if adds and table_placement is not None:
        return AxisDecision((table_placement, Replicate(), Replicate()), (table_placement,), cuts_table=True)
    return None


def decide_by_owners(
    node: NodeFacts, layouts: Sequence[Layout], axis: int, ranks: int
) -> AxisDecision | None:
    """Read rows of a table that ranks along an axis share where they are, by the ids of all of them.

    Of the sum of what they read, each takes the part that its own ids ask for. None where other axes divide
    the table or the ids.
    """
    table, ids = layouts
    own = ids.along(axis)
    along_others = [each for one in layouts for each in one.with_along(axis, Replicate()).placements]
    if not all(isinstance(placement, Replicate) for placement in along_others):
        return None
    looked_up = decide_on_table(node, [table, ids.with_along(axis, Replicate())], axis, None)
    if looked_up is None or isinstance(own, Replicate):
        return looked_up
    if not isinstance(own, Split) or not node.outputs[0].has_fixed_sizes:
        return None
    by_ids = decide_by_rule(node, [Replicate(), own], ranks)
    if not isinstance(by_ids.outputs[0], Split):
        return None
    return replace(looked_up, outputs=by_ids.outputs, is_summed=True)


def _split_factors(
    node: NodeFacts,
    placements: Sequence[Placement],
    ranks: int,
    gives_way: Sequence[bool],
    widens: bool,
    home: Split | None,
) -> list[tuple[ShardingRule, str]]:
    """Return the factors that operands are split on, each with the rule that names it: first what leaves
    most bytes, of operands and of an output that is kept, where they are."""
    rule = node.rule
    assert rule is not None, "the node has one"
    weights: dict[str, int] = {}
    rules: dict[str, ShardingRule] = {}
    firm: set[str] = set()
    operands = zip(node.inputs, rule.inputs, placements, gives_way, strict=True)
    for index, (tensor, dims, placement, yields) in enumerate(operands):
        if not isinstance(placement, Split) or dims is None:
            continue
        rule_and_factor = rule.factor_at(dims, placement.axis, placement.outer, placement.uneven)
        if rule_and_factor is None or not follows(*rule_and_factor, placement, ranks, widens):
            rule_and_factor = _reaching(rule, index, placement, ranks) if widens else None
        if rule_and_factor is not None:
            rules[rule_and_factor[1]] = rule_and_factor[0]
            weights[rule_and_factor[1]] = weights.get(rule_and_factor[1], 0) + tensor.nbytes
            firm.update(() if yields else (rule_and_factor[1],))
    made_bytes = node.outputs[0].nbytes if len(weights) > 1 else 0
    for factor in weights:
        position = rules[factor].position_of(rules[factor].outputs[0], factor)
        if position is None:  # a sum
            weights[factor] -= made_bytes
        elif home is not None and position == (home.axis, home.outer):
            weights[factor] += made_bytes
    order = sorted(weights, key=lambda factor: (factor not in firm, -weights[factor]))
    return [(rules[factor], factor) for factor in order]


def _reaching(rule: ShardingRule, index: int, split: Split, ranks: int) -> tuple[ShardingRule, str] | None:
    """Return the factor whose parts read neighbouring parts of an operand that is split in space."""
    factor = rule.apart.reaching(index, split.axis) if rule.apart is not None and split.outer == 1 else None
    if rule.apart is None or factor is None or not rule.apart.may_reach(factor, ranks):
        return None
    return rule.apart, factor


def follows(rule: ShardingRule, factor: str, split: Split, ranks: int, widens: bool = True) -> bool:
    """Tell whether a factor may be split as an operand that has it is."""
    if split.uneven:
        return rule.sizes[factor] == split.uneven and rule.may_split_unevenly(factor, ranks, widens)
    return rule.may_split(factor, ranks, widens)


def split_on(
    node: NodeFacts, rule: ShardingRule, factor: str, ranks: int, rows_of: str = ""
) -> AxisDecision | None:
    """Return the decision that splits `factor`, or None where an output could not be described.

    `rule`: the node's, or one that takes its factors apart. `rows_of`: the parameter whose rows a factor is,
    if servers divide it.
    """
    uneven = rule.sizes[factor] if rule.sizes[factor] % ranks else 0
    outputs: list[Placement] = []
    for dims in rule.outputs:
        position = rule.position_of(dims, factor)
        if position is not None:
            outputs.append(Split(*position, uneven, rows_of))
        elif factor in rule.combine and _every_term_has(node, rule, factor):
            combine = rule.combine[factor]
            outputs.append(Partial("sum" if combine == "mean" else combine))
        else:
            return None
    inputs = tuple(
        _placement_of(rule, index, factor, ranks, uneven, rows_of) for index in range(len(rule.inputs))
    )
    is_mean, entries = rule.combine.get(factor) == "mean", 0 if factor in rule.reaches else rule.sizes[factor]
    return AxisDecision(inputs, tuple(outputs), factor, is_mean, entries=entries)


def _placement_of(
    rule: ShardingRule, index: int, factor: str, ranks: int, uneven: int, rows_of: str
) -> Placement:
    reach = rule.reaches.get(factor, {}).get(index)
    if reach is not None:
        return _reached(reach, rule.sizes[factor], ranks)
    dims = rule.inputs[index]
    position = None if dims is None else rule.position_of(dims, factor)
    if position is None:
        return Replicate()
    halo = rule.windows.get(factor, {}).get(index)
    if halo is None or not (halo.before or halo.after):
        return Split(*position, uneven, rows_of)
    return Widened(position[0], halo.before, halo.after, halo.fill)


def _reached(reach: Reach, entries: int, ranks: int) -> Placement:
    """Return what every rank reads of an operand for its part of a factor."""
    parts = [part_range(entries, ranks, rank) for rank in range(ranks)]
    read = Overlapping(reach.axis, reach.size, tuple(reach.entries_of(*part) for part in parts), reach.fill)
    own = tuple(part_range(reach.size, ranks, rank) for rank in range(ranks))
    return read.own if read.ranges == own else read


def _every_term_has(node: NodeFacts, rule: ShardingRule, factor: str) -> bool:
    """Tell whether every term is summed over the factor, so that no rank adds a whole one."""

    def has(index: int) -> bool:
        dims = rule.inputs[index]
        return dims is not None and rule.position_of(dims, factor) is not None

    return all(any(has(index) or index in node.zeros for index in term) for term in rule.terms)


def keep_partial(node: NodeFacts, placements: Sequence[Placement]) -> AxisDecision | None:
    """Leave the outputs partial where the op is linear in its partial operands."""
    rule = node.rule
    if rule is None:
        return None
    partial = {index: p for index, p in enumerate(placements) if isinstance(p, Partial)}
    if not partial or any(isinstance(p, Split) for p in placements):
        return None
    kinds = {placement.reduction for placement in partial.values()}
    if kinds != {"sum"} and not (rule.moves and len(rule.terms) == 1):
        return None
    if not rule.terms or not set(partial) <= rule.linear:
        return None
    for term in rule.terms:
        is_zero = any(index in node.zeros for index in term)
        if not is_zero and sum(index in partial for index in term) != 1:
            return None
    inputs = tuple(partial.get(index, Replicate()) for index in range(len(placements)))
    return AxisDecision(inputs, tuple(Partial(min(kinds)) for _ in node.outputs))
