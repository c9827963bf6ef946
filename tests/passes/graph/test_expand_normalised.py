"""Primitives in the place of ops that normalise an axis: the same results, and every axis may be split."""

from collections.abc import Iterator

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.passes.graph.expand_normalised import FORMS, can_expand, expand
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.simplify import simplify
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.decide_layouts import split_on
from partc.passes.rules.sharding_rules import node_facts, rule_of
from partc.runtime.errors import UnsupportedModel
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.run_graphs import graph_of, run_graph

CLASSES = 7

# one node: its operands, the op, its results; T is double or float
NODES = """
T[3,5] x -> y = Softmax (x)
T[2,3,4] x -> y = Softmax <axis = 1> (x)
T[3,5] x -> y = LogSoftmax (x)
T[2,3,4] x -> y = LogSoftmax <axis = 0> (x)
T[2,3,4] x, T[4] s, T[4] b -> y = LayerNormalization (x, s, b)
T[2,3,4] x, T[3,4] s -> y, mean, inverse = LayerNormalization <axis = 1, epsilon = 0.01> (x, s)
T[2,3,4] x, T[3,1] s, T[4] b -> y = LayerNormalization <axis = -2> (x, s, b)
T[4,3,2] x, T[3] s, T[3] b, T[3] m, T[3] v -> y, n, w = BatchNormalization <training_mode = 1> (x, s, b, m, v)
T[6,2] x, T[2] s, T[2] b, T[2] m, T[2] v -> y, n, w = BatchNormalization <TRAINING> (x, s, b, m, v)
float[2,3,4] x, float[3] s, float[3] b -> y = InstanceNormalization <epsilon = 0.001> (x, s, b)
float[2,6,3,2] x, float[6] s, float[6] b -> y = GroupNormalization <num_groups = 3> (x, s, b)
T[2,3,4] x, axes{1} -> y = ReduceLogSumExp (x, axes)
T[2,3,4] x, axes{-1, 0} -> y = ReduceLogSumExp <keepdims = 0> (x, axes)
T[2,3,4] x -> y = ReduceLogSumExp (x)
T[2,3,4] x, axes{1} -> y = ReduceLogSum <keepdims = 0> (x, axes)
T[2,3,4] x, axes{1} -> y = ReduceL2 (x, axes)
T[4,7] x, id[4,1] i -> y = GatherElements <axis = 1> (x, i)
T[4,7,2] x, id[4,1,2] i -> y = GatherElements <axis = 1> (x, i)
T[4,7] x, id[4,1] i, T[4,1] u -> y = ScatterElements <axis = 1> (x, i, u)
T[4,7] x, id[4,1] i, T[4,1] u -> y = ScatterElements <axis = -1, reduction = "add"> (x, i, u)
id[4] i, depth{7}, float[2] u -> y = OneHot (i, depth, u)
id[4,2] i, depth{7}, float[2] u -> y = OneHot <axis = 1> (i, depth, u)
T[4,7] x, label[4] i -> y = SoftmaxCrossEntropyLoss (x, i)
T[4,7,2] x, label[4,2] i, T[7] w -> y, p = SoftmaxCrossEntropyLoss <ignore_index = 3> (x, i, w)
T[4,7] x, label[4] i, T[7] w -> y = SoftmaxCrossEntropyLoss <reduction = "none"> (x, i, w)
T[4,7,2] x, label[4,2] i -> y = NegativeLogLikelihoodLoss <reduction = "sum", ignore_index = 0> (x, i)
"""
ONE_NODE = NODES.replace("TRAINING", "training_mode = 1, momentum = 0.7").strip().split("\n")


