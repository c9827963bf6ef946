"""What strategies split is found in the layouts of the whole step."""

from functools import cache

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.search.whole_steps import WholeSteps
from partc.models.catalogue import build_model
from partc.passes.configure import configure
from partc.passes.distribute import find_split_ops, lay_out
from partc.passes.graph.expand_normalised import can_expand
from partc.passes.layouts.layouts import REPLICAS, Replicate, Split
from tests.builders.graphs.attention_block import attention_step
from tests.builders.plans.compiled_steps import cluster_of

NAMES = (
    "tensor=2",
    "workers=2",
    "workers=1",
    "pipeline=2",
    "data=2,tensor=2",
    "tensor=4",
    "spatial=2",
    "fsdp",
    "layerwise",
)


def classes() -> onnx.ModelProto:
    forward = build_model("mlp", sizes=(64, 8192), batch=8)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))


STEPS = {"classes": classes, "attention": lambda: attention_step(SGD(0.1))}


@cache
def step(name: str) -> onnx.ModelProto:
    return STEPS[name]()


def whole_steps(name: str) -> WholeSteps:
    return WholeSteps(lambda: import_training_graph(step(name)), cluster_of("2x2"), Options(batch="global"))


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("name", STEPS)
def test_what_is_split_is_found_wherever_ranks_of_a_replica_would_gather_it(name: str, strategy: str) -> None:
    whole = whole_steps(name)
    whole("allreduce", "allreduce")
    assert whole.first is not None
    written = whole_steps(name)
    priced = written(strategy, strategy)
    if priced is None or not priced.strategy.has_meshes:
        pytest.skip("this name has no mesh here")
    analysis = whole.first.analysis
    configuration = configure(analysis, priced.strategy)
    graph = lay_out(analysis, {}, configuration)

    gathered = {
        node.name
        for node in analysis.training.graph.nodes
        for tensor, target in zip(node.inputs, graph.decisions[node.name].inputs, strict=True)
        for axis, placement in enumerate(graph.layout(tensor.name).placements)
        if axis not in (REPLICAS, graph.meshes.microbatch_axis)
        and isinstance(placement, Split)
        and isinstance(target.along(axis), Replicate)
    }
    expected = {
        node.name
        for node in analysis.training.graph.nodes
        if node.name in gathered - configuration.wishes.keys() and can_expand(node, analysis.facts)
    }
    assert find_split_ops(analysis, configuration) == expected
