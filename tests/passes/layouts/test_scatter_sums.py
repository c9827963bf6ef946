"""A sum that is wanted in parts alone is scattered, before what only moves it."""

from partc.passes.layouts.aggregate_partials import aggregate_partials
from partc.passes.layouts.configuration import Configuration, Wish
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import WORKER, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lower import lower
from tests.builders.graphs.small_steps import lay_out, lines, training_of

STEP = """
step (double[8,4] x, double[8,6] dy, double[6,4] W) => (double[6,4] W_next{outputs}) {{
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    {reads}
    moved = Transpose <perm = [1, 0]> (dW)
    part = Tanh (moved)
    W_next = Sub (W, part)
}}
"""
SPLIT = {"x": 0, "dy": 0}


def laid_out(reads: str, outputs: str, wishes: dict[str, Split]) -> LaidOutGraph:
    """`wishes`: tensor -> the part of it that its node is asked for."""
    text = STEP.format(reads=reads, outputs=outputs)
    nodes = {node.outputs[0].name: node.name for node in training_of(text, SPLIT).graph.nodes}
    configuration = Configuration(
        Meshes((Mesh(WORKER, (("data", 2),)),)),
        wishes={nodes[tensor]: {0: Wish(split)} for tensor, split in wishes.items()},
    )
    graph = lay_out(text, split=SPLIT, configuration=configuration)
    aggregate_partials(graph)
    return graph


def test_a_part_is_scattered_before_it_is_moved() -> None:
    graph = laid_out("", "", {"part": Split(0)})

    assert not graph.made_whole
    assert "dW@worker.split1.1 = ReduceScatter (dW)" in lines(lower(graph))


def test_readers_of_the_same_part_share_it() -> None:
    graph = laid_out("other = Sigmoid (dW)", ", double[4,6] other", {"part": Split(0), "other": Split(1)})

    written = lines(lower(graph))
    assert sum("ReduceScatter" in line for line in written) == 1
    assert not any("AllReduce" in line for line in written)


def test_who_wants_it_whole_has_it_summed() -> None:
    graph = laid_out("other = Sigmoid (dW)", ", double[4,6] other", {"part": Split(0)})

    written = lines(lower(graph))
    assert graph.made_whole == {("dW", 0)}
    assert not any("ReduceScatter" in line for line in written)