def random_nodes(count: int) -> list[str]:
    """Return nodes on random shapes, along random axes."""
    rng, lines = np.random.default_rng(0), []
    for _ in range(count):
        shape = rng.integers(1, 6, rng.integers(2, 5)).tolist()
        axis = int(rng.integers(-len(shape), len(shape)))
        one = [1 if place == axis % len(shape) else size for place, size in enumerate(shape)]
        shape[axis] = CLASSES
        x, labels, scale = (f"{sizes}".replace(" ", "") for sizes in (shape, one, shape[axis:]))
        lines += [
            f"T{x} x -> y = Softmax <axis = {axis}> (x)",
            f"T{x} x -> y = LogSoftmax <axis = {axis}> (x)",
            f"T{x} x, T{scale} s -> y = LayerNormalization <axis = {axis}> (x, s)",
            f"T{x} x, axes{{{axis}}} -> y = ReduceLogSumExp (x, axes)",
            f"T{x} x, id{labels} i -> y = GatherElements <axis = {axis}> (x, i)",
            f"T{x} x, id{labels} i, T{labels} u -> y = ScatterElements <axis = {axis}> (x, i, u)",
        ]
    return lines


CASES = [
    (line, element)
    for line in [*ONE_NODE, *random_nodes(6)]
    for element in ("double", "float")
    if "T[" in line or element == "float"
]
POSITIVE = {"v", "s"}  # variances and scales


def one_node(line: str, element: str) -> tuple[TrainingGraph, dict[str, np.ndarray]]:
    """Return the graph of one node, and operands for it."""
    rng = np.random.default_rng(len(line))
    declared, constants, feeds = [], [], {}
    operands, call = line.replace("T[", f"{element}[").split(" -> ")
    for operand in split_operands(operands):
        if "{" in operand:
            name, values = operand.rstrip("}").split("{")
            count = "" if name == "depth" else f"[{values.count(',') + 1}]"
            constants.append(f"int64{count} {name} = {{{values}}}")
            continue
        kind, name = operand.split(" ")
        shape = [int(size) for size in kind[kind.index("[") + 1 : -1].split(",")]
        declared.append(operand.replace("id[", "int64[").replace("label[", "int64["))
        if kind.startswith(("id", "label")):
            feeds[name] = rng.integers(-CLASSES if kind.startswith("id") else 0, CLASSES, shape)
        else:
            dtype = {"double": "float64", "float": "float32"}.get(kind[: kind.index("[")], "float16")
            values = (
                rng.uniform(0.1, 2, shape)
                if "LogSum " in call or name in POSITIVE
                else rng.normal(size=shape)
            )
            feeds[name] = values.astype(dtype)
    results = call.split(" = ")[0].split(", ")
    outputs = ", ".join(f"{_element_of(result, element)} {result}" for result in results)
    copies = "".join(f"{result} = Identity ({result}0) " for result in results)
    node = call.replace(call.split(" = ")[0], ", ".join(f"{result}0" for result in results), 1)
    constants_text = f"<{', '.join(constants)}>" if constants else ""
    training = graph_of(f"step ({', '.join(declared)}) => ({outputs}) {constants_text} {{ {node} {copies} }}")
    training.graph.nodes[0].name = "node"
    for tensor, value in zip(
        training.graph.nodes[0].outputs, run_graph(training, feeds).values(), strict=True
    ):
        tensor.dtype, tensor.shape = value.dtype, value.shape  # inference finds not all
    return training, feeds


def _element_of(result: str, element: str) -> str:
    """Statistics of a LayerNormalization are float."""
    return "float" if result in ("mean", "inverse") else element


def split_operands(text: str) -> list[str]:
    """Cut a list of operands at the commas between them."""
    depth, words = 0, [""]
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        words = [*words, ""] if letter == "," and not depth else [*words[:-1], words[-1] + letter]
    return [word.strip() for word in words]


def expanded(training: TrainingGraph) -> TrainingGraph:
    facts = infer_facts(training, {})
    names = expand(training, [n.name for n in training.graph.nodes if can_expand(n, facts)], facts)
    assert names
    facts = infer_facts(training, {})
    assert not any(can_expand(node, facts) for node in training.graph.nodes)
    return training


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], element: str) -> None:
    exact = 1e-12 if element == "double" else 2e-5
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_allclose(actual[name], value, exact, exact, err_msg=name)


@pytest.mark.parametrize(("line", "element"), CASES)
def test_primitives_give_what_the_op_gives(line: str, element: str) -> None:
    training, feeds = one_node(line, element)
    expected = run_graph(training, feeds)

    assert_equal(run_graph(expanded(training), feeds), expected, element)


