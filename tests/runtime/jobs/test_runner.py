from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.data.feeds import open_source
from partc.runtime.data.npz import read_npz
from partc.runtime.errors import BadData, BadUsage, CopiesDiffer, Diverged, RankFailed
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.jobs.job import Progress
from partc.runtime.jobs.results import DISAGREEING_FILE, TRAINED_FILE
from partc.runtime.jobs.runner import Runner, stage_data
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from tests.builders.plans.compiled_steps import compile_step, random_batches
from tests.builders.plans.hand_made_plans import with_changes
from tests.builders.plans.linear_plans import linear_all_reduce, linear_batches, linear_servers
from tests.builders.plans.row_plans import (
    reduction_batch,
    reductions,
    rows_at_once,
    rows_there_and_back,
    table_batches,
    table_on_servers,
)
from tests.sampling import sampled

Batches = list[dict[str, np.ndarray]]

PLANS: dict[str, tuple[Callable[[Path], Path], Batches]] = {
    "all-reduce": (partial(linear_all_reduce, replicas=3), linear_batches(3, steps=3)),
    "reduce, merged": (partial(linear_servers, merged=True, scattered=False), linear_batches(2, steps=3)),
    "reduce": (partial(linear_servers, merged=False, scattered=False), linear_batches(2, steps=3)),
    "scatter, merged": (partial(linear_servers, merged=True, scattered=True), linear_batches(2, steps=3)),
    "scatter": (partial(linear_servers, merged=False, scattered=True), linear_batches(2, steps=3)),
    "table, merged": (partial(table_on_servers, merged=True), table_batches(steps=3)),
    "table": (partial(table_on_servers, merged=False), table_batches(steps=3)),
    "rows, merged": (partial(rows_there_and_back, merged=True), table_batches(steps=2)),
    "rows at once": (rows_at_once, table_batches(steps=20)),
    "reductions": (reductions, [reduction_batch()] * 2),
    "rows": (partial(rows_there_and_back, merged=False), table_batches(steps=2)),
}


# Of merged plans and those that are not, each kind of exchange once.
OFTEN = ("all-reduce", "reduce", "scatter, merged", "table", "rows, merged", "rows at once", "reductions")


@pytest.mark.parametrize("name", sampled(PLANS, [place for place, name in enumerate(PLANS) if name in OFTEN]))
def test_daemons_compute_what_one_process_computes(tmp_path: Path, name: str) -> None:
    make, batches = PLANS[name]
    folder = make(tmp_path / "out")

    actual = Runner(folder).train(batches, len(batches), outputs="all")

    expected = train_in_process(folder, batches)
    for variable, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-12)
    for output, reference in zip(actual.outputs, expected.outputs, strict=True):
        assert output.keys() == reference.keys()
        for key, value in reference.items():
            np.testing.assert_allclose(output[key], value, rtol=1e-12)
    assert actual.disagreeing == ()
    assert actual.payload_bytes == expected.payload_bytes
    assert actual.exchanged == expected.exchanged


def test_variables_are_saved_and_read_on_the_way(tmp_path: Path) -> None:
    folder = linear_servers(tmp_path / "out", merged=True, scattered=True)
    batches = linear_batches(2, steps=4)
    lines: list[Progress] = []

    result = Runner(folder).train(
        batches, 4, initial={"W": np.ones((3, 2))}, read_after=(2, 4), on_progress=lines.append
    )

    expected = train_in_process(folder, batches, {"W": np.ones((3, 2))}, read_after=(2,))
    np.testing.assert_allclose(result.variables_after[2]["W"], expected.variables_after[2]["W"], rtol=1e-12)
    np.testing.assert_allclose(result.variables["W"], expected.variables["W"], rtol=1e-12)
    np.testing.assert_array_equal(result.variables_after[4]["W"], result.variables["W"])
    saved = read_arrays(folder / "trained.safetensors")
    np.testing.assert_array_equal(saved["W"], result.variables["W"])
    assert lines[-1].step == 4
    assert lines[-1].loss == pytest.approx(float(expected.outputs[-1]["loss"]))
    assert not list(folder.glob(".run-*"))


