"""Nodes whose meaning depends on sizes keep it on a piece."""

from pathlib import Path

import pytest

from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)
from tests.checks.oracle import Oracle

# 8 ranks have one sample each: a piece has size 1 where the whole has 8.
STEP = """
step (double[8,4] x, double[8,3] t, double[4,3] W) => (double loss, double[4,3] W_next)
<double lr = {0.1}, int64[3] apart = {8, 1, 4}, int64[2] flat = {8, 4}, double one = {1.0}> {
    wide = Reshape (x, apart)
    VIEW
    y = MatMul (same, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (same)
    dW = MatMul (xt, d)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}
"""
VIEWS = {
    "squeeze without axes": "same = Squeeze (wide)",
    "reshape to a spelled shape": "same = Reshape (wide, flat)",
    "shape of a piece": "sizes = Shape (x) same = Reshape (wide, sizes)",
    "one size of a piece": (
        "sizes = Shape <end = 1> (x) n = Cast <to = 11> (sizes) share = Div (n, n)"
        " even = Squeeze (share) flattened = Reshape (wide, flat) same = Mul (flattened, even)"
    ),
    "number of elements": (
        "elements = Size (x) n = Cast <to = 11> (elements) flattened = Reshape (wide, flat)"
        " scaled = Div (flattened, n) same = Mul (scaled, n)"
    ),
    "zeros like a piece": (
        "sizes = Shape (x) zeros = ConstantOfShape <value = double[1] {0.0}> (sizes)"
        " flattened = Reshape (wide, flat) same = Add (flattened, zeros)"
    ),
    "expand to the shape of a piece": (
        "sizes = Shape (x) ones = Expand (one, sizes)"
        " flattened = Reshape (wide, flat) same = Mul (flattened, ones)"
    ),
}


@pytest.mark.parametrize("cluster", ["1x8", "2x1"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_piece_of_one_sample_is_treated_as_part_of_the_whole(
    view: str, cluster: str, tmp_path: Path
) -> None:
    training = import_text(STEP.replace("VIEW", VIEWS[view]), loss="loss", sample_axes={"x": 0, "t": 0})
    oracle = Oracle(training)

    compiled = compile_step(training, tmp_path / "out", cluster, "allreduce", "global")
    batches = random_batches(compiled.plan, 2)

    assert oracle.first_wrong(compiled, batches[0]) is None
    assert_trains_as_one_device(compiled, batches)
