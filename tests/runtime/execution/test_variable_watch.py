"""A parameter that is no longer finite stops training, with its name and its step."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.errors import Diverged
from partc.runtime.execution import variable_watch
from partc.runtime.execution.in_process import RanksInProcess, train_in_process
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder
from tests.builders.plans.compiled_steps import compile_step

LINEAR = """<ir_version: 10, opset_import: ["" : 21]>
linear (float[8,3] x) => (float loss) <float[3,2] W = {1, 2, 3, 4, 5, 6}, float[3,2] V = {1, 2, 3, 4, 5, 6}> {
    a = MatMul (x, W) b = MatMul (x, V) y = Sub (a, b) loss = ReduceMean <keepdims = 0> (y) }"""
TABLE = """<ir_version: 10, opset_import: ["" : 21]>
table (int64[8] ids) => (float loss) <float[6,2] E = {1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6}> {
    y = Gather (E, ids) loss = ReduceMean <keepdims = 0> (y) }"""


def compiled(text: str, folder: Path, **options: UpdateOptions) -> PlanFolder:
    forward = onnx.parser.parse_model(text)
    step = build_training_graph(forward, loss="loss", optimizer=SGD("fed"), **options)  # type: ignore[arg-type]
    return compile_step(import_training_graph(step), folder, "1x2", batch="global").folder


def batches(*rates: float) -> list[dict[str, np.ndarray]]:
    """The largest rate takes the sum of the weights beyond float32, once the loss was computed."""
    x = np.full((8, 3), 10, np.float32)
    return [{"x": x, "learning_rate": np.array(rate, np.float32)} for rate in rates]


def test_a_parameter_is_named_with_the_step_that_lost_it(tmp_path: Path) -> None:
    folder, fed = compiled(LINEAR, tmp_path / "out"), batches(1e-3, 1e-3, 3e38, 1e-3)

    with pytest.raises(Diverged, match=r"parameter '[WV]' is not finite after step 3: 6 of 6 elements\n"):
        train_in_process(folder, fed)
    with pytest.raises(Diverged, match=r"parameter '[WV]' is not finite after step 3.*\n  at:  rank [01] "):
        Runner(folder).train(fed, 4)

    assert not (folder.path / "trained.safetensors").exists()
    assert len(train_in_process(folder, fed, stop_when_diverged=False).outputs) == 4


def test_every_parameter_is_looked_at_by_some_rank(tmp_path: Path) -> None:
    folder = compiled(LINEAR, tmp_path / "out")

    for name in ("W", "V"):
        lost = np.ones((3, 2), np.float32)
        lost[2, 1] = -np.inf
        ranks = RanksInProcess(folder, {name: lost})
        with pytest.raises(Diverged, match=f"parameter '{name}' is not finite after step 1: 1 of 6"):
            ranks.check_variables(1)


def test_rows_of_a_table_are_looked_at_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiled(TABLE, tmp_path / "out")
    monkeypatch.setattr(variable_watch, "PART_BYTES", 2 * 2 * 4)  # two rows
    table = np.ones((6, 2), np.float32)
    table[5] = np.nan
    ranks = RanksInProcess(folder, {"E": table})

    ranks.check_variables(1)
    ranks.check_variables(2)

    with pytest.raises(Diverged, match="parameter 'E' is not finite by step 3: 2 of 12 elements"):
        ranks.check_variables(3)
    with pytest.raises(Diverged, match="parameter 'E'"):
        ranks.check_variables(1, is_last=True)


def test_a_step_that_loss_scaling_skips_stops_nothing(tmp_path: Path) -> None:
    update = UpdateOptions(loss_scale=DynamicScale())
    folder = compiled(LINEAR, tmp_path / "out", update=update)
    fed = batches(1e-3, 1e-3)
    fed[0]["x"] = np.full((8, 3), 1e36, np.float32)  # the scaled gradient overflows, the loss does not

    trained = train_in_process(folder, fed)

    assert np.isfinite(trained.variables["W"]).all()
    assert (trained.variables["W"] != np.arange(1, 7).reshape(3, 2)).any()
