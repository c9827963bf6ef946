"""Random numbers drawn inside a step: as inputs that every rank draws for its own samples."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad
from partc.compiler.importing.draw_random_inputs import draw_random_inputs
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.compiler.verification.reference import make_reference
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.data.initial import InitialValues
from partc.runtime.data.step_draws import draw_total
from partc.runtime.errors import UnsupportedModel
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.variables import Normal, Uniform
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)
from tests.checks.training_steps import EVERYTHING

SWITCHES = "r = Constant <value = float {0.25}> () on = Constant <value = bool {1}> ()"

# An embedding, a normalisation and two dropouts, the second where samples and words are one axis.
BATCH_MAJOR = f"""
net (int64[batch,5] ids) => (double[batch,5,7] logits) {{
    {SWITCHES}
    e = Gather (E, ids)
    d = Dropout (e, r, on)
    n = LayerNormalization <axis = -1> (d, g, b)
    h = MatMul (n, W1)
    a = Tanh (h)
    flat = Reshape (a, rows)
    f = Dropout <seed = 3> (flat, r, on)
    o = MatMul (f, W2)
    logits = Reshape (o, words)
}}"""
# Words before samples: of the merged axis each rank has every word of its samples.
TIME_MAJOR = BATCH_MAJOR.replace("[batch,5", "[5,batch")
NETWORKS = {"batch-major": BATCH_MAJOR, "time-major": TIME_MAJOR}
CLUSTERS = ("1x1", "1x2", "2x2", "2x2s")
STRATEGIES = ("allreduce", "ps", "hybrid")


def parse(text: str, **tensors: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in tensors.items())
    return model


def dropout_step(name: str) -> TrainingGraph:
    text, rng = NETWORKS[name], np.random.default_rng(0)
    shapes = {"E": (11, 6), "g": (6,), "b": (6,), "W1": (6, 8), "W2": (8, 7)}
    words = [-1, 5, 7] if name == "batch-major" else [5, -1, 7]
    network = parse(
        text,
        rows=np.array([-1, 8]),
        words=np.array(words),
        **{parameter: rng.normal(size=shape) for parameter, shape in shapes.items()},
    )
    built = build_training_graph(network, loss="softmax_cross_entropy", optimizer=Adagrad(0.1))
    axes = {"ids": 1, "labels": 1} if name == "time-major" else {}
    return import_training_graph(built, GraphOptions(sample_axes=axes))


def compiled_dropout(
    name: str, out: Path, cluster: str, strategy: str = "allreduce", batch: str = "per-replica", size: int = 8
) -> Compiled:
    return compile_step(dropout_step(name), out, cluster, strategy, batch, sizes={"batch": size})


# ---------------------------------------------------------------- N ranks draw what one device draws


CASES = list(product(NETWORKS, CLUSTERS, STRATEGIES, ("per-replica", "global")))


@pytest.mark.parametrize(("name", "cluster", "strategy", "batch"), CASES[::9])
def test_dropout_trains_as_on_one_device(
    name: str, cluster: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    done = compiled_dropout(name, tmp_path / "out", cluster, strategy, batch)

    assert_trains_as_one_device(done, random_batches(done.plan, 3))


@pytest.mark.long
@pytest.mark.parametrize(("name", "cluster", "strategy", "batch"), CASES)
def test_every_dropout(name: str, cluster: str, strategy: str, batch: str, tmp_path: Path) -> None:
    test_dropout_trains_as_on_one_device(name, cluster, strategy, batch, tmp_path)


@pytest.mark.parametrize("name", NETWORKS)
def test_replicas_of_small_batches_draw_what_one_device_draws_for_the_large_one(
    name: str, tmp_path: Path
) -> None:
    """The loss is a mean over samples: both readings of the batch are one step of the whole batch."""
    replicas = compiled_dropout(name, tmp_path / "replicas", "2x2", size=2)
    one = compiled_dropout(name, tmp_path / "one", "1x1", batch="global", size=8)
    batches = random_batches(one.plan, 3)

    found = train_in_process(replicas.folder, batches).variables
    expected = train_in_process(one.folder, batches).variables

    for variable, value in expected.items():
        np.testing.assert_allclose(found[variable], value, rtol=1e-9, atol=1e-12, err_msg=variable)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_global_reading_splits_a_draw_as_it_splits_the_samples(name: str, tmp_path: Path) -> None:
    done = compiled_dropout(name, tmp_path / "out", "2x2", batch="global")

    assert [(d.sample_axis, d.outer) for d in done.plan.drawn_inputs] == (
        [(0, 1), (0, 1)] if name == "batch-major" else [(1, 1), (0, 5)]
    )
    assert [d.shape for d in done.plan.drawn_inputs][1] == ("5*batch", 8)
    kinds = ("all_gather", "all_gather_rows", "all_to_all_rows")
    assert not [label for kind in kinds for label in done.started(kind) if "drawn" in label]


def test_verify_rejects_replicas_that_draw_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from partc.runtime.data import step_draws

    done = compiled_dropout("batch-major", tmp_path / "out", "1x2")
    drawn_by_part = step_draws._draw

    def first_part(plan, drawn, sizes, part, *rest):  # the mistake: everybody draws the first one's rows
        return drawn_by_part(plan, drawn, sizes, 0, *rest)

    monkeypatch.setattr(step_draws, "_draw", first_part)
    with pytest.raises(AssertionError, match="differ"):
        assert_trains_as_one_device(done, random_batches(done.plan, 2))


# ---------------------------------------------------------------- what is drawn

NOISE = """
step (double[4,16] x, double[16,16] W) => (double loss, double[16,16] W_next) {
    h = MatMul (x, W) z = OP y = Mul (h, z) loss = ReduceSum <keepdims = 0> (y)
    xt = Transpose <perm = [1, 0]> (x) dW = MatMul (xt, z) W_next = Sub (W, dW) }"""
DRAWS = {
    "RandomUniform <shape = [4, 16], low = -1.0, high = 3.0, dtype = 11> ()": Uniform(-1.0, 3.0, 1),
    "RandomNormal <shape = [4, 16], mean = 2.0, scale = 0.5, dtype = 11, seed = 9.0> ()": Normal(2.0, 0.5, 9),
    "RandomNormalLike (h)": Normal(0.0, 1.0, 1),
    "RandomUniformLike <seed = 0.5> (h)": Uniform(0.0, 1.0, int(np.float64(0.5).view(np.int64))),
}


@pytest.mark.parametrize("op", DRAWS)
@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_random_ops_are_drawn_and_split(op: str, batch: str, tmp_path: Path) -> None:
    done = compile_step(import_text(NOISE.replace("OP", op)), tmp_path / "out", "2x2", "allreduce", batch)

    (drawn,) = done.plan.drawn_inputs
    assert (drawn.dtype, drawn.shape, drawn.sample_axis) == ("float64", (4, 16), 0)
    assert drawn.distribution == DRAWS[op]
    assert drawn.follows_run == ("seed" not in op)
    assert_trains_as_one_device(done, random_batches(done.plan, 2))


def test_a_draw_that_meets_no_sample_is_the_same_for_all(tmp_path: Path) -> None:
    """Noise on the weights themselves: one device draws it once."""
    text = """step (double[4,16] x, double[16,16] W) => (double loss, double[16,16] W_next) {
        z = RandomNormalLike (W) noisy = Add (W, z) h = MatMul (x, noisy) s = Mul (h, x)
        loss = ReduceSum <keepdims = 0> (s) xt = Transpose <perm = [1, 0]> (x) dW = MatMul (xt, x)
        part = Mul (dW, z) W_next = Sub (W, part) }"""

    done = compile_step(import_text(text), tmp_path / "out", "2x2", "ps")

    assert done.plan.drawn_inputs[0].sample_axis is None
    assert_trains_as_one_device(done, random_batches(done.plan, 2))


DISCRETE = {
    "Bernoulli (p)": ("double[20000]", np.full(20000, 0.3), [0.7, 0.3]),
    "Bernoulli <dtype = 7> (p)": ("double[20000]", np.full(20000, 0.3), [0.7, 0.3]),
    "Multinomial <sample_size = 20000> (p)": (
        "float[1,3]",
        np.log([[0.5, 0.3, 0.2]]).astype(np.float32),
        [0.5, 0.3, 0.2],
    ),
}


@pytest.mark.parametrize("op", DISCRETE)
def test_discrete_draws_have_their_probabilities(op: str) -> None:
    kind, given, expected = DISCRETE[op]
    text = f"net ({kind} p) => (y) {{ y = {op} }}"
    model, (drawn,) = draw_random_inputs(parse(text))
    session = onnx.reference.ReferenceEvaluator(model)
    uniform = np.random.default_rng(0).random(drawn.shape).astype(drawn.dtype)

    (found,) = session.run(None, {"p": given, drawn.name: uniform})

    shares = np.bincount(found.astype(int).ravel(), minlength=len(expected)) / found.size
    np.testing.assert_allclose(shares, expected, atol=0.015)


def masks(step: int, seed: int, tmp_path: Path) -> list[np.ndarray]:
    done = compiled_dropout("batch-major", tmp_path / f"{step}-{seed}", "1x2", size=64)
    batch = random_batches(done.plan, 1)[0]
    return [drawn >= 0.25 for drawn in draw_total(done.plan, batch, step, seed).values()]


def test_masks_differ_by_replica_step_and_run_but_not_by_repetition(tmp_path: Path) -> None:
    first, second = masks(0, 0, tmp_path)

    assert not np.array_equal(*np.split(first, 2))
    assert abs(first.mean() - 0.75) < 0.01
    assert abs(second.mean() - 0.75) < 0.01
    again = masks(0, 0, tmp_path / "again")
    assert all(np.array_equal(one, other) for one, other in zip((first, second), again, strict=True))
    assert not any(np.array_equal(*pair) for pair in zip((first, second), masks(1, 0, tmp_path), strict=True))
    other_run = masks(0, 1, tmp_path)
    assert not np.array_equal(first, other_run[0])
    assert np.array_equal(second, other_run[1])  # its node has a seed of its own


def test_a_run_that_goes_on_draws_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    done = compiled_dropout("batch-major", tmp_path / "out", "1x2")
    batches = random_batches(done.plan, 4)

    whole = train_in_process(done.folder, batches).variables
    begun = train_in_process(done.folder, batches[:2]).variables
    ended = train_in_process(done.folder, batches[2:], begun, first_step=2).variables
    restarted = train_in_process(done.folder, batches[2:], begun).variables

    assert all(np.array_equal(whole[name], ended[name]) for name in whole)
    assert not all(np.array_equal(whole[name], restarted[name]) for name in whole)


def test_what_is_dropped_gets_no_gradient(tmp_path: Path) -> None:
    """y = Dropout(x * W): a weight moves by the scale where its mask is set, and else not at all."""
    text = f"""net (double[1,400] x) => (double loss) {{ {SWITCHES} h = Mul (x, W) y = Dropout (h, r, on)
        loss = ReduceSum <keepdims = 0> (y) }}"""
    forward = parse(text, W=np.ones((1, 400)))
    built = build_training_graph(forward, loss="loss", optimizer=SGD(1.0), parameters=EVERYTHING)
    done = compile_step(import_training_graph(built), tmp_path / "out", "1x1")
    batch = {"x": np.ones((1, 400))}
    (drawn,) = draw_total(done.plan, batch, 0, 0).values()

    found = train_in_process(done.folder, [batch]).variables["W"]

    np.testing.assert_allclose(1 - found, np.where(drawn >= 0.25, 1 / 0.75, 0.0))


def test_a_dropout_told_not_to_train_passes_everything(tmp_path: Path) -> None:
    text = """net (double[4,16] x, bool t) => (double loss) { r = Constant <value = float {0.25}> ()
        h = MatMul (x, W) y = Dropout (h, r, t) loss = ReduceSum <keepdims = 0> (y) }"""
    built = build_training_graph(parse(text, W=np.ones((16, 2))), loss="loss", optimizer=SGD(1.0))
    done = compile_step(import_training_graph(built), tmp_path / "out", "1x2")
    plan, x = done.plan, np.ones((8, 16))
    reference = make_reference(plan, done.folder.path / plan.model)
    start = {"W": InitialValues(done.folder).part("W")}

    for training, is_dropped in ((False, False), (True, True)):
        batch = {"x": x, "t": np.array(training)}
        following = reference.step(start, batch | draw_total(plan, batch, 0, 0)).variables
        found = train_in_process(done.folder, [batch]).variables

        np.testing.assert_allclose(found["W"], following["W"], rtol=1e-12)
        assert np.allclose(found["W"], 1 - 4.0) != is_dropped


# ---------------------------------------------------------------- what is left alone, what is refused


def test_a_graph_that_draws_nothing_is_left_alone() -> None:
    model = parse("net (float[2] x) => (float[2] y) { y = Dropout (x) }")

    same, drawn = draw_random_inputs(model)

    assert same is model
    assert drawn == ()


def test_a_draw_in_a_body_is_refused() -> None:
    text = """net (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = a () => (float[2] p) { p = RandomNormalLike (x) },
                    else_branch = b () => (float[2] q) { q = Identity (x) }> }"""

    with pytest.raises(UnsupportedModel, match="draw outside of it"):
        draw_random_inputs(parse(text))


def test_a_draw_like_what_no_rule_divides_is_one_draw_or_refused(tmp_path: Path) -> None:
    text = """step (float[4,3,5] x, float[5,2] W) => (float loss, float[5,2] W_next)
        <float[3] one = {1, 1, 1}, int64[2] axes = {0, 1}, int64[2] column = {5, 1}> {
        n = InstanceNormalization (x, one, one) z = RandomNormalLike (n) m = Mul (n, z)
        y = MatMul (m, W) loss = ReduceSum <keepdims = 0> (y) s = ReduceSum <keepdims = 0> (m, axes)
        c = Reshape (s, column) none = Sub (W, W) dW = Add (c, none) W_next = Sub (W, dW) }"""
    axes = {"x": 0}

    with pytest.raises(UnsupportedModel, match="--batch global"):
        compile_step(import_text(text, sample_axes=axes), tmp_path / "replicas", "2x2")
    done = compile_step(import_text(text, sample_axes=axes), tmp_path / "out", "2x2", batch="global")

    assert_trains_as_one_device(done, random_batches(done.plan, 2))


def test_noise_on_a_gradient_is_drawn_once_for_all(tmp_path: Path) -> None:
    text = NOISE.replace("OP", "Identity (h)").replace(
        "W_next = Sub (W, dW)", "noise = RandomNormalLike (dW) g = Add (dW, noise) W_next = Sub (W, g)"
    )
    training = import_text(text)

    done = compile_step(training, tmp_path / "out", "2x2", "ps")

    assert training.gradients["W"].dense == "dW"
    assert_trains_as_one_device(done, random_batches(done.plan, 2))


def test_a_draw_whose_size_only_data_tells_is_refused() -> None:
    text = "net (float[n] x) => (y) { ids = NonZero (x) f = Cast <to = 1> (ids) y = RandomNormalLike (f) }"

    with pytest.raises(UnsupportedModel, match="fixed sizes"):
        draw_random_inputs(parse(text))
