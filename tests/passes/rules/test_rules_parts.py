import onnx_graphsurgeon as gs

from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.rules.sharding_rule import Dims
from partc.passes.rules.sharding_rules import rule_of
from tests.builders.graphs.foreign_steps import parse


def output_dims(operands: str, call: str, sizes: dict[str, int] | None = None) -> Dims:
    """Return the factors of the first output of a node that the text calls."""
    results = "a, b" if call.startswith("Split") else "a"
    graph = gs.import_onnx(parse(f"step ({operands}) => ({results}) {{ {results} = {call} }}"))
    graph.outputs = []
    facts = infer_facts(TrainingGraph(graph, {}, {}, (), None, {}), sizes or {})
    rule = rule_of(graph.nodes[0], facts)
    assert rule is not None
    return tuple(tuple(f for f in axis if f not in rule.whole) for axis in rule.outputs[0])


def test_equal_parts_that_follow_no_symbolic_size_are_split_inside() -> None:
    free = output_dims("float[B,6] x, float[B,6] y", "Concat <axis = 1> (x, y)", {"B": 6})

    assert free == (("d0",), ("in",))


def test_parts_that_are_equal_by_the_assumed_sizes_alone_stay_whole() -> None:
    free = output_dims("float[B,6] x, float[C,6] y", "Concat <axis = 0> (x, y)", {"B": 6, "C": 6})

    assert free == ((), ("d1",))


def test_halves_of_an_axis_that_follows_a_symbolic_size_stay_whole() -> None:
    free = output_dims("float[B,6] x", "Split <axis = 0, num_outputs = 2> (x)", {"B": 6})

    assert free == ((), ("d1",))
