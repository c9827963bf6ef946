"""Trainings that are stopped, saved, and gone on with: daemons over MPI, by the same plan and by others."""

import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.runtime.checkpoints.manifest import folder_of, steps_in
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.errors import BadCheckpoint, BadUsage, NotSaved
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.jobs.job import Checkpoints, JobMessage, Notice, Progress
from partc.runtime.jobs.metrics import read_metrics
from partc.runtime.jobs.results import TRAINED_FILE
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder
from tests.builders.plans.boxed_plans import LAYOUTS, boxed_momentum, momentum_batches
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches
from tests.builders.plans.linear_plans import linear_all_reduce, linear_batches, linear_servers
from tests.compiler.importing.test_draw_random_inputs import compiled_dropout
from tests.sampling import sampled


@pytest.mark.parametrize("replicas", sampled([1, 2], range(1)))
def test_a_training_that_goes_on_ends_with_the_same_bits(replicas: int, tmp_path: Path) -> None:
    """Replicas of two ranks, each with strided boxes of variables."""
    folder = boxed_momentum(tmp_path / "out", LAYOUTS["strided"], replicas)
    batches = momentum_batches(replicas, steps=5)
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=2)
    metrics = tmp_path / "metrics.jsonl"
    whole = Runner(folder).train(batches, 5, outputs="all")

    Runner(folder).train(batches, 3, checkpoints=asked, metrics=metrics)
    (tmp_path / "kept" / folder_of(3) / "COMMIT").unlink()
    told: list[JobMessage] = []
    rest = Runner(folder).train(
        batches, 5, checkpoints=asked, resume=True, outputs="all", on_progress=told.append, metrics=metrics
    )

    assert steps_in(tmp_path / "kept") == [2, 3, 4, 5][-3:]
    assert (rest.first_step, rest.last_step) == (2, 3)
    assert "the checkpoint of step 2 is used" in told[0].text  # type: ignore[union-attr]
    assert told[-1].step == 5  # type: ignore[union-attr]
    for name, value in whole.variables.items():
        np.testing.assert_array_equal(rest.variables[name], value)
    for resumed, uninterrupted in zip(rest.outputs, whole.outputs[2:], strict=True):
        np.testing.assert_array_equal(resumed["loss"], uninterrupted["loss"])
    assert [line.step for line in read_metrics(metrics)] == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_draws_go_on_where_they_stopped(tmp_path: Path) -> None:
    done = compiled_dropout("batch-major", tmp_path / "out", "1x2")
    batches = random_batches(done.plan, 4)
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=2)

    Runner(done.folder).train(batches, 2, checkpoints=asked, seed=9)
    rest = Runner(done.folder).train(batches, 4, checkpoints=asked, resume=True)

    for name, value in Runner(done.folder).train(batches, 4, seed=9).variables.items():
        np.testing.assert_array_equal(rest.variables[name], value)
    with pytest.raises(BadUsage, match="seed 8, where training began with 9"):
        Runner(done.folder).train(batches, 6, checkpoints=asked, resume=True, seed=8)


def test_what_was_trained_may_be_told_instead_of_a_checkpoint(tmp_path: Path) -> None:
    done = compiled_dropout("batch-major", tmp_path / "out", "1x1")
    batches = random_batches(done.plan, 4)
    runner = Runner(done.folder)

    first = runner.train(batches, 2, seed=9)
    rest = runner.train(batches, 4, initial=first.variables, trained=2, seed=9)

    assert (rest.first_step, rest.last_step) == (2, 2)
    for name, value in runner.train(batches, 4, seed=9).variables.items():
        np.testing.assert_array_equal(rest.variables[name], value)
    with pytest.raises(BadUsage, match="more than are trained"):
        runner.train(batches, 4, initial=first.variables, trained=4)
    with pytest.raises(BadUsage, match="leave `trained` out"):
        runner.train(batches, 4, trained=2, checkpoints=Checkpoints(str(tmp_path / "kept")), resume=True)


def deep(folder: Path, cluster: str, strategy: str) -> Compiled:
    forward = build_model("mlp", dtype="float64", sizes=[12, 24, 24, 24, 5], batch=12)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))
    return compile_step(import_training_graph(step), folder, cluster, strategy, batch="global")


WAYS = [
    ("2x2", "allreduce"),
    ("1x3", "ps"),
    ("2x3", "tensor=2"),
    ("2x2", "pipeline=2,microbatches=2"),
    ("1x2", "fsdp"),
    ("1x1", "auto"),
]


