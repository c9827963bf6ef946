"""Weights read in the ways of exporters: columns of one layer, rows of the next, two sums a block; tables."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam, Optimizer
from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.plan.program import Start
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)
from tests.checks.training_steps import EVERYTHING

BLOCKS, ROWS, WIDTH = 2, 16, 64
ACTIVATIONS = ROWS * WIDTH * 8  # bytes

# How the first layer of a block, a = x W' + b of a weight [out, in], is written; the second: as "transposed".
LAYERS = {
    "transposed": "{y}w = Transpose ({w}) {y}m = MatMul ({x}, {y}w) {y} = Add ({y}m, {b})",
    "with a bias": "{y} = Gemm <transB = 1> ({x}, {w}, {b})",
    "cut and joined": "{y}o = Constant <value_ints = [0]> () {y}i = Constant <value_ints = [128]> () "
    "{y}e = Constant <value_ints = [256]> () {y}p = Slice ({w}, {y}o, {y}i, {y}o) "
    "{y}q = Slice ({w}, {y}i, {y}e, {y}o) {y}j = Concat <axis = 0> ({y}q, {y}p) {y}w = Transpose ({y}j) "
    "{y}m = MatMul ({x}, {y}w) {y} = Add ({y}m, {b})",
    "of computed sizes": "{y}w = Transpose ({w}) {y}g = MatMul ({x}, {y}w) {y}s = Shape ({y}g) "
    "{y}r = Reshape ({y}g, {y}s) {y} = Add ({y}r, {b})",
}
DESCENT = SGD(lr=0.1)
GIVEN = f"double[{ROWS},{WIDTH}] x"


def looked_up(words: int) -> tuple[str, str, str]:
    """Return how rows of a table that nothing else reads are given: data, weights, ops."""
    table = f"double[{words},{WIDTH}] table, double[{WIDTH}] gain"
    return f"int64[{ROWS}] ids", table, "row = Gather (table, ids) x = Mul (row, gain)"


def step_of(
    layer: str, given: tuple[str, str, str] = (GIVEN, "", ""), optimizer: Optimizer = DESCENT
) -> onnx.ModelProto:
    """Return a training step of residual blocks: two layers each, four times as wide between them."""
    data, table, lookup = given
    nodes, inputs, x = [lookup], list(filter(None, (data, table))), "x"
    for block in range(BLOCKS):
        a, h, y = f"a{block}", f"h{block}", f"y{block}"
        inputs += [f"double[{4 * WIDTH},{WIDTH}] {a}W, double[{4 * WIDTH}] {a}c"]
        inputs += [f"double[{WIDTH},{4 * WIDTH}] {y}W, double[{WIDTH}] {y}c"]
        nodes += [LAYERS[layer].format(x=x, y=a, w=f"{a}W", b=f"{a}c"), f"{h} = Tanh ({a})"]
        nodes += [LAYERS["transposed"].format(x=h, y=y, w=f"{y}W", b=f"{y}c"), f"r{block} = Add ({x}, {y})"]
        x = f"r{block}"
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        blocks ({", ".join(inputs)}) => (double loss) {{
        {" ".join(nodes)} square = Mul ({x}, {x}) loss = ReduceMean <keepdims = 0> (square) }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for value in model.graph.input[1:]:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        drawn = rng.normal(scale=0.3, size=shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(drawn, value.name))
    del model.graph.input[1:]
    return build_training_graph(model, loss="loss", optimizer=optimizer, parameters=EVERYTHING)


def split_axes(compiled: Compiled) -> Mapping[str, int]:
    """Return where each variable is split along the mesh axis `tensor`."""
    return {name: of["tensor"].axis for name, of in compiled.compilation.strategy.variables.items()}


def messages(compiled: Compiled) -> Counter[tuple[str, int]]:
    starts = [step for step in compiled.plan.instructions if isinstance(step, Start)]
    return Counter((start.kind, start.payload_bytes) for start in starts)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_that_exporters_write_are_split_by_columns_then_rows(layer: str, tmp_path: Path) -> None:
    training = import_training_graph(step_of(layer))

    compiled = compile_step(training, tmp_path / "out", "1x4", "tensor=4", "global")

    weights = {f"{name}{block}W": axis for block in range(BLOCKS) for name, axis in (("a", 0), ("y", 1))}
    assert {name: axis for name, axis in split_axes(compiled).items() if name.endswith("W")} == weights
    # One forward a block, and one back but for the first, whose input has no gradient.
    assert messages(compiled) == {("all_reduce", ACTIVATIONS): 2 * BLOCKS - 1}
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


@pytest.mark.parametrize("words", [200, 201])
def test_a_table_that_no_op_multiplies_is_split_by_words_and_sums_its_rows(
    words: int, tmp_path: Path
) -> None:
    training = import_training_graph(step_of("transposed", looked_up(words), Adam(lr=0.01)))

    compiled = compile_step(training, tmp_path / "out", "1x4", "tensor=4", "global")

    assert split_axes(compiled)["table"] == 0
    # Two a block, and the looked-up rows'; their gradient goes to the table where it is, equal parts or not.
    assert messages(compiled) == {("all_reduce", ACTIVATIONS): 2 * BLOCKS + 1}
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


def test_light_tables_stay_whole(tmp_path: Path) -> None:
    training = import_training_graph(step_of("transposed", looked_up(40)))

    compiled = compile_step(training, tmp_path / "out", "1x4", "tensor=4", "global")

    assert "table" not in split_axes(compiled)
    assert messages(compiled) == {("all_reduce", ACTIVATIONS): 2 * BLOCKS}


def test_weights_are_moved_again_when_others_have_moved(tmp_path: Path) -> None:
    training = import_training_graph(onnx.ModelProto.FromString(training_model("lm, sgd")))

    compiled = compile_step(training, tmp_path / "out", "1x2", "tensor=2", "global")

    # Sampled words' rows stay where their table is once the projection sums: none is gathered.
    assert {kind for kind, _ in messages(compiled)} == {"all_reduce"}
    assert sum(messages(compiled).values()) <= 5


HEADS, WORDS, BROAD = 8, 16, 256
GROUPED_QUERIES = f"""<ir_version: 10, opset_import: ["": 21]>
    block (int64[8,{WORDS}] ids) => (double loss) {{ x = Gather (table, ids)
        heads = Constant <value_ints = [0, 0, {HEADS}, {BROAD // HEADS}]> ()
        few = Constant <value_ints = [0, 0, PAIRS, {BROAD // HEADS}]> ()
        each = Constant <value_ints = [8, PAIRS, {HEADS} / PAIRS, {WORDS}, {BROAD // HEADS}]> ()
        all = Constant <value_ints = [0, {HEADS}, {WORDS}, {BROAD // HEADS}]> ()
        flat = Constant <value_ints = [0, 0, {BROAD}]> () two = Constant <value_ints = [2]> ()
        LAYERS square = Mul (LAST, LAST) loss = ReduceMean <keepdims = 0> (square) }}"""
QUERIED = """
        gained = Mul (x, gain) q = MatMul (gained, q_W) qh = Reshape (q, heads)
        k = MatMul (gained, k_W) kf = Reshape (k, few) v = MatMul (gained, v_W) vf = Reshape (v, few)
        qt = Transpose <perm = [0, 2, 1, 3]> (qh)
        kt = Transpose <perm = [0, 2, 1, 3]> (kf) vt = Transpose <perm = [0, 2, 1, 3]> (vf)
        ku = Unsqueeze (kt, two) ke = Expand (ku, each) ka = Reshape (ke, all)
        vu = Unsqueeze (vt, two) ve = Expand (vu, each) va = Reshape (ve, all)
        kx = Transpose <perm = [0, 1, 3, 2]> (ka) scores = MatMul (qt, kx)
        p = Softmax <axis = -1> (scores) a = MatMul (p, va) at = Transpose <perm = [0, 2, 1, 3]> (a)
        af = Reshape (at, flat) o = MatMul (af, o_W) r = Add (x, o)
        h = MatMul (r, up_W) ht = Tanh (h) y = MatMul (ht, down_W) s = Add (r, y)"""


@pytest.mark.parametrize("pairs", [pytest.param(1, marks=pytest.mark.long), 2])
def test_more_ranks_than_key_value_heads_divide_the_queries(pairs: int, tmp_path: Path) -> None:
    text = GROUPED_QUERIES.replace(f"{HEADS} / PAIRS", str(HEADS // pairs)).replace("PAIRS", str(pairs))
    shared = {"x", "heads", "few", "each", "all", "flat", "two", "perm", "axis"}
    names = {*re.findall(r"\b[a-z]\w*\b", QUERIED)} - shared
    layers = "", "x"
    for block in range(BLOCKS):
        own = re.sub(r"\b[a-z]\w*\b", lambda m, b=block: f"{m[0]}{b}" if m[0] in names else m[0], QUERIED)
        layers = layers[0] + re.sub(r"\bx\b", layers[1], own), f"s{block}"
    model = onnx.parser.parse_model(text.replace("LAYERS", layers[0]).replace("LAST", layers[1]))
    few = pairs * BROAD // HEADS
    shapes = {
        "table": (2 * BROAD, BROAD),
        "gain": (BROAD,),
        "q_W": (BROAD, BROAD),
        "k_W": (BROAD, few),
        "v_W": (BROAD, few),
    }
    shapes |= {"o_W": (BROAD, BROAD), "up_W": (BROAD, 3 * BROAD), "down_W": (3 * BROAD, BROAD)}
    rng = np.random.default_rng(0)
    each = {f"{n}{b}": shape for b in range(BLOCKS) for n, shape in shapes.items() if n != "table"}
    for name, shape in ({"table": shapes["table"]} | each).items():
        drawn = rng.normal(scale=0.1, size=shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(drawn, name))
    step = build_training_graph(model, loss="loss", optimizer=DESCENT, parameters=EVERYTHING)

    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x4", "tensor=4", "global")

    axes = {
        f"{n}{b}": a
        for n, a in zip(("q_W", "o_W", "up_W", "down_W"), (1, 0) * 2, strict=True)
        for b in range(BLOCKS)
    }
    assert axes.items() <= split_axes(compiled).items()
    # Looked-up rows, two forward and two back.
    sums = [sent for kind, sent in messages(compiled).elements() if kind == "all_reduce"]
    activations = 8 * WORDS * BROAD * 8
    assert sum(sent >= activations for sent in sums) == 4 * BLOCKS + 1
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