def test_every_form_is_tried() -> None:
    assert {line.split(" = ")[1].split(" ")[0] for line in ONE_NODE} == set(FORMS)


@pytest.mark.parametrize("element", ["double", "float"])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "ReduceLogSumExp"])
def test_large_and_masked_entries_do_no_harm(op: str, element: str) -> None:
    training, feeds = one_node(
        f"T[4,6] x{', axes{1}' if op.startswith('R') else ''} -> y = {op} "
        f"(x{', axes' if op.startswith('R') else ''})",
        element,
    )
    feeds["x"][0] = [1e4, -1e4, 1e4, 0, 5, -3]
    feeds["x"][1, :5] = -np.inf
    feeds["x"][2, ::2] = -np.inf
    expected = run_graph(training, feeds)

    assert np.isfinite(expected["y"]).any(axis=1).all()
    assert_equal(run_graph(expanded(training), feeds), expected, element)


def test_a_log_of_nothing_but_masked_entries_is_minus_infinity() -> None:
    training, feeds = one_node("T[2,3] x, axes{1} -> y = ReduceLogSumExp <keepdims = 0> (x, axes)", "double")
    feeds["x"][0] = -np.inf
    feeds["x"][1, 1] = np.inf

    assert run_graph(expanded(training), feeds)["y"].tolist() == [-np.inf, np.inf]


@pytest.mark.parametrize("line", [line for line in ONE_NODE if "Normalization" in line and "T[" in line])
def test_a_mean_far_from_zero_takes_no_digits_from_the_variance(line: str) -> None:
    training, feeds = one_node(line, "double")
    shifted = feeds["x"] + 1e4
    feeds["x"] = shifted - 1e4
    expected = run_graph(training, feeds)["y"]

    actual = run_graph(expanded(training), feeds | {"x": shifted})["y"]

    np.testing.assert_allclose(actual, expected, 1e-10, 1e-10)


@pytest.mark.parametrize("label", [CLASSES, -CLASSES - 1, -100])
@pytest.mark.parametrize("line", [line for line in ONE_NODE if "Elements" in line])
def test_a_label_that_is_no_class_makes_its_row_nan(line: str, label: int) -> None:
    training, feeds = one_node(line, "double")
    before = run_graph(expanded(one_node(line, "double")[0]), feeds)["y"]
    feeds["i"][1] = label
    y = run_graph(expanded(training), feeds)["y"]

    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(np.delete(y, 1, axis=0), np.delete(before, 1, axis=0))


def test_16_bit_numbers_are_summed_in_32() -> None:
    training, feeds = one_node("float16[1,70000] x -> y = Softmax (x)", "float16")
    feeds["x"] = np.zeros((1, 70000), np.float16)  # 65504 is the largest
    training = expanded(training)

    np.testing.assert_array_equal(run_graph(training, feeds)["y"], np.float16(1 / 70000))
    facts = infer_facts(training, {})
    assert {str(facts.dtypes[n.inputs[0].name]) for n in training.graph.nodes if "Reduce" in n.op} == {
        "float32"
    }


def test_what_has_no_form_is_refused_and_the_graph_left_alone() -> None:
    training = graph_of("step (float[4,6] x) => (float[4,6] y) { a = Softmax (x) y = Hardmax (a) }")
    training.graph.nodes[0].name, training.graph.nodes[1].name = "first", "second"

    with pytest.raises(UnsupportedModel, match="split another dimension"):
        expand(training, ["first", "second"], infer_facts(training, {}))

    assert [node.op for node in training.graph.nodes] == ["Softmax", "Hardmax"]


# ---------------------------------------------------------------- every axis may be split


@pytest.mark.parametrize("line", ONE_NODE)
def test_no_primitive_keeps_whole_what_the_op_kept_whole(line: str) -> None:
    training, _ = one_node(line, "float")
    training = expanded(training)
    facts = infer_facts(training, {})

    assert list(kept_whole(training, facts)) == []


