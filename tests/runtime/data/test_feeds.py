import sys
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.data.feeds import Source, open_source
from partc.runtime.errors import BadData
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput
from tests.builders.plans.hand_made_plans import plan_of, rank, with_changes

INPUTS = (
    DataInput("x", "float32", ("b", 3), 0),
    DataInput("steps", "int64", (7, "b"), 1, high=5),  # time-major
    DataInput("lr", "float32", (), None),
    DataInput("negatives", "int64", (4,), None, high=100),
)


def two_replicas(batch: str = "per-replica") -> Plan:
    ranks = [rank(0, ("worker",), 0, {}), rank(1, ("worker",), 1, {}), rank(2, ("server",), None, {})]
    return with_changes(plan_of(ranks, [], data_inputs=INPUTS), batch=batch, sizes={"b": 4})


def save(path: Path, samples: int = 20, **changes: np.ndarray) -> str:
    arrays = {
        "x": np.arange(samples * 3, dtype=np.float32).reshape(samples, 3),
        "steps": np.arange(7 * samples).reshape(7, samples),
        "lr": np.float32(0.5),
        "negatives": np.arange(12).reshape(3, 4),
    }
    np.savez(path, allow_pickle=False, **(arrays | changes))
    return str(path)


def assert_shares_make_the_total(plan: Plan, source: Source, step: int) -> None:
    total = source.total(step)
    shares = [source.share(rank, step) for rank in plan.ranks]
    for data_input in plan.data_inputs:
        name, axis = data_input.name, data_input.sample_axis
        if axis is None:
            for share in shares:
                np.testing.assert_array_equal(share[name], total[name])
        else:
            joined = np.concatenate([share[name] for share in shares[:2]], axis=axis)
            np.testing.assert_array_equal(joined, total[name])
            assert name not in shares[2]
            assert all(share[name].flags.c_contiguous for share in shares[:2])


@pytest.mark.parametrize("step", [0, 1, 2, 7])
def test_samples_of_a_file_are_taken_in_order_and_again_from_the_start(tmp_path: Path, step: int) -> None:
    plan = two_replicas()
    source = open_source(save(tmp_path / "data.npz"), plan)

    total = source.total(step)

    expected = (np.arange(8) + 8 * step) % 20
    np.testing.assert_array_equal(total["x"][:, 0], 3 * expected)
    np.testing.assert_array_equal(total["steps"][0], expected)
    np.testing.assert_array_equal(total["negatives"], np.arange(4) + 4 * (step % 3))
    assert total["lr"] == np.float32(0.5)
    assert_shares_make_the_total(plan, source, step)


def test_a_global_batch_is_the_declared_size(tmp_path: Path) -> None:
    plan = two_replicas("global")
    source = open_source(save(tmp_path / "data.npz"), plan)

    assert source.total(0)["x"].shape == (4, 3)
    assert source.share(plan.ranks[1], 0)["x"].shape == (2, 3)


@pytest.mark.parametrize("step", [0, 3])
def test_synthetic_data_is_addressed_by_seed_and_step(step: int) -> None:
    plan = two_replicas()
    source = open_source("synthetic", plan, seed=1)

    total = source.total(step)

    assert total["x"].shape == (8, 3)
    assert total["x"].dtype == np.float32
    assert total["steps"].shape == (7, 8)
    assert total["steps"].min() >= 0
    assert total["steps"].max() < 5
    assert total["lr"] == np.float32(0.01)
    assert_shares_make_the_total(plan, source, step)
    assert total["x"].tobytes() == open_source("synthetic", plan, seed=1).total(step)["x"].tobytes()
    assert total["x"].tobytes() != open_source("synthetic", plan, seed=2).total(step)["x"].tobytes()
    assert total["x"].tobytes() != source.total(step + 1)["x"].tobytes()


def test_a_function_supplies_total_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_batches.py").write_text(
        "import numpy as np\n"
        "def two():\n"
        "    for step in range(2):\n"
        "        yield {'x': np.full((8, 3), step, np.float32), 'steps': np.zeros((7, 8), np.int64),\n"
        "               'lr': np.float32(1), 'negatives': np.arange(4)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = two_replicas()
    source = open_source("my_batches:two", plan)

    assert_shares_make_the_total(plan, source, 0)
    assert (source.total(1)["x"] == 1).all()
    with pytest.raises(BadData, match="ends after 2 batches"):
        source.total(2)
    with pytest.raises(BadData, match="name a module on the Python path"):
        open_source("my_batches:three", plan)