def test_a_plan_is_where_it_was_when_the_runner_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    runner = Runner("out")
    monkeypatch.chdir(tmp_path / "elsewhere")

    runner.train(linear_batches(2, steps=1), 1)

    assert (folder / TRAINED_FILE).exists()


def test_copies_that_drift_apart_are_named(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    plan = read_plan_folder(folder).plan
    updates_too_early = (*plan.instructions[:1], plan.instructions[3], *plan.instructions[1:3])
    broken = PlanFolder(with_changes(plan, instructions=updates_too_early), folder)
    (folder / "plan.json").write_bytes(encode_plan(broken.plan))
    batches = linear_batches(2, steps=2)

    with pytest.raises(
        CopiesDiffer, match=r"different copies of 1 variables: W\n.*\n.*disagreeing.safetensors"
    ):
        Runner(folder).train(batches, 2)

    assert not (folder / TRAINED_FILE).exists()
    assert read_arrays(folder / DISAGREEING_FILE).keys() == {"W"}
    assert Runner(folder).train(batches, 2, save=False).disagreeing == ("W",)
    assert train_in_process(folder, batches).disagreeing == ("W",)


def test_a_loss_that_is_not_a_number_stops_all_ranks(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    batches = linear_batches(2, steps=3)
    batches[1]["x"][4, 0] = np.nan

    with pytest.raises(Diverged, match=r"nan in step 2: the data holds nan\n  at:  rank 1 "):
        Runner(folder).train(batches, 3)

    assert not (folder / "trained.safetensors").exists()
    assert not list(folder.glob(".run-*"))
    result = Runner(folder).train(batches, 3, stop_when_diverged=False)
    assert len(result.outputs) == 3


def test_bad_data_is_reported_by_the_first_rank_that_meets_it(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    np.savez(tmp_path / "data.npz", allow_pickle=False, x=np.zeros((16, 3)))

    with pytest.raises(BadData, match="no data for input 'y'"):
        Runner(folder).train(tmp_path / "data.npz", 2)


def test_batches_are_staged_under_whatever_names_inputs_have(tmp_path: Path) -> None:
    plan = read_plan_folder(linear_all_reduce(tmp_path / "out", 2)).plan
    names = {"x": "file", "y": "allow_pickle"}
    renamed = tuple(msgspec.structs.replace(entry, name=names[entry.name]) for entry in plan.data_inputs)
    batch = {names[name]: array for name, array in linear_batches(2, steps=1)[0].items()}

    staged, _ = stage_data(with_changes(plan, data_inputs=renamed), [batch], 1, tmp_path)

    np.testing.assert_equal(read_npz(Path(staged)), batch)


def test_batches_that_are_not_of_the_size_that_is_given_are_refused(tmp_path: Path) -> None:
    model = build_training_graph(
        build_model("mlp", sizes=[6, 10, 3]), loss="softmax_cross_entropy", optimizer=Adam(0.01)
    )
    folder = compile_step(import_training_graph(model), tmp_path / "out", "1x1", sizes={"batch": 8}).folder
    batches = random_batches(folder.plan, 2)

    with pytest.raises(BadUsage, match=r"(?s)'batch' of 4, where the batches show 8.*fix: leave sizes out"):
        Runner(folder).train(batches, 2, sizes={"batch": 4}, save=False)


def test_synthetic_data_trains(tmp_path: Path) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)

    result = Runner(folder).train("synthetic", 3, seed=5)

    source = open_source("synthetic", read_plan_folder(folder).plan, seed=5)
    expected = train_in_process(folder, [source.total(step) for step in range(3)])
    np.testing.assert_allclose(result.variables["W"], expected.variables["W"], rtol=1e-12)


def test_a_rank_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying_batches.py").write_text(
        "import os, time\n"
        "def die():\n"
        "    if os.environ['PMI_RANK'] == '1':\n"
        "        os.kill(os.getpid(), 9)\n"
        "    time.sleep(30)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = linear_all_reduce(tmp_path / "out", 2)

    with pytest.raises(
        RankFailed, match=r"rank 1 died: signal 9 .*\n  at:  rank 1 \(alpha\), while loading\n.*run.log"
    ) as caught:
        Runner(folder).train("dying_batches:die", 2)

    assert caught.value.cause is not None
    assert (caught.value.cause.kind, caught.value.cause.member) == ("killed", "rank 1")


LEAVING = """
import os
import numpy as np

def batches():
    yield {"x": np.ones((8, 3)), "y": np.ones((8, 2))}
    if os.environ["PMI_RANK"] in RANKS:
        os._exit(CODE)
    while True:
        yield {"x": np.ones((8, 3)), "y": np.ones((8, 2))}
"""


@pytest.mark.parametrize(
    ("ranks", "code", "said"),
    [
        ("1", 0, "exit code 0, without a report"),
        ("01", 0, "exit code 0, without a report"),
        ("0", 3, "exit code 3"),
    ],
    ids=["one of two, 0", "both, 0", "one of two, 3"],
)
def test_a_rank_that_leaves_in_mid_training_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, code: int, said: str
) -> None:
    text = LEAVING.replace("RANKS", repr(ranks)).replace("CODE", str(code))
    (tmp_path / "leaving_batches.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = linear_all_reduce(tmp_path / "out", 2)

    with pytest.raises(
        RankFailed,
        match=rf"rank [{ranks}] died: {said}\n  at:  rank [{ranks}] \(alpha.*\), step 1, .*\n.*run.log",
    ):
        Runner(folder).train("leaving_batches:batches", 5)


def test_what_goes_wrong_in_a_daemon_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_batches.py").write_text("def fail():\n    raise RuntimeError('no connection')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = linear_all_reduce(tmp_path / "out", 2)

    with pytest.raises(BadData, match=r"RuntimeError: no connection\n  at:  --data, .*odd_batches.py:2\n"):
        Runner(folder).train("odd_batches:fail", 2)


def test_a_job_in_which_nobody_gets_on_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_batches.py").write_text(
        "import time\ndef forever():\n    time.sleep(60)\n    yield {}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = linear_all_reduce(tmp_path / "out", 2)

    with pytest.raises(
        RankFailed,
        match=r"rank [01] did not go on for 2 s\n  at:  rank [01] \(alpha/.*, step 1, reading data",
    ):
        Runner(folder).train("slow_batches:forever", 2, timeout_s=2.0)


def test_batches_may_be_yielded_in_the_same_arrays(tmp_path: Path) -> None:
    folder = table_on_servers(tmp_path / "out", merged=True)
    batches = table_batches(steps=3)

    def refilled() -> Iterator[dict[str, np.ndarray]]:
        arrays = {name: np.empty_like(array) for name, array in batches[0].items()}
        for batch in batches:
            for name, array in batch.items():
                arrays[name][...] = array
            yield arrays

    found, expected = (Runner(folder).train(each, 3).variables for each in (refilled(), batches))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("resumed", [False, True], ids=["at once", "in two parts"])
def test_batches_of_different_sizes_train_as_they_are(tmp_path: Path, resumed: bool) -> None:
    folder = table_on_servers(tmp_path / "out", merged=True)
    sizes = (2, 6, 4, 2)
    batches = [batch for size in sizes for batch in table_batches(steps=1, samples=size)]
    expected = train_in_process(folder, batches)
    runner = Runner(folder)

    if resumed:
        middle = runner.train(batches, 2).variables
        result = runner.train(batches, len(sizes), initial=middle, trained=2)
    else:
        result = runner.train(iter(batches), len(sizes))

    for name, value in expected.variables.items():
        np.testing.assert_allclose(result.variables[name], value, rtol=1e-12)


def test_too_few_batches_are_refused(tmp_path: Path) -> None:
    folder = table_on_servers(tmp_path / "out", merged=True)

    with pytest.raises(BadData, match="1 batches for 2 steps"):
        Runner(folder).train(table_batches(steps=1), 2)
    with pytest.raises(
        BadData, match=r"(?s)0 batches for 1 steps, behind the 2 .*fix: supply the batches of all"
    ):
        Runner(folder).train(table_batches(steps=1), 3, trained=2)
    with pytest.raises(BadUsage, match="at least one step"):
        Runner(folder).train("synthetic", 0)
