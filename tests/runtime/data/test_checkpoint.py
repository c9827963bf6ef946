from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from partc.runtime.data.checkpoint import TensorFile, read_arrays, write_arrays, write_tensors
from partc.runtime.errors import BadData


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