@pytest.mark.long
def test_ranks_and_strategies_change_on_the_way(tmp_path: Path) -> None:
    """From four ranks to three, to six, to a pipeline, from servers to AllReduce: as one device trains."""
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=100)
    plans = [deep(tmp_path / str(number), *way) for number, way in enumerate(WAYS)]
    batches = random_batches(plans[0].plan, len(WAYS))

    for number, plan in enumerate(plans, 1):
        Runner(plan.folder).train(batches, number, checkpoints=asked, resume=number > 1)

    trained = StoredValues(tmp_path / "kept" / folder_of(len(WAYS)))
    expected = train_in_process(plans[-1].folder, batches).variables
    for name, value in expected.items():
        np.testing.assert_allclose(trained.part(name), value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_training_that_goes_on_elsewhere_leaves_no_lines_of_the_one_that_was_there(tmp_path: Path) -> None:
    here, there = (linear_all_reduce(tmp_path / name, 2) for name in ("here", "there"))
    batches, asked = linear_batches(2, steps=4), Checkpoints(str(tmp_path / "kept"), every_steps=2)
    metrics = tmp_path / "metrics.jsonl"
    Runner(here).train(batches, 3, metrics=metrics)
    Runner(there).train(batches, 2, checkpoints=asked, seed=3)

    Runner(here).train(batches, 3, checkpoints=asked, resume=True, metrics=metrics)
    Runner(here).train(batches, 4, checkpoints=asked, resume=True, metrics=metrics)

    assert [line.step for line in read_metrics(metrics)] == [3, 4]


def a_file_of_samples(tmp_path: Path, steps: int) -> Path:
    batches = linear_batches(2, steps=steps)
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **joined)
    return tmp_path / "data.npz"


def test_data_goes_on_where_it_stopped_though_steps_take_more(tmp_path: Path) -> None:
    """Two replicas use 8 samples a step, four use 16: after three steps of two, the third batch of four."""
    data = a_file_of_samples(tmp_path, steps=8)
    two, four = (linear_all_reduce(tmp_path / str(n), n) for n in (2, 4))
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=100)

    begun = Runner(two).train(data, 3, checkpoints=asked)
    rest = Runner(four).train(data, 5, checkpoints=asked, resume=True)

    arrays = np.load(data)
    third_and_fourth = [{name: arrays[name][16 * n : 16 * (n + 1)] for name in arrays} for n in (2, 3)]
    expected = train_in_process(four, third_and_fourth, begun.variables).variables["W"]
    np.testing.assert_allclose(rest.variables["W"], expected, rtol=1e-12)


def test_an_entry_a_step_is_that_of_the_training_though_steps_take_more(tmp_path: Path) -> None:
    """Three steps of two replicas use 1.5 batches of four: rates go on with the fourth."""
    data, rates = a_file_of_samples(tmp_path, steps=8), np.array([0.1, 0.1, 0.1, 0.25, 0.5, 9.0])
    two, four = (linear_all_reduce(tmp_path / str(n), n, has_rate=True) for n in (2, 4))
    arrays = dict(np.load(data))
    np.savez(data, allow_pickle=False, **arrays, rate=rates)
    asked = Checkpoints(str(tmp_path / "kept"), every_steps=100)

    begun = Runner(two).train(data, 3, checkpoints=asked)
    rest = Runner(four).train(data, 5, checkpoints=asked, resume=True)

    of_steps = zip((2, 3), (3, 4), strict=True)
    batches = [
        {name: array[16 * n : 16 * (n + 1)] for name, array in arrays.items()}
        | {"rate": np.array(rates[step])}
        for n, step in of_steps
    ]
    expected = train_in_process(four, batches, begun.variables).variables["W"]
    np.testing.assert_allclose(rest.variables["W"], expected, rtol=1e-12)


