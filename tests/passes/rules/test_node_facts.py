"""What is known of a node is all that its rule depends on, and leaves its name out."""

from dataclasses import fields

import onnx_graphsurgeon as gs
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.passes.graph.facts import Facts
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.rules.sharding_rule import ShardingRule
from partc.passes.rules.sharding_rules import GRADIENT_RULES, RULES, node_facts, rule_of
from tests.builders.graphs.foreign_steps import parse

MODELS: dict[str, dict[str, object]] = {
    "lm": {"vocab": 50, "embedding": 8, "cells": 16, "projection": 8, "steps": 3, "samples": 8, "batch": 4},
    "resnet50": {"width": 4, "image": 32, "classes": 10, "batch": 4},
    "lenet": {"batch": 4},
}


def facts_of(text: str) -> tuple[list[gs.Node], Facts]:
    graph = gs.import_onnx(parse(text))
    graph.outputs = []
    return graph.nodes, infer_facts(TrainingGraph(graph, {}, {}, (), None, {}), {"B": 6})


@pytest.mark.parametrize("model", MODELS)
def test_a_rule_is_the_one_that_the_node_in_its_own_graph_has(model: str) -> None:
    loss = "loss" if model == "lm" else "softmax_cross_entropy"
    step = build_training_graph(build_model(model, **MODELS[model]), loss=loss, optimizer=SGD(0.1))
    training = import_training_graph(step)
    facts = infer_facts(training, {})
    ruled = 0

    for node in training.graph.nodes:
        find = RULES.get(node.op) or next(
            (r for n, r in GRADIENT_RULES.items() if node.op.startswith(n)), None
        )
        own = None if find is None else find(node, facts)
        known = rule_of(node, facts)
        assert (known is None) == (own is None), node.name
        if known is not None and own is not None:
            ruled += 1
            assert described(known) == described(own), node.name

    assert ruled > 50
    assert len({id(node_facts(node, facts)) for node in training.graph.nodes}) < len(training.graph.nodes)


def described(rule: ShardingRule) -> list[object]:
    """Return all that a rule says: of what parts reach for, by trying them."""
    told = [getattr(rule, each.name) for each in fields(rule) if each.name not in ("reaches", "apart")]
    for factor, reached in sorted(rule.reaches.items()):
        for index, reach in sorted(reached.items()):
            ends = [reach.entries_of(start, start + 1) for start in range(rule.sizes[factor])]
            told.append((factor, index, reach.axis, reach.size, reach.fill, ends))
    return told + ([] if rule.apart is None else described(rule.apart))


def test_nodes_that_differ_by_names_alone_are_one() -> None:
    nodes, facts = facts_of(
        "step (float[4,6] x, float[4,6] y) => (float[4,6] b, float[4,6] d) "
        "{ a = Add (x, y)  b = Neg (a)  c = Add (y, b)  d = Neg (c) }"
    )

    first, second, third, fourth = (node_facts(node, facts) for node in nodes)

    assert first is third
    assert second is fourth
    assert first is not second


@pytest.mark.parametrize(
    "calls",
    [
        "a = ReduceSum <keepdims = 0> (x, zero)  b = ReduceSum <keepdims = 1> (x, zero)",
        "a = ReduceSum (x, zero)  b = ReduceSum (x, one)",
        "a = Neg (x)  b = Neg (z)",
        "a = Neg (x)  b = Neg (w)",
        "a = Neg (x)  b = Neg (v)",
    ],
    ids=["attribute", "value", "shape", "element type", "size that follows a symbol"],
)
def test_nodes_that_differ_by_what_is_known_are_not_one(calls: str) -> None:
    nodes, facts = facts_of(
        "step (float[6,6] x, float[3,6] z, double[6,6] w, float[B,6] v) => (a, b) "
        f"<int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {calls} }}"
    )

    one, other = (node_facts(node, facts) for node in nodes)

    assert one is not other


def test_an_operand_of_zeros_makes_another_node_of_it() -> None:
    nodes, facts = facts_of("step (float[4,6] x, float[4,6] y) => (a) { a = Add (x, y) }")

    plain, of_zeros = node_facts(nodes[0], facts), node_facts(nodes[0], facts, frozenset({"y"}))

    assert of_zeros.zeros == {1}
    assert plain.zeros == frozenset()
    assert of_zeros.rule is plain.rule