REFILLED = """
import numpy as np

def batches():
    batch = {'x': np.empty((8, 3), np.float32), 'steps': np.empty((7, 8), np.int64),
             'lr': np.empty((), np.float32), 'negatives': np.empty(4, np.int64)}
    for step in range(9):
        for array in batch.values():
            array[...] = step
        yield batch

def shards(num_shards, shard_id):
    for batch in batches():
        yield {**batch, 'x': batch['x'][:4], 'steps': batch['steps'][:, :4]}
"""


@pytest.mark.parametrize("function", ["batches", "shards"])
def test_a_function_may_fill_the_same_arrays_for_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """What a step is fed is read while the step before is computed."""
    (tmp_path / f"refilled_{function}.py").write_text(REFILLED)
    monkeypatch.syspath_prepend(tmp_path)
    plan = two_replicas()
    source = open_source(f"refilled_{function}:{function}", plan)

    shares = [[source.share(rank, step) for rank in plan.ranks[:2]] for step in range(3)]
    totals = [source.total(step) for step in range(3, 6)]

    for step, fed in enumerate(shares):
        assert all((array == step).all() for share in fed for array in share.values())
    for step, total in enumerate(totals, 3):
        assert all((array == step).all() for array in total.values())


def test_entries_of_steps_are_those_of_the_training(tmp_path: Path) -> None:
    """Four steps of twice the samples, then steps of this plan's: batch 8 is step 4's."""
    source = open_source(save(tmp_path / "data.npz", negatives=np.arange(24).reshape(6, 4)), two_replicas())
    later = open_source(save(tmp_path / "data.npz", negatives=np.arange(24).reshape(6, 4)), two_replicas(),
                        steps_ahead=-4)  # fmt: skip

    np.testing.assert_array_equal(source.total(8)["negatives"], np.arange(24).reshape(6, 4)[8 % 6])
    for worker in two_replicas().ranks[:2]:
        np.testing.assert_array_equal(later.share(worker, 8)["negatives"], np.arange(24).reshape(6, 4)[4])
    assert "element [4, 2]" in later.place(None, 8, INPUTS[3], (2,))
    np.testing.assert_array_equal(later.total(8)["x"], source.total(8)["x"])


def test_a_function_begins_where_it_is_told_and_shuffles_by_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "resumable.py").write_text(
        "import itertools, numpy as np\n"
        "made = []\n"
        "def batches(seed, start=0):\n"
        "    for step in itertools.count(start):\n"
        "        made.append(step)\n"
        "        x = np.full((8, 3), step + 100 * seed, np.float32)\n"
        "        yield {'x': x, 'steps': np.zeros((7, 8), np.int64),\n"
        "               'lr': np.float32(1), 'negatives': np.arange(4)}\n"
        "def shards(num_shards, shard_id, start=0):\n"
        "    for batch in batches(0, start):\n"
        "        yield {**batch, 'x': batch['x'][:4] + 10 * shard_id, 'steps': batch['steps'][:, :4]}\n"
        "def forgetful():\n"
        "    return batches(0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = two_replicas()

    total = open_source("resumable:batches", plan, seed=2, first=5).total(5)
    sharded = open_source("resumable:shards", plan, first=5)
    made = list(sys.modules["resumable"].made)
    forgetful = open_source("resumable:forgetful", plan, first=5)

    assert (total["x"] == 205).all()
    assert [float(sharded.share(rank, 6)["x"][0, 0]) for rank in plan.ranks if rank.replica is not None] == [
        6,
        16,
    ]
    assert made == [5]
    assert (forgetful.total(5)["x"] == 5).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((20, 4), np.float32)}, r"shape \[8, 4\], the model reads \[8, 3\]"),
        ({"x": np.zeros((20, 3))}, "convert it: array.astype"),
        ({"x": np.zeros(20, np.float32)}, "rank 2"),
        ({"z": np.zeros(3)}, "'z', which is no input"),
        ({"x": np.zeros((0, 3), np.float32)}, r"the batch is empty: no samples on axis 0 of float32\[0, 3\]"),
        ({"steps": np.zeros((7, 0), np.int64)}, "the batch is empty: no samples on axis 1"),
    ],
)
def test_data_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(BadData, match=message):
        open_source(save(tmp_path / "data.npz", **changes), two_replicas())