STREAMS = """
import numpy as np
DATA = np.load(FILE)

def cut(part, parts, start):
    size = 20 // parts
    for n in range(start * parts + part, 5 * parts, parts):
        yield {name: DATA[name][size * n : size * (n + 1)] for name in DATA}

def batches(start=0):
    return cut(0, 1, start)

def shards(num_shards, shard_id, start=0):
    return cut(shard_id, num_shards, start)
"""


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("handed over", 2), ("file", 1), ("function", 1), ("shards", 2)],
)
def test_batches_of_another_size_than_assumed_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    """Steps of 20 samples, where plans of a symbolic batch assume other sizes, and each another one."""
    forward = build_model("mlp", dtype="float64", sizes=[6, 10, 3])
    model = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))
    first, second = (
        compile_step(
            import_training_graph(model), tmp_path / name, shape, "allreduce", sizes={"batch": 8}
        ).folder
        for name, shape in (("first", "1x2"), ("second", f"1x{ranks}"))
    )
    batches = random_batches(msgspec.structs.replace(first.plan, sizes={"batch": 10}), 5)
    file, kept = tmp_path / "data.npz", tmp_path / "kept"
    np.savez(file, allow_pickle=False, **{n: np.concatenate([b[n] for b in batches]) for n in batches[0]})
    (tmp_path / "streams.py").write_text(STREAMS.replace("FILE", repr(str(file))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    function = f"streams:{'shards' if kind == 'shards' else 'batches'}"
    data = {"handed over": batches, "file": file}.get(kind, function)

    def train(folder: PlanFolder, steps: int, replicas: int, *, resume: bool) -> None:
        sizes = {"batch": 20 // replicas} if kind == "file" else None
        saves = Checkpoints(str(kept), every_steps=100)
        told: list[JobMessage] = []
        result = Runner(folder).train(
            data, steps, checkpoints=saves, resume=resume, sizes=sizes, save=False, on_progress=told.append
        )
        assert result.samples == 20 * result.last_step
        progress = [message for message in told if isinstance(message, Progress)][-1]
        assert progress.samples_per_s == pytest.approx(20 * progress.steps_per_s)

    train(first, 3, 2, resume=False)
    train(second, 5, ranks, resume=True)

    for steps in (3, 5):
        position = StoredValues(kept / folder_of(steps)).manifest.position
        assert (position.batches, position.samples) == (steps, 20 * steps)
    expected = train_in_process(second, batches).variables
    for name, value in expected.items():
        trained = StoredValues(kept / folder_of(5)).part(name)
        np.testing.assert_allclose(trained, value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_same_samples_in_another_order_are_refused(tmp_path: Path) -> None:
    """Some would come twice and others never; other data may have an order of their own."""
    data, other = a_file_of_samples(tmp_path, steps=8), tmp_path / "other.npz"
    other.write_bytes(data.read_bytes())
    plan, asked = linear_all_reduce(tmp_path / "2", 2), Checkpoints(str(tmp_path / "kept"), every_steps=100)
    told: list[object] = []
    Runner(plan).train(data, 2, checkpoints=asked, shuffle=True)

    for spelled in (data, tmp_path / "kept" / ".." / data.name):
        with pytest.raises(BadUsage, match="where training began with them shuffled"):
            Runner(plan).train(spelled, 4, checkpoints=asked, resume=True)
    Runner(plan).train(data, 3, checkpoints=asked, resume=True, shuffle=True)
    Runner(plan).train(other, 4, checkpoints=asked, resume=True, on_progress=told.append)

    assert any("other.npz, where training began with" in getattr(each, "text", "") for each in told)


def test_a_file_that_grew_is_refused_where_it_is_shuffled(tmp_path: Path) -> None:
    data = a_file_of_samples(tmp_path, steps=8)
    plan, asked = linear_all_reduce(tmp_path / "2", 2), Checkpoints(str(tmp_path / "kept"), every_steps=100)
    Runner(plan).train(data, 2, checkpoints=asked, shuffle=True)
    a_file_of_samples(tmp_path, steps=9)

    with pytest.raises(BadUsage, match=r"holds 72 samples, where training began with 64"):
        Runner(plan).train(data, 4, checkpoints=asked, resume=True, shuffle=True)


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], range(2)))
def test_a_rank_that_is_asked_to_stop_makes_all_stop_and_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """However often: Slurm signals all processes of a job, and so does the keeper then."""
    (tmp_path / "endless.py").write_text(
        "import os, time, numpy as np\n"
        "def batches():\n"
        "    for step in range(100000):\n"
        "        time.sleep(0.01)\n"
        "        if step in (30, 31) and os.environ['PMI_RANK'] == '1':\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "        yield {'x': np.full((8, 3), step % 7.0), 'y': np.ones((8, 2))}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = linear_servers(tmp_path / "out", merged=True, scattered=True)
    asked = Checkpoints(str(tmp_path / "kept"))

    result = Runner(folder).train("endless:batches", 100_000, checkpoints=asked)

    assert 30 <= result.last_step < 10_000
    assert steps_in(tmp_path / "kept") == [result.last_step]
    stored = StoredValues(tmp_path / "kept" / folder_of(result.last_step))
    np.testing.assert_array_equal(stored.part("W"), result.variables["W"])
    assert stored.manifest.position.batches == result.last_step
    assert len(result.outputs) == result.last_step


def test_a_full_disk_is_told_and_training_goes_on_and_keeps_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of checkpoints becomes a file while the training goes on: none can be written."""
    folder, kept = linear_all_reduce(tmp_path / "out", 2), tmp_path / "kept"
    (tmp_path / "barring.py").write_text(
        "import os, numpy as np\n"
        "from pathlib import Path\n"
        "def batches():\n"
        "    for step in range(2000):\n"
        "        if step == 500 and os.environ['PMI_RANK'] == '0':\n"
        f"            Path({str(kept)!r}).rmdir()\n"
        f"            Path({str(kept)!r}).write_text('in the way')\n"
        "        yield {'x': np.ones((8, 3)), 'y': np.ones((8, 2))}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told: list[JobMessage] = []

    with pytest.raises(NotSaved, match=r"the checkpoint of step 2000 could not be written") as end:
        Runner(folder).train(
            "barring:batches", 2000, checkpoints=Checkpoints(str(kept), 1000), on_progress=told.append
        )

    (notice,) = [line for line in told if isinstance(line, Notice)]
    assert "the checkpoint of step 1000 could not be written" in notice.text
    assert notice.text.endswith("training goes on")
    assert "make room" not in end.value.fix and str(folder / TRAINED_FILE) in end.value.fix
    assert read_arrays(folder / TRAINED_FILE).keys() == {"W"}


@pytest.mark.parametrize("where", ["launcher", "rank"])
def test_checkpoints_that_cannot_be_written_are_told_before_the_first_step(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept, told = linear_all_reduce(tmp_path / "out", 2), tmp_path / "kept", list[JobMessage]()
    kept.write_text("in the way")
    if where == "rank":  # which sees another folder than the launcher does
        monkeypatch.setattr("partc.runtime.checkpoints.training_folders.probe_folder", lambda folder: None)

    with pytest.raises(NotSaved, match=r"(?s)no checkpoint could be written: File exists.*fix: name another"):
        Runner(folder).train(
            linear_batches(2, steps=4), 4, checkpoints=Checkpoints(str(kept)), on_progress=told.append
        )

    assert told == []
    assert kept.read_text() == "in the way"


def refusals(tmp_path: Path, folder: Path) -> dict[str, tuple[Callable[[], object], type[Exception], str]]:
    kept = Checkpoints(str(tmp_path / "kept"), every_steps=1)
    runner, batches = Runner(folder), linear_batches(2, steps=4)
    other = linear_all_reduce(tmp_path / "boxed", 1).parent / "momentum"
    boxed_momentum(other, LAYOUTS["whole"])
    return {
        "not resumed": (lambda: runner.train(batches, 4, checkpoints=kept), BadUsage, "of another training"),
        "more": (lambda: runner.train(batches, 1, checkpoints=kept, resume=True), BadUsage, "of which 2 are"),
        "another model": (
            lambda: Runner(other).train(momentum_batches(1, steps=4), 4, checkpoints=kept, resume=True),
            BadCheckpoint,
            "of another model",
        ),
    }


@pytest.mark.parametrize("case", ["not resumed", "more", "another model"])
def test_what_cannot_be_gone_on_with_is_refused_and_stays(tmp_path: Path, case: str) -> None:
    folder = linear_all_reduce(tmp_path / "out", 2)
    Runner(folder).train(linear_batches(2, steps=2), 2, checkpoints=Checkpoints(str(tmp_path / "kept"), 1))
    train, kind, what = refusals(tmp_path, folder)[case]

    with pytest.raises(kind, match=what):
        train()

    assert steps_in(tmp_path / "kept") == [1, 2]


def test_a_training_that_has_only_its_end_left_is_taken_from_its_last_checkpoint(tmp_path: Path) -> None:
    folder, batches = linear_all_reduce(tmp_path / "out", 2), linear_batches(2, steps=2)
    kept = Checkpoints(str(tmp_path / "kept"), 1)
    whole = Runner(folder).train(batches, 2, checkpoints=kept)
    (folder / TRAINED_FILE).unlink()

    again = Runner(folder).train(batches, 2, checkpoints=kept, resume=True)

    assert (again.first_step, again.last_step) == (2, 0)
    saved = read_arrays(folder / TRAINED_FILE)
    for name, value in whole.variables.items():
        np.testing.assert_array_equal(again.variables[name], value)
        np.testing.assert_array_equal(saved[name], value)
