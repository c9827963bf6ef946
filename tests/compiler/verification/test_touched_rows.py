"""Large tables are verified by the rows that a step touches, and no other row may change."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.verification.ranks import launch_daemons, launch_in_process
from partc.compiler.verification.touched_rows import distinct_rows, find_tables, places, read_by_places
from partc.compiler.verification.verify import verify
from partc.runtime.execution.in_process import RanksInProcess
from partc.runtime.execution.row_hashes import row_hashes
from partc.runtime.plan.boxes import find_rows
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches
from tests.checks.training_steps import session

LIMIT_BYTES = 200  # every table of the tests' models is larger
READS = {
    "by rows": "e = Gather (E, ids)",
    "whole": "s = ReduceSum <keepdims = 0> (E) e0 = Gather (E, ids) e = Add (e0, s)",
    "by columns": "e = Gather <axis = 1> (E, ids)",
}
STEP = """
step (int64[n] ids, float[5,5] E) => (float[n,5] e, float[5,5] E_next) {
    READ
    last = Constant <value_ints = [-1]> ()
    positions = Unsqueeze (ids, last)
    E_next = ScatterND <reduction = "add"> (E, positions, e)
}
"""


def step_that_reads(how: str) -> onnx.ModelProto:
    return parse(STEP.replace("READ", READS[how]))


@pytest.mark.parametrize("how", READS)
def test_tables_are_found_by_how_they_are_read(how: str) -> None:
    found = find_tables(step_that_reads(how), {"E": "E_next"}, ["E"])

    assert found == ({"E": ("ids", "positions")} if how == "by rows" else {})


def test_a_step_on_its_rows_computes_what_it_computes_on_all() -> None:
    model = step_that_reads("by rows")
    table = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    ids = np.array([3, -4, 3])
    e, following = session(model).run(None, {"ids": ids, "E": table})

    rows = distinct_rows([ids], 5)
    small = read_by_places(model, find_tables(model, {"E": "E_next"}, ["E"]), {"E": "E_next"})
    feeds = {"ids": ids, "E": table[rows], **places({"E": rows}, {"E": 5})}
    e_small, following_small = session(small).run(None, feeds)

    assert rows.tolist() == [1, 3]
    np.testing.assert_array_equal(e_small, e)
    np.testing.assert_array_equal(following_small, following[rows])


def test_rows_that_differ_in_a_bit_have_other_hashes() -> None:
    for dtype, columns in ((np.float32, 700), (np.float16, 3), (np.int64, 1), (np.uint8, 5)):
        table = np.random.default_rng(0).integers(0, 100, (5000, columns)).astype(dtype)
        changed = table.copy()
        changed[4321].view(np.uint8)[-1] ^= 1

        assert np.flatnonzero(row_hashes(table) != row_hashes(changed)).tolist() == [4321]
        np.testing.assert_array_equal(row_hashes(table)[7:9], row_hashes(table[7:9]))


def compiled_tables(out: Path, cluster: str, strategy: str, batch: str) -> Compiled:
    model = onnx.load_from_string(training_model("lm, adagrad, clipped"))
    return compile_step(import_training_graph(model), out, cluster, strategy, batch)


@pytest.mark.parametrize(
    ("cluster", "strategy", "batch"),
    [("2x2s", "ps", "per-replica"), ("2x2", "hybrid", "global"), ("1x2", "allreduce", "per-replica")],
)
def test_tables_are_verified_by_rows(tmp_path: Path, cluster: str, strategy: str, batch: str) -> None:
    compiled = compiled_tables(tmp_path / "out", cluster, strategy, batch)
    batches = random_batches(compiled.plan, 3, high=7)

    report = verify(
        compiled.folder, steps=3, data=batches, launcher=launch_in_process, table_limit_bytes=LIMIT_BYTES
    )

    assert report.passed, report.variables
    assert {"embedding", "embedding.accumulator", "softmax.weight"} <= set(report.tables)
    assert "large tables by the rows that steps touch, all others by a hash" in report.summary()
    assert all(check.max_change > 0 for check in report.variables)


def test_daemons_are_asked_for_rows_and_hashes(tmp_path: Path) -> None:
    compiled = compiled_tables(tmp_path / "out", "1x2", "hybrid", "per-replica")
    batches = random_batches(compiled.plan, 2, high=7)

    report = verify(
        compiled.folder, steps=2, data=batches, launcher=launch_daemons, table_limit_bytes=LIMIT_BYTES
    )

    assert report.passed, report.variables
    assert report.tables


def test_a_row_that_no_sample_names_may_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_tables(tmp_path / "out", "2x2", "hybrid", "per-replica")
    batches = random_batches(compiled.plan, 2, high=7)
    train = RanksInProcess.step_on

    def train_and_touch(ranks: RanksInProcess, share: object) -> dict[str, np.ndarray]:
        outputs = train(ranks, share)  # type: ignore[arg-type]
        for owner in ranks._owners["embedding"]:
            _, held = find_rows(owner.piece.box, np.array([30]))
            ranks.array_of(owner)[held] += 1
        return outputs

    monkeypatch.setattr(RanksInProcess, "step_on", train_and_touch)
    report = verify(
        compiled.folder, steps=2, data=batches, launcher=launch_in_process, table_limit_bytes=LIMIT_BYTES
    )

    verdicts = {check.name: check.verdict for check in report.variables if check.verdict != "equal"}
    assert verdicts == {"embedding": "other rows changed"}
