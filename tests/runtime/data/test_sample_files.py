"""Samples of files: whatever kind they are of, the same steps."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from partc.runtime.data import array_source
from partc.runtime.data.feeds import open_source
from partc.runtime.data.npz import map_npz
from partc.runtime.data.prefetch import Prefetched
from partc.runtime.data.sample_files import count_samples
from partc.runtime.errors import BadData, BadUsage
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput, TakenValues
from tests.runtime.data.test_feeds import assert_shares_make_the_total, two_replicas

SAMPLES = 20
X = np.random.default_rng(0).normal(size=(SAMPLES, 3)).astype(np.float32)
STEPS = np.random.default_rng(1).integers(0, 5, (7, SAMPLES))


def plan_of_samples() -> Plan:
    """Two inputs, of which one has samples on axis 1."""
    plan = two_replicas()
    inputs = tuple(entry for entry in plan.data_inputs if entry.name in ("x", "steps"))
    return msgspec.structs.replace(plan, data_inputs=inputs)


def npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", allow_pickle=False, x=X, steps=STEPS)
    return folder / "a.npz"


def compressed(folder: Path) -> Path:
    np.savez_compressed(folder / "a.npz", allow_pickle=False, x=X, steps=STEPS)
    return folder / "a.npz"


def npy(folder: Path) -> Path:
    np.save(folder / "x.npy", np.asfortranarray(X), allow_pickle=False)
    np.save(folder / "steps.npy", STEPS, allow_pickle=False)
    return folder


def shards(folder: Path) -> Path:
    for number, (first, stop) in enumerate(((0, 3), (3, 13), (13, 20))):
        part = {"x": X[first:stop], "steps": STEPS[:, first:stop]}
        np.savez(folder / f"part-{number}.npz", allow_pickle=False, **part)
    return folder


def write_table(path: Path, first: int, stop: int) -> Path:
    import pyarrow
    import pyarrow.parquet

    x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(X[first:stop].ravel()), 3)
    steps = pyarrow.array([list(map(int, sample)) for sample in STEPS.T[first:stop]])
    pyarrow.parquet.write_table(pyarrow.table({"x": x, "steps": steps}), path)
    return path


def empty_tables(folder: Path) -> Path:
    """Tables without rows first, in the middle and last: those who write in parallel leave such."""
    for number, (first, stop) in enumerate(((0, 0), (0, 3), (3, 3), (3, 20), (20, 20))):
        write_table(folder / f"{number}.parquet", first, stop)
    return folder


def parquet(folder: Path) -> Path:
    return write_table(folder / "a.parquet", 0, SAMPLES)


def tables(folder: Path) -> Path:
    for first, stop in ((0, 11), (11, 20)):
        write_table(folder / f"{first:02d}.parquet", first, stop)
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "empty tables": empty_tables,
    "npz": npz, "compressed": compressed, "npy": npy, "shards": shards, "parquet": parquet, "tables": tables,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_all_kinds_give_the_same_steps(tmp_path: Path, kind: str, is_shuffled: bool) -> None:
    plan = plan_of_samples()
    source = open_source(str(KINDS[kind](tmp_path)), plan, 4, is_shuffled)

    seen = []
    for step in range(5):
        assert_shares_make_the_total(plan, source, step)
        total = source.total(step)
        assert total["x"].dtype == np.float32
        assert all(array.flags.c_contiguous for array in total.values())
        which = [int(np.nonzero((row == X).all(axis=1))[0][0]) for row in total["x"]]
        np.testing.assert_array_equal(total["steps"], STEPS[:, which])
        seen += which
    for epoch in (seen[:20], seen[20:40]):
        assert sorted(epoch) == list(range(20))
    assert (seen[:20] == list(range(20))) is not is_shuffled
    assert (seen[:20] == seen[20:40]) is not is_shuffled
    again = open_source(str(tmp_path if kind in ("npy", "shards", "tables") else source._name), plan, 4, True)
    assert is_shuffled is np.array_equal(again.total(3)["x"], source.total(3)["x"])


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_all_kinds_are_counted_without_being_read(tmp_path: Path, kind: str) -> None:
    assert count_samples(KINDS[kind](tmp_path), "steps", 1) == SAMPLES


@pytest.mark.parametrize(
    "x",
    [
        [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], None],
        [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, None, 9.0]],
        [[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]], [[7.0], None, [9.0]]],
    ],
    ids=["a row", "a number of a list", "a list of a list"],
)
def test_what_a_table_lacks_is_refused_with_its_row(tmp_path: Path, x: list[object]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"x": x}), tmp_path / "a.parquet")

    with pytest.raises(BadData, match=r"(?s)values are missing: 1, the first in row 2.*a.parquet: x.*fill"):
        open_source(str(tmp_path / "a.parquet"), plan_of_samples())


@pytest.mark.parametrize(("file", "name"), [("none.npz", "x"), ("a.npz", "labels"), ("none.parquet", "x")])
def test_what_cannot_be_counted_is_refused(tmp_path: Path, file: str, name: str) -> None:
    npz(tmp_path)

    with pytest.raises(BadData, match=f"(?s)can be read.*{file}"):
        count_samples(tmp_path / file, name, 0)


def test_what_lies_uncompressed_is_not_read(tmp_path: Path) -> None:
    assert all(isinstance(array, np.memmap) for array in map_npz(npz(tmp_path)).values())


def refused_x(folder: Path, second: np.ndarray) -> Path:
    np.savez(folder / "0.npz", allow_pickle=False, x=X, steps=STEPS)
    np.savez(folder / "1.npz", allow_pickle=False, x=second, steps=STEPS)
    return folder


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (X.astype(np.float64), r"float32\[20, 3\] in one file, float64\[20, 3\] in another"),
        (np.zeros((20, 4), np.float32), r"float32\[20, 4\] in another"),
        (np.zeros(20, np.float32), r"float32\[20\] in another"),
        (X[:3], "they would be paired wrongly"),
    ],
)
def test_shards_that_differ_are_refused(tmp_path: Path, second: np.ndarray, what: str) -> None:
    with pytest.raises(BadData, match=what):
        open_source(str(refused_x(tmp_path, second)), plan_of_samples())


def test_what_is_no_data_is_refused(tmp_path: Path) -> None:
    plan = plan_of_samples()
    with pytest.raises(BadData, match="a folder without data"):
        open_source(str(tmp_path), plan)
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00 not an array")
    with pytest.raises(BadData, match="no arrays can be read"):
        open_source(str(tmp_path), plan)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not a table PAR1")
    with pytest.raises(BadData, match="no table can be read"):
        open_source(str(tmp_path / "a.parquet"), plan)
    with pytest.raises(BadUsage, match="cannot be shuffled"):
        open_source("synthetic", plan, 0, is_shuffled=True)
    mixed = (*plan.data_inputs, DataInput("negatives", "int64", (2,), 0))
    np.savez(tmp_path / "all.npz", allow_pickle=False, x=X, steps=STEPS, negatives=np.arange(10))
    both = msgspec.structs.replace(plan, data_inputs=mixed)
    open_source(str(tmp_path / "all.npz"), both)
    with pytest.raises(BadUsage, match="what goes together"):
        open_source(str(tmp_path / "all.npz"), both, 0, is_shuffled=True)


def test_values_of_large_files_are_checked_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_source, "CHECKED_AT_ONCE_BYTES", 0)
    wrong = STEPS.copy()
    wrong[2, 17] = 9
    np.savez(tmp_path / "a.npz", allow_pickle=False, x=X, steps=wrong)
    plan = plan_of_samples()
    inputs = tuple(
        msgspec.structs.replace(entry, taken=TakenValues(5)) if entry.name == "steps" else entry
        for entry in plan.data_inputs
    )
    source = open_source(str(tmp_path / "a.npz"), msgspec.structs.replace(plan, data_inputs=inputs))

    source.share(plan.ranks[1], 2)
    with pytest.raises(BadData, match=r"value 9, where the model takes 0 to 4\n.*step 3, data input 'steps'"):
        source.share(plan.ranks[0], 2)


def test_data_is_read_a_step_ahead_and_no_further() -> None:
    plan = plan_of_samples()
    asked: list[int] = []

    class Source:
        def share(self, rank: object, step: int) -> dict[str, np.ndarray]:
            asked.append(step)
            if step == 3:
                raise BadData("it ends", at="here", fix="")
            return {"x": np.array(step)}

    prefetched = Prefetched(Source(), last=4)  # type: ignore[arg-type]

    assert [int(prefetched.share(plan.ranks[0], step)["x"]) for step in range(3)] == [0, 1, 2]
    with pytest.raises(BadData, match="it ends"):
        prefetched.share(plan.ranks[0], 3)
    assert prefetched.share(plan.ranks[0], 4)["x"] == 4
    prefetched.close()
    assert asked == [0, 1, 2, 3, 4]
