"""What rounding of gradients may lead to in a step, and that verify allows no more than that."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD, Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.compiler.verification.nudge_terms import SCATTER, perturb_last_bits, scatter_terms
from partc.compiler.verification.ranks import Data, Ranks
from partc.compiler.verification.reference import make_reference
from partc.compiler.verification.rounding import perturb_variables
from partc.compiler.verification.sessions import Session
from partc.compiler.verification.verify import VerifyReport, launch_in_process, verify
from partc.runtime.data.initial import InitialValues
from partc.runtime.plan.plan_folder import PlanFolder
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.small_steps import training_of
from tests.builders.plans.compiled_steps import Batch, Compiled, compile_step, random_batches
from tests.checks.training_steps import EVERYTHING

# A softmax over keys does not change where all keys' scores do: the gradient of `shift` is zero in theory.
ATTENTION = """
attend (float[16,32,4] x) => (float loss)
<float[4,4] Wq = {0.1, 0.7, -0.3, 0.2, 0.5, -0.6, 0.4, 0.9, -0.8, 0.3, 0.2, 0.1, 0.6, -0.2, 0.7, -0.4},
 float[4] shift = {0.3, 0.1, 0.2, 0.4}> {
    q = MatMul (x, Wq)
    k = Add (x, shift)
    kt = Transpose <perm = [0, 2, 1]> (k)
    scores = MatMul (q, kt)
    weights = Softmax <axis = -1> (scores)
    y = MatMul (weights, x)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""

ATTENTION_WITH_A_SCALAR = ATTENTION.replace("float[4] shift = {0.3, 0.1, 0.2, 0.4}", "float shift = {0.3}")


# The sign of a gradient decides about the step; that of `b` is the rounding of a sum that cancels, but where
# `x` is zero there is no gradient at all.
SIGNS = """
step (float[4,3] x, float[3] W, float[3] b) => (float[3] W_next, float[3] b_next)
<int64[1] samples = {0}> {
    near = Add (b, W)
    far = Mul (near, x)
    again = Mul (W, x)
    own = Mul (b, x)
    cancelled0 = Sub (far, again)
    cancelled = Sub (cancelled0, own)
    db = ReduceSum <keepdims = 0> (cancelled, samples)
    dW = ReduceSum <keepdims = 0> (x, samples)
    turn = Sign (db)
    b_next = Sub (b, turn)
    W_next = Sub (W, dW)
}
"""


def test_the_last_bits_are_nudged() -> None:
    values = {"W": np.linspace(1, 2, 64, dtype=np.float32), "n": np.arange(3), "scale": np.array(8.0)}

    changed = perturb_variables({**values, "x": np.ones(2)}, values, np.random.default_rng(0), {})

    moved = changed["W"] - values["W"]
    assert 0 < np.abs(moved).max() <= 2 * np.finfo(np.float32).eps * 2
    assert changed["W"].dtype == np.float32
    np.testing.assert_array_equal(changed["n"], values["n"])
    np.testing.assert_array_equal(changed["x"], np.ones(2))


def test_the_last_bits_of_what_is_computed_in_16_bits_are_those_of_16_bits() -> None:
    values = {"W": np.linspace(1, 2, 64, dtype=np.float32)}
    half = {"W": np.dtype(np.float16)}

    changed = perturb_variables(values, values, np.random.default_rng(0), half)["W"]

    assert np.count_nonzero(changed.astype(np.float16) != values["W"].astype(np.float16)) > 32
    np.testing.assert_allclose(changed, values["W"], rtol=1.1 * np.finfo(np.float16).eps)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_terms_of_sums_are_nudged_in_their_own_type(dtype: type) -> None:
    kind = {np.float16: "float16", np.float32: "float", np.float64: "double"}[dtype]
    model = parse(f"sums ({kind}[64] x) => ({kind} total) {{ total = ReduceSum <keepdims = 0> (x) }}")
    inputs = {"x": np.random.default_rng(0).permutation(np.repeat([-1, 1], 32)).astype(dtype)}

    def farthest(nudged: onnx.ModelProto) -> float:
        session = Session(nudged, ["total"])
        return max(abs(float(session.run(inputs)["total"])) for _ in range(4))

    assert 0 < farthest(perturb_last_bits(model, ["total"])) < 64 * np.finfo(dtype).eps
    assert 0 < farthest(scatter_terms(model)) < 64 * 2 * SCATTER


@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_rounding_may_turn_a_step_but_not_where_there_is_no_gradient(tmp_path: Path, batch: str) -> None:
    training = training_of(SIGNS, {"x": 0})
    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", batch)
    reference = make_reference(compiled.plan, compiled.folder.path / "train.onnx")
    (data,) = random_batches(compiled.plan, 1)
    data["x"][:, 2] = 0
    start = {"W": np.full(3, 1000, np.float32), "b": np.array([0.3, 0.7, 0.6], np.float32)}

    found = reference.rounding(start, data)

    assert found.variables["b"][:2].min() >= 2
    assert found.variables["b"][2] == 0
    assert found.variables["W"].max() == 0


# Of the second half of the samples, the second replica's, the units are 4 eps above zero, where they let a
# gradient of 1 through; the first half's are far from zero.
UNITS = """
step (float[4,16] x, float[16] W) => (float[16] W_next)
<int64[1] samples = {0}, float rate = {1}, float zero = {0}> {
    near = Sub (x, W)
    is_on = Less (zero, near)
    gate = Cast <to = 1> (is_on)
    dW = ReduceMean <keepdims = 0> (gate, samples)
    part = Mul (dW, rate)
    W_next = Sub (W, part)
}
"""


@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_thoroughly_measured_a_unit_near_zero_may_come_out_on_either_side(tmp_path: Path, batch: str) -> None:
    training = training_of(UNITS, {"x": 0})
    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", batch)
    reference = make_reference(compiled.plan, compiled.folder.path / "train.onnx")
    (data,) = random_batches(compiled.plan, 1)
    total = len(data["x"])
    data["x"] = np.full((total, 16), 2, np.float32)
    data["x"][total // 2 :] = 1 + 4 * np.finfo(np.float32).eps
    start = {"W": np.ones(16, np.float32)}

    assert reference.rounding(start, data).variables["W"].max() < 1e-5
    thorough = reference.rounding(start, data, thoroughly=True).variables["W"]
    assert thorough.min() >= 0.5
    start["W"][:] = -1
    assert reference.rounding(start, data, thoroughly=True).variables["W"].max() < 1e-5


# Every label is as frequent as softmax (0) expects: all gradients of `b` are sums that cancel, and `b` has no
# last bits that could tell.
BALANCED = """
balanced (float[12,3] one_hot) => (float loss) <float[3] b = {0, 0, 0}> {
    like = Sub (one_hot, one_hot)
    logits = Add (like, b)
    logs = LogSoftmax <axis = -1> (logits)
    terms = Mul (logs, one_hot)
    total = ReduceSum <keepdims = 0> (terms)
    loss = Neg (total)
}
"""


@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_a_sum_of_terms_that_cancel_is_rounding_though_its_parameter_is_zero(
    tmp_path: Path, batch: str
) -> None:
    step = build_training_graph(parse(BALANCED), loss="loss", optimizer=Adam(0.01), parameters=EVERYTHING)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", batch)
    reference = make_reference(compiled.plan, compiled.folder.path / "train.onnx")
    labels = np.tile(np.eye(3, dtype=np.float32), (8 if batch == "per-replica" else 4, 1))
    start = {"b": np.zeros(3, np.float32), "b.mean": np.zeros(3, np.float32)}
    start |= {"b.square": np.zeros(3, np.float32), "step_count": np.zeros((), np.int64)}

    balanced = reference.rounding(start, {"one_hot": labels}).variables["b"]
    second_alone = np.eye(3, dtype=np.float32)[labels.argmax(1) // 2]  # classes of 2/3, 1/3 and 0
    unbalanced = reference.rounding(start, {"one_hot": second_alone}).variables["b"]

    assert balanced.min() > 1e-3  # of steps of 0.01
    assert unbalanced[1] > 1e-3
    assert unbalanced[[0, 2]].max() < 1e-4


# What all samples have in common is taken away: all gradients of `b` are zero in theory, many exactly so.
CENTRED = """
centred (float[12,64] x, float[64] t) => (float loss) 
<float[64] b = {BIASES}, float[64] W = {WEIGHTS}, int64[1] samples = {0}> {
    h = Add (x, b)
    mean = ReduceMean (h, samples)
    centred = Sub (h, mean)
    y = Mul (centred, W)
    apart = Sub (y, t)
    sq = Mul (apart, apart)
    loss = ReduceMean <keepdims = 0> (sq)
}
"""
CENTRED = CENTRED.replace("BIASES", ", ".join(["0"] * 32 + ["0.1"] * 32))
CENTRED = CENTRED.replace("WEIGHTS", ", ".join(str(0.5 + i / 64) for i in range(64)))


def centred(tmp_path: Path, cluster: str, steps: int) -> tuple[Compiled, list[Batch]]:
    step = build_training_graph(parse(CENTRED), loss="loss", optimizer=Adam(0.01), parameters=EVERYTHING)
    training = import_training_graph(step, GraphOptions(sample_axes={"x": 0, "t": None}))
    compiled = compile_step(training, tmp_path / "out", cluster, "allreduce", "global")
    batches = random_batches(compiled.plan, steps)
    for batch in batches:
        batch["x"] = (batch["x"] * 8).round().astype(np.float32) / 8
        batch["x"][:, ::2] = 0
        batch["t"][:32:2] = 0
    return compiled, batches


def test_a_gradient_that_is_exactly_zero_may_be_rounding(tmp_path: Path) -> None:
    compiled, (data,) = centred(tmp_path, "1x2", steps=1)
    reference = make_reference(compiled.plan, compiled.folder.path / "train.onnx")
    initial = InitialValues(compiled.folder)
    start = {variable.name: initial.part(variable.name) for variable in compiled.plan.variables}

    found = reference.rounding(start, data).variables["b"]

    is_sum_of_zeros = np.arange(64) % 2 == 0
    is_sum_of_zeros[32:] = False  # one number less the mean of twelve such, which may be another one
    assert found[~is_sum_of_zeros].min() > 1e-3  # of steps of 0.01
    assert found[is_sum_of_zeros].max() < 1e-4


def test_gradients_that_are_exactly_zero_on_one_side_alone_verify_under_adam(tmp_path: Path) -> None:
    compiled, batches = centred(tmp_path, "1x3", steps=8)

    report = verify(compiled.folder, steps=8, data=batches, launcher=launch_in_process)

    (b,) = [check for check in report.variables if check.name == "b"]
    assert report.passed, report.variables
    assert b.max_error > 1e-2 * b.max_change  # else the test would pass without


# Rows of E that no id names, and a unit that is shut off for all samples.
SHUT_OFF = """
shut_off (int64[4,2] ids, float[4,3] t) => (float loss)
<float[6,3] E = {0.1, 0.7, -0.3, 0.2, 0.5, -0.6, 0.4, 0.9, -0.8, 0.3, 0.2, 0.1, 0.6, -0.2, 0.7, -0.4, 0.5, 2},
 float[3,3] W = {0.2, 0.8, 0.1, 0.6, -0.3, 0.5, -0.7, 0.4, 0.9}, float[3] b = {1, 1, -9},
 int64[1] words = {1}> {
    rows = Gather (E, ids)
    e = ReduceMean <keepdims = 0> (rows, words)
    unread = MatMul (e, W)
    pre = Add (unread, b)
    h = Relu (pre)
    apart = Sub (h, t)
    sq = Mul (apart, apart)
    mean = ReduceMean <keepdims = 0> (sq)
    norm = ReduceSumSquare <keepdims = 0> (E)
    none = Constant <value = float {0}> ()
    nothing = Mul (norm, none)
    loss = Add (mean, nothing)
}
"""


@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_what_is_not_read_or_shut_off_may_not_move(tmp_path: Path, batch: str) -> None:
    step = build_training_graph(parse(SHUT_OFF), loss="loss", optimizer=Adam(0.01), parameters=EVERYTHING)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", batch)
    reference = make_reference(compiled.plan, compiled.folder.path / "train.onnx")
    (data,) = random_batches(compiled.plan, 1, high=4)
    initial = InitialValues(compiled.folder)
    start = {variable.name: initial.part(variable.name) for variable in compiled.plan.variables}

    found = reference.rounding(start, data).variables

    unread = np.setdiff1d(np.arange(6), data["ids"])
    assert found["E"][unread].max() == 0
    assert found["W"][:, 2].max() == found["b"][2] == 0


@contextmanager
def launch_reordered(folder: PlanFolder, data: Data, steps: int, seed: int) -> Iterator[Ranks]:
    """Train on the same samples, each one's keys in another order: all sums are rounded otherwise."""
    assert not isinstance(data, str | Path)
    order = np.random.default_rng(1).permutation(32)
    turned = [{"x": np.ascontiguousarray(batch["x"][:, order])} for batch in data]
    with launch_in_process(folder, turned, steps, seed) as ranks:
        yield ranks


def reordered(compiled: Compiled) -> VerifyReport:
    batches = random_batches(compiled.plan, 3)
    return verify(compiled.folder, steps=3, data=batches, launcher=launch_reordered)


@pytest.mark.parametrize(("model", "elements"), [(ATTENTION, 4), (ATTENTION_WITH_A_SCALAR, 1)])
@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_a_parameter_without_effect_verifies_under_adam(
    tmp_path: Path, model: str, elements: int, batch: str
) -> None:
    both = ParameterChoice(train=("Wq", "shift"))
    step = build_training_graph(parse(model), loss="loss", optimizer=Adam(0.01), parameters=both)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", batch)

    report = reordered(compiled)

    (shift,) = [check for check in report.variables if check.name == "shift"]
    assert report.passed, report.variables
    assert 1 <= shift.within_rounding <= 3 * elements  # elements, over the steps
    assert sum(check.within_rounding for check in report.variables if check.name == "Wq") == 0
    assert shift.max_error > 1e-2 * shift.max_change  # else the test would pass without


@contextmanager
def launch_half(folder: PlanFolder, data: Data, steps: int, seed: int) -> Iterator[Ranks]:
    """Train every replica on the first one's samples."""
    assert not isinstance(data, str | Path)
    shares = [np.split(batch["x"], folder.plan.replicas)[0] for batch in data]
    batches = [{"x": np.concatenate([share] * folder.plan.replicas)} for share in shares]
    with launch_in_process(folder, batches, steps, seed) as ranks:
        yield ranks


def test_other_samples_are_no_rounding(tmp_path: Path) -> None:
    step = build_training_graph(parse(ATTENTION), loss="loss", optimizer=Adam(0.01), parameters=EVERYTHING)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", "per-replica")

    batches = random_batches(compiled.plan, 3)
    report = verify(compiled.folder, steps=3, data=batches, launcher=launch_half)

    assert {check.name: check.verdict for check in report.variables}["Wq"] == "differs"


def test_gradient_descent_is_allowed_no_more_than_rounding(tmp_path: Path) -> None:
    step = build_training_graph(parse(ATTENTION), loss="loss", optimizer=SGD(0.01), parameters=EVERYTHING)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", "allreduce", "per-replica")

    report = reordered(compiled)

    assert report.passed
    assert all(check.limit < 1e-6 for check in report.variables), report.variables
    assert sum(check.within_rounding for check in report.variables if check.name == "Wq") == 0
