"""Images split in height: every tensor of every rank is the single device's; strips are all that is sent.

Into parts that are equal, or of different sizes.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec.structs import replace
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.compiler.verification.verify import verify
from partc.cost.cluster.cluster import ranks_of
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.models.catalogue import build_model
from partc.passes.layouts.layouts import Partial, Split
from partc.runtime.errors import BadStrategy, BadUsage
from partc.runtime.plan.program import Start
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.random_images import ANY_HEIGHTS, HEIGHTS, random_image_step
from tests.builders.plans.compiled_steps import Compiled, cluster_of, compile_step, random_batches, verified
from tests.checks.oracle import Oracle
from tests.checks.training_steps import EVERYTHING
from tests.sampling import sampled

MESHES = (("1x2", "spatial=2"), ("1x4", "spatial=4"), ("2x2", "data=2,spatial=2"))
BATCHES = ("global", "per-replica")
UNEVEN_MESHES = (*MESHES, ("1x3", "spatial=3"), ("2x3", "data=2,spatial=3"))
# Of networks of any heights, those none of whose windows make as many rows as there are ranks: of the first
# 150 of plain windows, and of the first 300 of all.
TOO_LOW = frozenset((42, 57, 69, 81))
ALL_TOO_LOW = frozenset((69, 81, 131, 176, 186, 291))
ROUNDED = 1e-4  # of a tensor's largest entry, in float32


def check_random(seed: int, folder: Path, heights: tuple[int, ...] = HEIGHTS, has_all: bool = False) -> None:
    is_exact = seed % 2 == 0
    training = import_training_graph(random_image_step(seed, is_exact, heights, has_all))
    oracle = Oracle(training)
    meshes = MESHES if heights == HEIGHTS else UNEVEN_MESHES
    asked = (*meshes[seed % len(meshes)], BATCHES[seed // 2 % 2])
    if heights == ANY_HEIGHTS and seed in (ALL_TOO_LOW if has_all else TOO_LOW):
        with pytest.raises(BadUsage, match="no windows of a convolution or pooling make as many rows as"):
            compile_step(training, folder / "out", *asked)
        return
    compiled = compile_step(training, folder / "out", *asked)
    batches = random_batches(compiled.plan, 2, seed)
    if is_exact:
        batches = [{name: np.round(array) for name, array in batch.items()} for batch in batches]

    # Of all windows, some networks make sums of more than 24 bits.
    assert oracle.first_wrong(compiled, batches[0], 0 if is_exact and not has_all else ROUNDED) is None
    report = verified(compiled, batches)
    assert report.passed, report.summary()


@pytest.mark.parametrize("seed", sampled(range(16), range(1, 16, 3)))
def test_a_random_network_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_random(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16, 400))
def test_many_random_networks_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_random(seed, tmp_path)


@pytest.mark.parametrize("seed", sampled(range(10), range(0, 10, 3)))
def test_a_random_network_of_any_height_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_random(seed, tmp_path, ANY_HEIGHTS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 150))
def test_many_random_networks_of_any_height_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_random(seed, tmp_path, ANY_HEIGHTS)


@pytest.mark.parametrize("seed", sampled(range(12), range(0, 12, 3)))
def test_a_random_network_of_all_windows_trains_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_random(seed, tmp_path, ANY_HEIGHTS, has_all=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 300))
def test_many_random_networks_of_all_windows_train_as_on_one_device(seed: int, tmp_path: Path) -> None:
    check_random(seed, tmp_path, ANY_HEIGHTS, has_all=True)


# ---------------------------------------------------------------- what is sent

STACK = """<ir_version: 10, opset_import: ["": 18]>
stack (float[4,3,16,8] x, float[6,3,3,3] a, float[6,6,5,5] b, float[6,6,3,3] c) => (float loss) {
    h0 = Conv <pads = [1,1,1,1]> (x, a)
    h1 = Tanh (h0)
    h2 = Conv <pads = [2,2,2,2]> (h1, b)
    h3 = Tanh (h2)
    y = Conv <pads = [1,1,1,1], strides = [2,2]> (h3, c)
    z = Tanh (y)
    square = Mul (z, z)
    loss = ReduceMean <keepdims = 0> (square)
}"""
ROW = 4 * 6 * 8 * 4  # bytes of a row of h1 and h3: [4, 6, 1, 8]


def training_of(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(2)
    for value in model.graph.input[1:]:
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        stored = rng.normal(scale=0.3, size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(stored, value.name))
    del model.graph.input[1:]
    return build_training_graph(model, loss="loss", optimizer=SGD(0.1), parameters=EVERYTHING)


def strips(compiled: Compiled) -> Counter[str]:
    """Return the bytes that a rank between two others sends ahead and back."""
    starts = [i for i in compiled.plan.instructions if isinstance(i, Start) and i.kind.startswith("shift")]
    found: Counter[str] = Counter()
    for start in starts:
        assert start.group == "worker.spatial"
        found[start.kind] += start.payload_bytes
    return found


@pytest.mark.parametrize(("cluster", "strategy"), MESHES[:2])
def test_only_strips_that_windows_reach_for_are_sent(cluster: str, strategy: str, tmp_path: Path) -> None:
    """Of each tensor once, for its gradients too.

    h1    5x5 reads 2 rows ahead and 2 behind      h3    3x3 of stride 2 reads 1 in front
    dy    1 row of y, half as wide, behind         dh2   2 rows on both sides
    """
    training = import_training_graph(training_of(STACK))

    compiled = compile_step(training, tmp_path / "out", cluster, strategy, "global")

    assert strips(compiled) == {"shift_ahead": (2 + 1 + 2) * ROW, "shift_back": (2 + 2) * ROW + ROW // 2}
    others = [i for i in compiled.plan.instructions if isinstance(i, Start) and "shift" not in i.kind]
    assert {start.kind for start in others} == {"all_reduce"}
    largest = max(start.payload_bytes for start in others)
    assert largest < 4 * (6 * 3 * 9 + 6 * 6 * 25 + 6 * 6 * 9 + 1 + 1)  # of weights, and the loss


SEVEN = """<ir_version: 10, opset_import: ["": 18]>
seven (float[4,3,7,8] x, float[6,3,3,3] a, float[6,6,3,3] b) => (float loss) {
    h0 = Conv <pads = [1,1,1,1]> (x, a)
    h1 = Tanh (h0)
    y = Conv <pads = [1,1,1,1], strides = [2,2]> (h1, b)
    z = Tanh (y)
    square = Mul (z, z)
    loss = ReduceMean <keepdims = 0> (square)
}"""


def test_only_rows_that_parts_of_different_sizes_lack_are_sent(tmp_path: Path) -> None:
    """Rows 0 to 3 and 4 to 6 of h1, 0 and 1 and 2 and 3 of y, whose row 2 reads 3 to 5 of h1.

    So row 3 of h1 goes to the second rank, for y and for the gradient of b, and row 2 of dy to the first.
    """
    training = import_training_graph(training_of(SEVEN))

    compiled = compile_step(training, tmp_path / "out", "1x2", "spatial=2", "global")

    starts = [i for i in compiled.plan.instructions if isinstance(i, Start) and i.kind != "all_reduce"]
    assert {start.kind for start in starts} == {"exchange"}
    assert sorted(start.payload_bytes for start in starts) == [ROW // 2, ROW]
    ends = [(move.source, move.target) for s in starts if s.exchange for move in s.exchange.moves]
    assert {end for end in ends if end[0] != end[1]} == {(0, 1), (1, 0)}


def test_rows_of_parts_of_different_sizes_travel_between_processes(tmp_path: Path) -> None:
    training = import_training_graph(training_of(SEVEN))
    compiled = compile_step(training, tmp_path / "out", "1x3", "spatial=3", "global")

    assert verify(compiled.folder, steps=2).passed


def test_a_rank_computes_its_rows_and_the_halo_at_most(tmp_path: Path) -> None:
    training = import_training_graph(training_of(STACK))
    compiled = compile_step(training, tmp_path / "out", "1x4", "spatial=4", "global")

    lowered, facts = compiled.compilation.lowered, compiled.compilation.analysis.facts
    nodes = {node.name: node for node in compiled.compilation.training.graph.nodes}
    windowed = {copy: nodes[name] for copy, name in lowered.original.items() if "Conv" in nodes[name].op}
    assert len(windowed) == 3 + 2 + 3
    for copy in (node for node in lowered.nodes if node.name in windowed):
        node = windowed[copy.name]
        for tensor, local in zip((*node.inputs, *node.outputs), (*copy.inputs, *copy.outputs), strict=True):
            whole, part = facts.shape(tensor.name), lowered.shapes[local.name]
            if tensor.name not in ("a", "b", "c") and "WeightGrad" not in tensor.name:
                assert whole[2] // 4 <= part[2] <= whole[2] // 4 + 4
        assert lowered.flops[copy.name] == max(
            lowered.flops[other] for other in windowed if windowed[other] is node
        )


# ---------------------------------------------------------------- a whole model


def resnet(image: int, **options: object) -> onnx.ModelProto:
    forward = build_model("resnet50", width=4, image=image, classes=5, batch=4, **options)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.01))


@pytest.mark.long
@pytest.mark.parametrize(("cluster", "strategy"), MESHES[:1])
def test_resnet_50_trains_split_in_height(cluster: str, strategy: str, tmp_path: Path) -> None:
    """Of 28, 14, 7, 4 and 2 rows."""
    training = import_training_graph(resnet(56))

    compiled = compile_step(training, tmp_path / "out", cluster, strategy, "global")

    lowered = compiled.compilation.lowered
    maps = [split for layout in lowered.native.values() for _, split in layout.splits() if split.axis == 2]
    assert len(maps) > 300
    assert Split(2, uneven=7) in maps
    assert verified(compiled, random_batches(compiled.plan, 1)).passed


@pytest.mark.long
@pytest.mark.parametrize("image", [64, 112])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("cluster", "strategy"), MESHES)
def test_resnet_50_trains_split_in_height_everywhere(
    cluster: str, strategy: str, batch: str, image: int, tmp_path: Path
) -> None:
    training = import_training_graph(resnet(image))

    compiled = compile_step(training, tmp_path / "out", cluster, strategy, batch)

    assert verified(compiled, random_batches(compiled.plan, 2)).passed


@pytest.mark.parametrize("workers", sampled([2, 4], range(1)))
def test_strips_travel_between_processes(workers: int, tmp_path: Path) -> None:
    training = import_training_graph(training_of(STACK))
    compiled = compile_step(training, tmp_path / "out", f"1x{workers}", f"spatial={workers}", "global")

    assert verify(compiled.folder, steps=2).passed


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [("1x2", "spatial=2,microbatches=2"), ("2x2", "pipeline=2,spatial=2,microbatches=2")],
)
def test_rows_pass_through_stages_and_micro_batches(
    cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    for text, kind in ((STACK, "shift_ahead"), (SEVEN, "exchange")):
        training = import_training_graph(training_of(text))

        compiled = compile_step(training, tmp_path / kind, cluster, strategy, batch)

        starts = [i for i in compiled.plan.instructions if isinstance(i, Start)]
        assert kind in {start.kind for start in starts}
        assert verified(compiled, random_batches(compiled.plan, 2)).passed


# ---------------------------------------------------------------- by file


@dataclass(frozen=True)
class SplitByFile:
    """What a strategy file asks of the second convolution of STACK, whose rows are 16 and columns 8."""

    mesh: dict[str, int]
    split: dict[str, int | str]


def by_file(asked: SplitByFile) -> Strategy:
    ops = (OpConfig("Conv:h2", asked.split),)
    return Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh=asked.mesh, ops=ops)


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [
        ("1x2", SplitByFile({"data": 1, "rows": 2}, {"out:2": "rows"})),
        ("1x2", SplitByFile({"data": 2}, {"out:2": "data"})),
        ("1x4", SplitByFile({"data": 1, "columns": 4}, {"out:3": "columns"})),
        ("2x2", SplitByFile({"data": 1, "rows": 2, "columns": 2}, {"out:2": "rows", "out:3": "columns"})),
        ("2x2", SplitByFile({"data": 1, "rows": 2, "tensor": 2}, {"out:2": "rows", "out:1": "tensor"})),
        ("1x3", SplitByFile({"data": 1, "rows": 3}, {"out:2": "rows"})),  # 6, 5 and 5
        ("2x8", SplitByFile({"data": 1, "rows": 16}, {"out:2": "rows"})),  # windows reach over two neighbours
        ("2x3", SplitByFile({"data": 1, "rows": 3, "columns": 2}, {"out:2": "rows", "out:3": "columns"})),
        ("2x3", SplitByFile({"data": 1, "rows": 2, "columns": 3}, {"out:2": "rows", "out:3": "columns"})),
        ("3x3", SplitByFile({"data": 1, "rows": 3, "columns": 3}, {"out:2": "rows", "out:3": "columns"})),
        ("2x3", SplitByFile({"data": 1, "tensor": 2, "rows": 3}, {"out:2": "rows", "in:0:1": "tensor"})),
        (
            "2x3",
            SplitByFile({"data": 3, "rows": 2}, {"batch": "data", "out:2": "rows"}),
        ),  # 2, 1 and 1 samples
        (
            "2x4",
            SplitByFile(
                {"data": 2, "rows": 2, "tensor": 2}, {"batch": "data", "out:2": 2, "in:0:1": "tensor"}
            ),
        ),
    ],
)
def test_a_file_splits_rows_columns_and_channels_together(
    cluster: str, asked: SplitByFile, tmp_path: Path
) -> None:
    training = import_training_graph(training_of(STACK))
    oracle = Oracle(training)

    compiled = compile_step(training, tmp_path / "out", cluster, by_file(asked), "global")

    batches = random_batches(compiled.plan, 2)
    assert oracle.first_wrong(compiled, batches[0], ROUNDED) is None
    assert verified(compiled, batches).passed
    layouts = [layout for _, layout in compiled.compilation.lowered.meanings.values()]
    assert any(layout.widened() or layout.overlapping() for layout in layouts)


# Convolutions whose terms, one of each half of the channels, are added only when nothing but a row is left.
TERMS = """<ir_version: 10, opset_import: ["": 18]>
terms (float[4,3,7,8] x, float[8,3,3,3] a, float[8,8,3,3] b, float[1,8,3,3] c) => (float loss) {
    h1 = Conv <pads = [1,1,1,1]> (x, a)
    h2 = Conv <pads = [1,1,1,1]> (h1, b)
    y = Conv <pads = [1,1,1,1]> (h2, c)
    z = Tanh (y)
    square = Mul (z, z)
    loss = ReduceMean <keepdims = 0> (square)
}"""


def test_terms_of_a_sum_take_their_own_neighbours_rows(tmp_path: Path) -> None:
    training = import_training_graph(training_of(TERMS))
    oracle = Oracle(training)
    split = {"out:2": "rows", "in:0:1": "tensor"}

    compiled = compile_step(
        training,
        tmp_path / "out",
        "1x6",
        by_file(SplitByFile({"data": 1, "tensor": 2, "rows": 3}, split)),
        "global",
    )

    operands = {
        layout for _, layout in compiled.compilation.lowered.meanings.values() if layout.overlapping()
    }
    assert any(isinstance(layout.along(1), Partial) for layout in operands)
    assert oracle.first_wrong(compiled, random_batches(compiled.plan, 1)[0], ROUNDED) is None


# Each resizes images of 8 rows and 6 columns along axes that it names, and keeps one that is split.
NAMED_AXES = {
    "rows": ({"data": 1, "rows": 4}, {"out:2": "rows"}, "[2,3]", "[8,12]"),
    "uneven_rows": ({"data": 1, "rows": 3}, {"out:2": "rows"}, "[2,3]", "[8,12]"),
    "columns": ({"data": 1, "columns": 2}, {"out:3": "columns"}, "[3,2]", "[6,16]"),
    "samples": ({"data": 2}, {"batch": "data"}, "[0,1,2,3]", "[4,4,9,12]"),
    "channels": ({"data": 1, "tensor": 2}, {"out:1": "tensor"}, "[1,2,3]", "[4,9,12]"),
    "any_order": ({"data": 1, "rows": 2}, {"out:2": "rows"}, "[-1,1,2]", "[12,4,8]"),
}


@pytest.mark.parametrize("named", NAMED_AXES)
def test_a_resize_of_named_axes_keeps_one_that_is_split(named: str, tmp_path: Path) -> None:
    mesh, split, axes, sizes = NAMED_AXES[named]
    training = import_training_graph(
        training_of(f"""<ir_version: 10, opset_import: ["": 21]>
        named (float[4,3,8,6] x, float[4,3,3,3] a) => (float loss) {{
            h2 = Conv <pads = [1,1,1,1]> (x, a)
            sizes = Constant <value_ints = {sizes}> ()
            resized = Resize <mode = "linear", axes = {axes}> (h2, , , sizes)
            square = Mul (resized, resized)
            loss = ReduceMean <keepdims = 0> (square)
        }}""")
    )
    oracle = Oracle(training)

    compiled = compile_step(
        training, tmp_path / "out", f"1x{prod(mesh.values())}", by_file(SplitByFile(mesh, split)), "global"
    )

    assert oracle.first_wrong(compiled, random_batches(compiled.plan, 1)[0], ROUNDED) is None


# Only the data tells what the images are resized to.
RESIZED_AS_FED = """
step (float[4,3,8,6] x, int64[2] sizes, float[4,3,3,3] a) => (float loss, float[4,3,3,3] a_next) {
    h2 = Conv <pads = [1,1,1,1]> (x, a)
    resized = Resize <mode = "linear", axes = [2,3]> (h2, , , sizes)
    bounded = Tanh (resized)
    loss = ReduceMean <keepdims = 0> (bounded)
    a_next = Sub (a, loss)
}"""


def test_samples_are_split_where_the_data_tells_sizes_of_named_axes(tmp_path: Path) -> None:
    options = GraphOptions(state={"a": "a_next"}, loss="loss")
    training = import_training_graph(parse(RESIZED_AS_FED), options, needs_initial=False)
    oracle = Oracle(training)

    compiled = compile_step(training, tmp_path / "out", "1x2", "data=2", "global")

    (batch,) = random_batches(compiled.plan, 1)
    assert oracle.first_wrong(compiled, batch | {"sizes": np.array([9, 12])}, ROUNDED) is None


DILATED = "kernel_shape = [3,4], strides = [4,4], pads = [0,3,1,1], dilations = [1,3], ceil_mode = 1"


@pytest.mark.parametrize("columns", [7, 8])
@pytest.mark.parametrize(
    "pooling",
    [
        f"AveragePool <{DILATED}>",
        f"AveragePool <{DILATED}, count_include_pad = 1>",
        'AveragePool <kernel_shape = [3,2], dilations = [1,4], auto_pad = "SAME_UPPER">',
        'MaxPool <kernel_shape = [3,2], dilations = [1,3], auto_pad = "SAME_UPPER">',
        'MaxPool <kernel_shape = [3,3], dilations = [1,4], auto_pad = "SAME_LOWER">',
        'LpPool <kernel_shape = [3,2], dilations = [1,5], auto_pad = "SAME_LOWER">',
    ],
)
def test_columns_may_have_more_padding_than_a_kernel(pooling: str, columns: int, tmp_path: Path) -> None:
    model = parse(
        f"""step (float[4,2,5,{columns}] x, float[2,2,3,3] W) => (float loss, float[2,2,3,3] W_next) {{
            h = Conv <pads = [1,1,1,1]> (x, W)
            p = {pooling} (h)
            s = Mul (p, p)
            loss = ReduceMean <keepdims = 0> (s)
            W_next = Sub (W, loss)
        }}""",
        22,
    )
    rng = np.random.default_rng(0)
    first = rng.normal(size=(2, 2, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(first, "W"))
    training = import_training_graph(model, GraphOptions(state={"W": "W_next"}))
    oracle = Oracle(training)

    compiled = compile_step(training, tmp_path / "out", "1x2", "spatial=2", "global")

    assert oracle.first_wrong(compiled, random_batches(compiled.plan, 1)[0], 1e-5) is None


def test_more_parts_than_columns_are_refused(tmp_path: Path) -> None:
    asked = SplitByFile({"data": 1, "columns": 9}, {"out:3": "columns"})

    with pytest.raises(BadStrategy, match="cannot split out:3 into 9 parts: it has 8 entries"):
        compile_step(
            import_training_graph(training_of(STACK)), tmp_path / "out", "3x3", by_file(asked), "global"
        )


def test_rows_along_two_axes_are_refused_and_what_the_refusal_says_to_do_splits_them(tmp_path: Path) -> None:
    training = import_training_graph(training_of(STACK))
    oracle = Oracle(training)
    asked = by_file(SplitByFile({"data": 1, "a": 2, "b": 2}, {"out:2": "a*b"}))

    with pytest.raises(BadStrategy, match="into 4 parts along 2 mesh axes") as refused:
        compile_step(training, tmp_path / "refused", "2x2", asked, "global")
    assert refused.value.fix == 'name its own `devices`, and write the number of parts: "out:2": 4'

    devices = tuple(rank.device for rank in ranks_of(cluster_of("2x2")))
    own = replace(asked, ops=(OpConfig("Conv:h2", {"out:2": 4}, devices=devices),))
    compiled = compile_step(training, tmp_path / "out", "2x2", own, "global")
    assert oracle.first_wrong(compiled, random_batches(compiled.plan, 1)[0], ROUNDED) is None