def kept_whole(training: TrainingGraph, facts) -> Iterator[str]:  # type: ignore[no-untyped-def]
    """Yield nodes on tensors of the data's size that keep a factor whole, or cannot be split on it."""
    for node in training.graph.nodes:
        if facts.value(node.outputs[0].name) is not None or node.op == "Gather":
            continue  # sizes and constants
        rule = rule_of(node, facts)
        assert rule is not None, node.op
        for dims in rule.outputs + tuple(d for d in rule.inputs if d is not None):
            for factor in (f for axis in dims for f in axis if rule.sizes[f] > 1):
                if factor in rule.whole or split_on(node_facts(node, facts), rule, factor, 1) is None:
                    yield f"{node.op}: {factor}"


# ---------------------------------------------------------------- whole steps


NORMALISED = """
forward (double[8,6] x) => (double[8,7] logits)
<double[6,4] W1, double[4] s, double[4] b, double[4,7] W2> {
    h = MatMul (x, W1)
    n = LayerNormalization (h, s, b)
    p = Softmax (n)
    g = Mul (p, n)
    logits = MatMul (g, W2)
}
"""
IMAGES = """
forward (double[8,4,3,2] x) => (double[8,7] logits)
<double[4] s, double[4] b, double[4] m, double[4] v, double[24,7] W> {
    n, m1, v1 = BatchNormalization <training_mode = 1> (x, s, b, m, v)
    f = Flatten (n)
    logits = MatMul (f, W)
}
"""
LOG = """
forward (double[8,6] x, int64[8] labels) => (double loss)
<double[6,7] W, double[6] s, int64[1] last = {-1}> {
    n = LayerNormalization <axis = 0, epsilon = 0.001> (x, x)
    c = Mul (n, s)
    y = MatMul (c, W)
    e = ReduceLogSumExp <keepdims = 0> (y, last)
    l = SoftmaxCrossEntropyLoss <ignore_index = 2> (y, labels)
    m = ReduceMean <keepdims = 0> (e)
    loss = Add (l, m)
}
"""


def step_of(forward: str, loss: str = "softmax_cross_entropy", **options: object) -> TrainingGraph:
    """Return one step of training as `partc grad` makes it."""
    model = parse(forward)
    rng = np.random.default_rng(0)
    for declared in model.graph.value_info:
        shape = [size.dim_value for size in declared.type.tensor_type.shape.dim]
        value = np.asarray(rng.uniform(0.2, 1, shape))
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, declared.name))
    del model.graph.value_info[:]
    choice = ParameterChoice(train=("*",))
    step = build_training_graph(model, loss=loss, optimizer=SGD(0.5), parameters=choice, **options)  # type: ignore[arg-type]
    return import_training_graph(step)


def feeds_of(training: TrainingGraph) -> dict[str, np.ndarray]:
    """Return a batch, and values for the variables."""
    rng = np.random.default_rng(1)
    feeds = {}
    for tensor in training.graph.inputs:
        is_label = np.dtype(tensor.dtype).kind == "i"
        drawn = rng.integers(0, CLASSES, tensor.shape) if is_label else rng.normal(size=tensor.shape)
        feeds[tensor.name] = np.asarray(drawn).astype(tensor.dtype)
    return feeds


@pytest.mark.parametrize(
    "arguments",
    [
        {"forward": NORMALISED},
        {"forward": NORMALISED, "ignore_index": 3},
        {"forward": IMAGES},
        {"forward": LOG, "loss": "loss"},
    ],
    ids=["softmax and layers", "ignored labels", "batches", "log-sum-exp and a loss on labels"],
)
def test_a_step_in_primitives_is_the_same_step(arguments: dict[str, object]) -> None:
    training = step_of(**arguments)  # type: ignore[arg-type]
    feeds = feeds_of(training)
    expected = run_graph(training, feeds)

    training = expanded(training)
    assert_equal(run_graph(training, feeds), expected, "double")
    simplify(training)
    assert_equal(run_graph(training, feeds), expected, "double")


def test_statistics_are_shared_with_the_gradient() -> None:
    training = step_of(NORMALISED)
    before = [node.op for node in training.graph.nodes].count("ReduceMean")

    training = expanded(training)
    simplify(training)

    assert [node.op for node in training.graph.nodes].count("ReduceMean") == before
