"""Tables whose rows are cut."""

from pathlib import Path

from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    import_text,
    random_batches,
)

# A mask of the samples, read in another order, as exports of attention read theirs.
MASKED = """
step (float[8,4] x, float[4,4] W) => (float loss, float[4,4] W_next)
<float lr = {-0.1}, float zero = {0.0}, int64[8] order = {3,2,1,0,7,6,5,4}> {
    h = MatMul (x, W)
    above = Greater (x, zero)
    mask = Gather (above, order)
    kept = Where (mask, h, zero)
    sq = Mul (kept, kept)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, kept)
    part = Mul (dW, lr)
    W_next = Add (W, part)
}
"""


def test_masks_are_read_whole_for_there_is_no_sum_of_them(tmp_path: Path) -> None:
    compiled = compile_step(import_text(MASKED), tmp_path / "out", "1x2", "data=2,microbatches=2", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2))
