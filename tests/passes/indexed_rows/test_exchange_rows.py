"""Indexed slices on their way: what crosses the network, and that it arrives."""

from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.bindings import GradientTensors
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.execution.in_process import train_in_process
from tests.builders.graphs.small_steps import training_of
from tests.builders.plans.compiled_steps import (
    Batch,
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    forced,
    import_text,
    random_batches,
)

ROWS, WIDTH, IDS = 12, 2, 24

# The rows are scattered into the table itself: no dense gradient exists anywhere.
TABLE = f"""
step (int64[{IDS}] ids, double[{IDS},{WIDTH}] t, double[{ROWS},{WIDTH}] E)
    => (double loss, double[{ROWS},{WIDTH}] E_next)
<double lr = {{-0.1}}, int64[1] last = {{-1}}> {{
    e = Gather (E, ids)
    d = Sub (e, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    rows = Mul (d, lr)
    positions = Unsqueeze (ids, last)
    E_next = ScatterND <reduction = "add"> (E, positions, rows)
}}
"""
SLICES = {"E": GradientTensors(ids="ids", rows="rows")}


def step() -> TrainingGraph:
    return training_of(TABLE, {"ids": 0, "t": 0}, SLICES)


def compiled(tmp_path: Path, method: str, cluster: str, batch: str = "global") -> Compiled:
    strategy = forced({"E": method}, {"E": ROWS}, int(cluster[0]), batch)
    return compile_step(step(), tmp_path / "out", cluster, strategy, batch)


@pytest.mark.parametrize("batch", ["global", "per-replica"])
@pytest.mark.parametrize("cluster", ["2x2", "2x2s", "3x1", "1x2"])
@pytest.mark.parametrize("method", ["all_reduce", "all_gather", "servers"])
def test_rows_arrive_however_they_travel(method: str, cluster: str, batch: str, tmp_path: Path) -> None:
    done = compiled(tmp_path, method, cluster, batch)

    assert_trains_as_one_device(done, random_batches(done.plan, 3))


def test_an_input_that_is_left_out_waits_for_no_output_that_is_left_out(tmp_path: Path) -> None:
    text = TABLE.replace("int64[1] last", "double most = {0.5}, int64[1] last")
    text = text.replace("e = Gather", "low = Clip (t, , most) e = Gather").replace("(e, t)", "(e, low)")
    training = training_of(text, {"ids": 0, "t": 0}, SLICES)

    done = compile_step(training, tmp_path / "out", "2x2", forced({"E": "servers"}, {"E": ROWS}, 2, "global"))

    assert_trains_as_one_device(done, random_batches(done.plan, 2))


def only(done: Compiled, *ids: int) -> list[Batch]:
    batch = random_batches(done.plan, 1)[0]
    batch["ids"] = np.resize(np.array(ids), IDS)
    return [batch]


@pytest.mark.parametrize("ids", [(0,), (11,), (0, 11), (-1, -12, 3), (5, 4, 5, 4, 4)])
def test_ids_may_all_be_one_server_s_or_negative(ids: tuple[int, ...], tmp_path: Path) -> None:
    done = compiled(tmp_path, "servers", "3x1")

    assert_trains_as_one_device(done, only(done, *ids))


def test_a_row_crosses_the_network_once_per_host(tmp_path: Path) -> None:
    """Workers of a host that want the same row ask once, and sum before they push."""
    done = compiled(tmp_path, "servers", "2x2")

    alike = train_in_process(done.folder, only(done, 7)).payload_bytes
    all_different = train_in_process(done.folder, only(done, *range(ROWS))).payload_bytes

    def between_hosts(sent: dict[int, dict[str, int]]) -> int:
        return sum(kinds.get("all_to_all_rows", 0) for kinds in sent.values())

    row = WIDTH * 8
    assert between_hosts(alike) <= 2 * (8 + row + 8 + row)  # each host: one id out, one row back; pushed
    assert between_hosts(all_different) > 5 * between_hosts(alike)


def test_an_all_reduced_table_is_summed_dense(tmp_path: Path) -> None:
    done = compiled(tmp_path, "all_reduce", "1x2")

    assert not done.started("all_gather_rows")
    assert len(done.started("all_reduce")) == 1  # in one bucket with the loss


def test_a_table_read_by_two_gathers_pushes_both(tmp_path: Path) -> None:
    text = """
step (int64[24] ids, int64[24] others, double[24,2] t, double[12,2] E) => (double loss, double[12,2] E_next)
<double lr = {0.1}, int64[1] last = {-1}, int64[2] size = {12, 2}> {
    one = Gather (E, ids)
    other = Gather (E, others)
    both = Add (one, other)
    d = Sub (both, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    zeros = ConstantOfShape <value = double[1] {0.0}> (size)
    all_ids = Concat <axis = 0> (ids, others)
    positions = Unsqueeze (all_ids, last)
    rows = Concat <axis = 0> (d, d)
    dE = ScatterND <reduction = "add"> (zeros, positions, rows)
    part = Mul (dE, lr)
    E_next = Sub (E, part)
}
"""
    strategy = forced({"E": "servers"}, {"E": 12}, 2, "per-replica")
    training = import_text(text, loss="loss", sample_axes={"ids": 0, "others": 0, "t": 0})

    done = compile_step(training, tmp_path / "out", "2x2", strategy, "per-replica")

    assert_trains_as_one_device(done, random_batches(done.plan, 3, high=5))