def test_a_file_that_does_not_fill_a_step_is_refused(tmp_path: Path) -> None:
    assert open_source(save(tmp_path / "one-step.npz", samples=8), two_replicas()).total(3)["x"][0, 0] == 0
    with pytest.raises(BadData, match="7 samples, where a step takes 8: some would count twice"):
        open_source(save(tmp_path / "data.npz", samples=7), two_replicas())


@pytest.mark.parametrize("function", ["whole", "shard"])
def test_an_empty_batch_of_a_function_is_refused(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty_batches.py").write_text(
        "import numpy as np\n"
        "EMPTY = {'x': np.zeros((0, 3), np.float32), 'steps': np.zeros((7, 0), np.int64),\n"
        "         'lr': np.float32(1), 'negatives': np.arange(4)}\n"
        "def whole():\n"
        "    yield EMPTY\n"
        "def shard(num_shards, shard_id):\n"
        "    yield EMPTY\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plan = two_replicas()

    with pytest.raises(BadData, match=f"the batch is empty[^\n]*\n  at:  empty_batches:{function}, "):
        open_source(f"empty_batches:{function}", plan).share(plan.ranks[0], 0)


MASKED = """
import numpy as np

def batch(value, samples):
    x = np.ma.masked_equal(np.arange(3.0 * samples, dtype=np.float32).reshape(samples, 3), value)
    return {'x': x, 'steps': np.zeros((7, samples), np.int64), 'lr': np.float32(1), 'negatives': np.arange(4)}

def whole():
    yield batch(2, 8)

def shard(num_shards, shard_id):
    yield batch(2, 4)

def nothing_masked():
    yield batch(-1, 8)
"""


def test_a_masked_array_of_a_function_is_refused_if_something_is_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "masked_batches.py").write_text(MASKED)
    monkeypatch.syspath_prepend(tmp_path)
    plan = two_replicas()

    for function in ("whole", "shard"):
        with pytest.raises(BadData, match=r"1 of \d+ elements are masked") as refused:
            open_source(f"masked_batches:{function}", plan).share(plan.ranks[0], 0)
        assert refused.value.at.startswith(f"masked_batches:{function}, ")
        assert refused.value.at.endswith("step 1, data input 'x'")
        assert "array.filled(0)" in refused.value.fix
    share = open_source("masked_batches:nothing_masked", plan).share(plan.ranks[0], 0)
    np.testing.assert_array_equal(share["x"], np.arange(12.0).reshape(4, 3))


def test_a_missing_input_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((8, 3), np.float32))

    with pytest.raises(BadData, match="no data for input 'lr'"):
        open_source(str(tmp_path / "data.npz"), two_replicas())


def test_a_batch_that_does_not_divide_is_refused() -> None:
    plan = with_changes(two_replicas("global"), sizes={"b": 5})

    with pytest.raises(
        BadData, match=r"5 samples do not divide among 2 replicas\n.*axis 0\n  fix: .* multiple of 2"
    ):
        open_source("synthetic", plan)


BROKEN = """
number = 3
def raises():
    raise KeyError("my reader")
def begins():
    raise OSError("my disk")
    yield
def shard(num_shards, shard_id):
    raise RuntimeError("my shard")
def takes(path):
    return []
def returns():
    return 4
"""


@pytest.mark.parametrize(
    ("function", "what", "at"),
    [
        ("number", "failing_data:number is no function but 3", "--data"),
        ("raises", "KeyError: 'my reader'", "failing_data.py:4"),
        ("begins", "failing_data:begins gives no batch: OSError: my disk", "failing_data.py:6"),
        ("shard", "RuntimeError: my shard", "failing_data.py:9"),
        ("takes", "missing 1 required positional argument: 'path'", "--data"),
        ("returns", "'int' object is not iterable", "--data"),
    ],
)
def test_a_function_that_fails_is_named_with_its_own_error(
    function: str, what: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_data.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    plan = two_replicas()

    with pytest.raises(BadData) as refusal:
        open_source(f"failing_data:{function}", plan).share(plan.ranks[0], 0)

    assert what in refusal.value.what
    assert refusal.value.at.endswith(at)


@pytest.mark.parametrize("text", ["def batches(:", "raise OSError('no licence')"])
def test_a_module_that_cannot_be_imported_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(BadData, match=r"broken_module:batches cannot be loaded: (SyntaxError|OSError)"):
        open_source("broken_module:batches", two_replicas())


@pytest.mark.parametrize("data", ["nowhere.npz", "nonsense", ""])
def test_data_that_is_not_there_is_refused(data: str) -> None:
    with pytest.raises(BadData, match="fix: "):
        open_source(data, two_replicas())
