"""Split the height of images along a mesh axis: each rank computes rows, and reads some of its neighbours'.

The ops of the way forward are followed once. One whose windows may be cut into equal parts splits its first
axis of space, unless its operands are split so already; what follows it, point by point, splits alike, and
so do the gradients. Where images end, at an op that makes one axis of channels and space, rows are gathered.
"""

import onnx_graphsurgeon as gs

from partc.passes.analysis import Analysis
from partc.passes.graph.expand_normalised import can_expand
from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.decide_layouts import decide_by_rule, decide_by_wish
from partc.passes.layouts.decisions import AxisDecision
from partc.passes.layouts.layouts import Placement, Replicate, Split
from partc.passes.rules.sharding_rules import node_facts
from partc.passes.search.operators.forward_nodes import forward_nodes

HEIGHT = Split(2)


def split_space(analysis: Analysis, parts: int) -> dict[str, Wish]:
    """Return what ops are asked to split: node -> its height, or nothing where images end."""
    wishes: dict[str, Wish] = {}
    placements: dict[str, Placement] = {}
    for node in forward_nodes(analysis.training, analysis.main):
        decision = _follow(analysis, node, placements, parts)
        if decision.factor is None and (window_decision := _split_windows(analysis, node, parts)) is not None:
            wishes[node.name], decision = Wish(HEIGHT), window_decision
        elif _ends_images(analysis, node, decision):
            wishes[node.name] = Wish(None)
            continue
        results = zip(node.outputs, decision.outputs, strict=True)
        placements.update((tensor.name, placement) for tensor, placement in results)
    return wishes


def _follow(analysis: Analysis, node: gs.Node, placements: dict[str, Placement], parts: int) -> AxisDecision:
    operands = [placements.get(tensor.name, Replicate()) for tensor in node.inputs]
    height = next((operand for operand in operands[:1] if _is_height(operand)), None)
    if height is not None and can_expand(node, analysis.facts):  # in primitives it keeps its split
        rest = (Replicate() for _ in node.inputs[1:])
        return AxisDecision((height, *rest), (height, *(Replicate() for _ in node.outputs[1:])), "expanded")
    known = node_facts(node, analysis.facts, analysis.zeros)
    return decide_by_rule(known, operands, parts, widens=True)


def _split_windows(analysis: Analysis, node: gs.Node, parts: int) -> AxisDecision | None:
    """Return the decision that splits the height that windows of an op make, if they may be split."""
    known = node_facts(node, analysis.facts, analysis.zeros)
    rule = known.rule
    if rule is None or len(rule.outputs[0]) < 3:
        return None
    rule_and_factor = rule.factor_at(rule.outputs[0], HEIGHT.axis, HEIGHT.outer)
    if rule_and_factor is None or (rule_and_factor[1] not in rule.windows and rule.apart is None):
        return None
    return decide_by_wish(known, Wish(HEIGHT), parts)


def _ends_images(analysis: Analysis, node: gs.Node, decision: AxisDecision) -> bool:
    """Tell whether a result has rows of images in an axis of something else."""
    ranks = [len(analysis.facts.shape(tensor.name)) for tensor in node.outputs]
    splits = [p for p in decision.outputs if isinstance(p, Split)]
    return not all(map(_is_height, splits)) or (bool(splits) and min(ranks) < 3)


def _is_height(placement: Placement) -> bool:
    return isinstance(placement, Split) and (placement.axis, placement.outer) == (HEIGHT.axis, HEIGHT.outer)
