"""Every mechanism of the Parallax paper, on and off: the result is the same, the bytes are not."""

from collections.abc import Collection
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.bindings import GradientTensors
from partc.runtime.execution.in_process import train_in_process
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.small_steps import training_of
from tests.builders.plans.compiled_steps import (
    Batch,
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)
from tests.whole_steps.test_distributed_numerics import batches_for, imported

MECHANISMS = ("local-aggregation", "post-aggregation", "boundary-ops")
SUBSETS = [off for count in range(4) for off in combinations(MECHANISMS, count)]
CLUSTERS = ("2x2", "3x1", "2x2s", "1x4")
SERVED = (
    "lm, adagrad, clipped",
    "lm, momentum, time-major",
    "mlp, momentum, clipped",
    "foreign, clipped",
    "foreign adam",
)


def between_hosts(done: Compiled, batch: Batch) -> int:
    """Return the payload bytes that servers send each other in a step."""
    sent = train_in_process(done.folder, [batch]).payload_bytes
    kinds = ("all_to_all_rows", "all_gather_rows", "reduce_scatter", "all_gather")
    return sum(by_kind.get(kind, 0) for by_kind in sent.values() for kind in kinds)


def check(name: str, cluster: str, strategy: str, batch: str, without: Collection[str], folder: Path) -> None:
    done = compile_step(imported(name), folder / "out", cluster, strategy, batch, without=without)

    assert_trains_as_one_device(done, batches_for(name, done))


CASES = list(product(SERVED, CLUSTERS, ("ps", "hybrid"), ("per-replica", "global"), SUBSETS))


@pytest.mark.parametrize(("name", "cluster", "strategy", "batch", "without"), CASES[::71])
def test_switched_off_or_not_the_result_is_one_device_s(
    name: str, cluster: str, strategy: str, batch: str, without: Collection[str], tmp_path: Path
) -> None:
    check(name, cluster, strategy, batch, without, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "cluster", "strategy", "batch", "without"), CASES)
def test_the_full_product_of_switches(
    name: str, cluster: str, strategy: str, batch: str, without: Collection[str], tmp_path: Path
) -> None:
    check(name, cluster, strategy, batch, without, tmp_path)


# ---------------------------------------------------------------- boundary ops, by the bytes they save

# The paper's figure 10: workers read 10 of 100 rows. The gradient of the slice is spread by the graph itself.
SLICED = """
step (double[8,10] x, double[8,4] t, double[100,4] W) => (double loss, double[100,4] W_next)
<double lr = {0.1}, int64[1] from = {20}, int64[1] to = {30}, int64[1] axis = {0},
 int64[4] pads = {20, 0, 70, 0}> {
    part = Slice (W, from, to, axis)
    y = MatMul (x, part)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose (x)
    dp = MatMul (xt, d)
    dW = Pad (dp, pads)
    s = Mul (dW, lr)
    W_next = Sub (W, s)
}
"""

# float32 masters; the main computation reads what 16 bits hold of the first half of each row.
ROUNDED = """
step (int64[8] ids, float[8,4] t, float[12,8] E) => (float loss, float[12,8] E_next)
<float lr = {-0.1}, int64[1] from = {0}, int64[1] to = {4}, int64[1] axis = {1}, int64[1] last = {-1},
 int64[4] pads = {0, 0, 0, 4}> {
    e = Gather (E, ids)
    half = Slice (e, from, to, axis)
    bits = Cast <to = 10> (half)
    h = Cast <to = 1> (bits)
    d = Sub (h, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    s = Mul (d, lr)
    rows = Pad (s, pads)
    pos = Unsqueeze (ids, last)
    E_next = ScatterND <reduction = "add"> (E, pos, rows)
}
"""

# What is gathered in the backward pass is small already: it stays with the workers.
GATHERED = """
step (int64[8] ids, double[8,4] t, double[12,4] E) => (double loss, double[12,4] E_next)
<double lr = {-0.1}, int64[4] order = {3, 2, 1, 0}, int64[1] last = {-1}> {
    e = Gather (E, ids)
    d = Sub (e, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    s = Mul (d, lr)
    rows = Gather <axis = 1> (s, order)
    pos = Unsqueeze (ids, last)
    E_next = ScatterND <reduction = "add"> (E, pos, rows)
}
"""


def compiled(text: str, folder: Path, without: Collection[str]) -> Compiled:
    model = parse(text)
    axes = {info.name: 0 for info in model.graph.input if info.name in ("x", "t", "ids")}
    gradients = {"E": GradientTensors(ids="ids", rows="rows")} if "E_next" in text else None
    training = training_of(text, axes, gradients)
    return compile_step(training, folder / "out", "2x1", "ps", "global", without=without)


@pytest.mark.parametrize("text", [SLICED, ROUNDED, GATHERED], ids=["slice", "cast", "gather"])
@pytest.mark.parametrize("without", [(), ("boundary-ops",)], ids=["on servers", "on workers"])
def test_a_boundary_op_computes_the_same_on_either_side(
    text: str, without: Collection[str], tmp_path: Path
) -> None:
    done = compiled(text, tmp_path, without)
    batches = random_batches(done.plan, 3)

    assert_trains_as_one_device(done, batches)


def sent(text: str, folder: Path, *without: str) -> int:
    done = compiled(text, folder, without)
    batch = random_batches(done.plan, 1)[0]
    if "ids" in batch:
        batch["ids"] = np.arange(8)  # one host owns the table: the other's 4 rows cross
    return between_hosts(done, batch)


def test_a_slice_on_the_server_sends_the_rows_that_it_keeps(tmp_path: Path) -> None:
    there = sent(SLICED, tmp_path / "there")
    here = sent(SLICED, tmp_path / "here", "boundary-ops")

    row = 4 * 8
    assert here - there >= (100 - 10) * row


def test_a_cast_on_the_server_sends_16_bits_of_what_is_read(tmp_path: Path) -> None:
    there = sent(ROUNDED, tmp_path / "there")
    here = sent(ROUNDED, tmp_path / "here", "boundary-ops")

    assert here - there == 4 * (8 * 4 - 4 * 2)  # 4 rows: 8 floats each, or half of them in 16 bits


def test_rows_are_gathered_where_the_table_is_and_gradients_where_they_are_made(tmp_path: Path) -> None:
    there = compiled(GATHERED, tmp_path / "there", ())
    here = compiled(GATHERED, tmp_path / "here", ("boundary-ops",))

    assert there.plan.instructions == here.plan.instructions  # nothing is left to move
    batch = random_batches(there.plan, 1)[0] | {"ids": np.arange(8)}
    assert between_hosts(there, batch) == 4 * (4 * 8) + 4 * (4 * 8)  # rows pulled, rows pushed
