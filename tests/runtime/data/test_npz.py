import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.data.npz import map_npz, read_npz, write_npz
from partc.runtime.errors import BadData


def write(path: Path, shape: tuple[int, ...], descr: str, content: bytes, zeros: int = 0) -> Path:
    """Write an archive with one member x, whatever its header says."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": descr, "fortran_order": False, "shape": shape})
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as stream,
    ):
        stream.write(head.getvalue() + content)
        for _ in range(zeros >> 24):
            stream.write(bytes(1 << 24))
    return path


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6.0).reshape(2, 3), "n": np.array(3), "none": np.zeros((0, 4), np.float32)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)

    read = read_npz(tmp_path / "a.npz")

    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)


def test_arrays_are_written_under_whatever_names_they_have(tmp_path: Path) -> None:
    names = ("file", "allow_pickle", "args", "kwds", "a/b", "ü")
    arrays = {name: np.full(3, place, np.float32) for place, name in enumerate(names)}

    write_npz(tmp_path / "a.npz", arrays)

    for read in (read_npz(tmp_path / "a.npz"), map_npz(tmp_path / "a.npz")):
        assert {name: array.tolist() for name, array in read.items()} == {
            name: array.tolist() for name, array in arrays.items()
        }


@pytest.mark.parametrize(
    ("shape", "descr", "what"),
    [
        ((1 << 62, 3), "<f4", r"24 bytes, where float32\[4611686018427387904, 3\] takes"),
        ((-1, 3), "<f4", "24 bytes"),
        ((2, 3), "<f8", "24 bytes, where float64"),
        ((2, 3), "|O", "Python objects"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, shape: tuple[int, ...], descr: str, what: str) -> None:
    path = write(tmp_path / "a.npz", shape, descr, bytes(24))

    with pytest.raises(BadData, match=what) as refusal:
        read_npz(path)

    assert str(path) in refusal.value.at


def test_a_small_file_that_holds_gigabytes_is_refused(tmp_path: Path) -> None:
    zeros = 1 << 29
    path = write(tmp_path / "a.npz", (zeros // 4,), "<f4", b"", zeros)
    assert path.stat().st_size < 4_000_000

    with pytest.raises(BadData, match=f"would become {zeros + 128}"):
        read_npz(path)


@pytest.mark.parametrize("damage", [slice(0, 200), slice(0, -30), slice(40, None)])
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: slice) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(100.0))
    path.write_bytes(path.read_bytes()[damage])

    with pytest.raises(BadData, match=r"a\.npz"):
        read_npz(path)
