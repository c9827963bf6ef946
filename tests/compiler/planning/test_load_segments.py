"""What ONNX Runtime cannot run is refused while compiling, and leaves nothing behind."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import compile_graph
from partc.compiler.planning.load_segments import load_segments
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.passes.scheduling import write_segments
from partc.runtime.errors import InternalError, UnsupportedModel
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    cluster_of,
    compile_step,
    import_text,
    random_batches,
)

SQUARES = """
step ({of}[8,4] x, {of}[4,3] W) => ({of} loss, {of}[4,3] W_next) <{of} rate = {{0.1}}> {{
    y = MatMul (x, W)
    e = {op} (y)
    sq = Mul (y, e)
    loss = ReduceMean <keepdims = 0> (sq)
    d = Mul (e, rate)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, d)
    W_next = Sub (W, dW)
}}
"""


def squares(of: str = "float", op: str = "Erf") -> str:
    return SQUARES.format(of=of, op=op)


def test_an_op_without_a_kernel_for_its_type_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    training = import_text(squares("double"))

    with pytest.raises(UnsupportedModel, match=r"(?s)Erf in float64.*at:  node 'Erf_1'.*float32"):
        compile_graph(training, cluster_of("2x2"), tmp_path / "out", Options())

    assert list(tmp_path.iterdir()) == []


def test_what_only_gpus_run_needs_no_kernel_on_a_cpu(tmp_path: Path) -> None:
    compiled = compile_graph(import_text(squares("double")), cluster_of("1x2s"), tmp_path / "out", Options())

    assert {rank.kind for rank in compiled.plan.ranks if rank.replica is not None} == {"gpu"}


def test_a_segment_that_is_wrong_is_named_with_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rewriting that breaks names, as one did: found while compiling, not by the executors."""

    def name_all_alike(model: onnx.ModelProto, typed: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.name = "twice"

    monkeypatch.setattr(write_segments, "align_scalars", name_all_alike)

    with pytest.raises(InternalError, match=r"(?s)at:  node 'twice'.* in segments/.*a mistake of partc's"):
        compile_graph(import_text(squares()), cluster_of("2x2"), tmp_path / "out", Options())

    assert list(tmp_path.iterdir()) == []


def test_every_segment_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_step(import_text(squares()), tmp_path / "out", "2x2", "ps")
    opened: list[str] = []
    opener = "partc.compiler.planning.load_segments.open_session"
    monkeypatch.setattr(opener, lambda path, *rest, **more: opened.append(path.name))

    load_segments(compiled.folder.path, compiled.plan)

    assert sorted(opened) == sorted(path.name for path in (tmp_path / "out/segments").iterdir())


RECIPROCAL = """
step (float[8,4] x, float[4,3] W, float[3] g)
=> (float loss, float[8,3] copy, float[4,3] W_next, float[3] g_next)
<float rate = {0.1}, float one = {1}, int64[1] first = {0}> {
    y = MatMul (x, W)
    e = Sigmoid (y)
    scale = Exp (g)
    inverse = Div (one, scale)
    scaled = Mul (operands)
    copy = Identity (e)
    sq = Mul (scaled, scaled)
    loss = ReduceMean <keepdims = 0> (sq)
    d = Mul (scaled, rate)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, d)
    W_next = Sub (W, dW)
    dg = ReduceSum <keepdims = 0> (d, first)
    g_next = Sub (g, dg)
}
"""


@pytest.mark.parametrize("operands", ["e, inverse", "inverse, e"])
@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
@pytest.mark.parametrize("batch", ["global", "per-replica"])
def test_a_value_that_a_reciprocal_multiplies_may_be_copied_to_an_output(
    operands: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    """onnxruntime 1.31.1 renames such a value, and refuses the segment: its issue 32413."""
    step = import_text(RECIPROCAL.replace("operands", operands))

    compiled = compile_step(step, tmp_path / "out", "2x2", strategy, batch=batch)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


GATED = """
gated (float[4,3,4] x, float[4,6] W0, float[4,6] W1, float[6,4] W2) => (float loss)
<float half = {0.5}, float three = {3}, float k = {0.044715}, float c = {0.7978845608}, float one = {1}> {
    h = MatMul (x, W0)
    s = Mul (h, half)
    p = Pow (h, three)
    m = Mul (p, k)
    a = Add (h, m)
    b = Mul (a, c)
    t = Tanh (b)
    d = Add (t, one)
    g = Mul (s, d)
    u = MatMul (x, W1)
    gu = Mul (g, u)
    y = MatMul (gu, W2)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("splits", [("in:1:0", "out:2", "out:2"), ("in:1:0/2", "in:1:0/2", "in:0:2")])
def test_a_gelu_may_be_whole_forward_and_in_parts_backward(
    splits: tuple[str, ...], microbatches: int, tmp_path: Path
) -> None:
    """onnxruntime 1.31.1 makes one op of Gelu in float32, and loses the half that the way back reads."""
    forward = parse(GATED)
    for node in forward.graph.node:
        node.name = node.output[0]
    rng = np.random.default_rng(0)
    for info in forward.graph.input[1:]:
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        forward.graph.initializer.append(
            onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), info.name)
        )
    step = build_training_graph(forward, loss="loss", optimizer=SGD(0.1), parameters=ParameterChoice(("W*",)))
    devices = ("host0/cpu0", "host0/cpu1")
    ops = tuple(
        OpConfig(op, {"batch": 1, split: 2}, devices=devices)
        for op, split in zip(("h", "u", "y"), splits, strict=True)
    )
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops, microbatches=microbatches)

    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", strategy, "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))


CLIPPED = """
step ({of}[8,4] x, {of}[4,3] W) => ({of} loss, {of}[4,3] W_next)
<{of} rate = {{0.1}}, {of} least = {{{least}}}, {of} most = {{0.6}}, {of} zero = {{0}}> {{
    y = MatMul (x, W)
    r = Relu (y)
    e = Clip (r, least, most)
    sq = Mul (e, e)
    loss = ReduceMean <keepdims = 0> (sq)
    up = Greater (y, zero)
    low = Less (y, most)
    passes = And (up, low)
    g = Where (passes, e, zero)
    d = Mul (g, rate)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, d)
    W_next = Sub (W, dW)
}}
"""


@pytest.mark.parametrize("least", ["0", "-1"])
@pytest.mark.parametrize("of", ["float", "double"])
def test_a_relu_may_be_clipped_in_any_precision(of: str, least: str, tmp_path: Path) -> None:
    """onnxruntime 1.31.1 makes one of the two, and refuses segments where they are not in 16 or 32 bits."""
    step = import_text(CLIPPED.format(of=of, least=least))

    compiled = compile_step(step, tmp_path / "out", "2x2", "allreduce")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
