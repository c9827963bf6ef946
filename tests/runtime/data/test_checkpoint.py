from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from partc.runtime.data.checkpoint import (
    TensorFile,
    map_array,
    map_arrays,
    read_arrays,
    write_arrays,
    write_tensors,
)
from partc.runtime.errors import BadData
from partc.runtime.plan.boxes import take
from partc.runtime.plan.variables import Box
from tests.builders.plans.random_boxes import cut, random_shape


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    arrays = {
        "W": np.arange(6, dtype=np.float32).reshape(2, 3),
        "count": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float16),
        "mask": np.array([True, False]),
    }

    write_arrays(tmp_path / "a.safetensors", arrays)

    for read in (load_file(tmp_path / "a.safetensors"), read_arrays(tmp_path / "a.safetensors")):
        assert read.keys() == arrays.keys()
        for name, array in arrays.items():
            assert read[name].dtype == array.dtype
            np.testing.assert_array_equal(read[name], array)


def test_pieces_follow_each_other(tmp_path: Path) -> None:
    table = np.arange(20.0).reshape(10, 2)
    pieces = (table[:3], table[3:3], table[3:])

    write_tensors(tmp_path / "t.safetensors", [TensorFile("E", "float64", (10, 2), pieces)])

    np.testing.assert_array_equal(load_file(tmp_path / "t.safetensors")["E"], table)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_that_are_boxes_lie_where_they_belong(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays, tensors = {}, []
    for name in ("E", "W", "b"):
        shape, factored = random_shape(rng)
        whole = Box(factored, tuple(tuple((0, size) for size in sizes) for sizes in factored))
        boxes = cut(rng, whole, int(rng.integers(1, 6)))
        arrays[name] = rng.normal(size=shape)
        pieces = [take(arrays[name], box) for box in boxes]
        tensors.append(TensorFile(name, "float64", shape, pieces, boxes))
    tensors.append(TensorFile("count", "int64", (), (np.array(seed),), (None,)))

    write_tensors(tmp_path / "t.safetensors", tensors)

    read = load_file(tmp_path / "t.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        np.testing.assert_array_equal(map_arrays(tmp_path / "t.safetensors")[name], array)
    assert read["count"] == seed
    assert map_arrays(tmp_path / "t.safetensors").keys() == read.keys()


def test_a_tensor_that_a_file_does_not_hold_is_named(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.safetensors", {"W": np.ones(3)})

    with pytest.raises(BadData, match=r"no tensor 'V'\n.*a.safetensors\n.*name one of 'W'$"):
        map_array(tmp_path / "a.safetensors", "V")


def test_a_failed_write_keeps_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_arrays(path, {"W": np.ones(3)})

    with pytest.raises(AssertionError):
        write_tensors(path, [TensorFile("W", "float64", (3,), (np.ones(2),))])

    np.testing.assert_array_equal(read_arrays(path)["W"], np.ones(3))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_arrays(path, {"W": np.ones(300)})
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(BadData, match="complete safetensors file"):
        read_arrays(path)
