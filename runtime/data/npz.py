"""Arrays of an .npz file. What its headers claim is held to what it stores before memory is taken."""

import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from partc.runtime.errors import BadData

Array = np.ndarray[Any, np.dtype[Any]]

# Data that deflates so far is none: a file that small would fill the memory of whoever reads it.
MOST_RATIO = 100
LARGE_BYTES = 1 << 28
_LOCAL_HEADER_BYTES = 30


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays under whatever names they have: numpy.savez takes some for arguments of its own."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)


def read_npz(path: Path) -> dict[str, Array]:
    """Read every array of an .npz file. Raises BadData."""
    if not zipfile.is_zipfile(path):
        what = "not an .npz file" if path.is_file() else "no such file"
        raise BadData(what, at=str(path), fix="give the path of a file that numpy.savez wrote")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                _check_member(archive, member, path)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except BadData:
        raise
    except Exception as error:  # of a damaged archive zipfile, zlib and numpy raise a dozen classes
        raise _unreadable(error, path) from error


def map_npz(path: Path) -> dict[str, Array]:
    """Return every array of an .npz file; what is not compressed is mapped, not read. Raises BadData."""
    if not zipfile.is_zipfile(path):
        return read_npz(path)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        return read_npz(path)
    try:
        with path.open("rb") as stream:
            return {
                member.filename.removesuffix(".npy"): _map_array(
                    path, stream, _begin(stream, member), member.file_size
                )
                for member in members
            }
    except BadData:
        raise
    except Exception as error:
        raise _unreadable(error, path) from error


def shape_in_npz(path: Path, name: str) -> tuple[int, ...]:
    """Return the shape of an array of an .npz file, by its header alone. Raises BadData."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
            return _read_header(stream)[0]
    except Exception as error:  # of a damaged archive zipfile, zlib and numpy raise a dozen classes
        raise _unreadable(error, path) from error


def map_npy(path: Path) -> Array:
    """Return the array of an .npy file without reading it. Raises BadData."""
    try:
        with path.open("rb") as stream:
            return _map_array(path, stream, 0, path.stat().st_size)
    except (OSError, ValueError) as error:
        raise _unreadable(error, path) from error


def _unreadable(error: Exception, path: Path) -> BadData:
    return BadData(f"no arrays can be read: {error}", at=str(path), fix="write it with numpy.savez")


def _begin(stream: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Return where a stored member's bytes begin: behind a local header, of which two lengths vary."""
    stream.seek(member.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"no header of {member.filename}")
    name_bytes, extra_bytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes


def _map_array(path: Path, stream: BinaryIO, begin: int, nbytes: int) -> Array:
    stream.seek(begin)
    shape, is_fortran, dtype = _read_header(stream)
    behind = stream.tell()
    _check_claim(shape, dtype, nbytes - (behind - begin), str(path))
    if not prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", behind, shape, order="F" if is_fortran else "C")


def _read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, order and element type."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    return shape, is_fortran, dtype


def _check_claim(shape: tuple[int, ...], dtype: np.dtype[Any], piece_bytes: int, at: str) -> None:
    """Hold what a header claims to what is stored. Raises BadData."""
    if dtype.hasobject:
        raise BadData("Python objects, which are not read from files", at=at, fix="save an array of numbers")
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != piece_bytes:
        raise BadData(
            f"{piece_bytes} bytes, where {dtype}{list(shape)} takes {prod(shape) * dtype.itemsize}",
            at=at,
            fix="write it with numpy.savez again",
        )


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    at = f"{path}: {member.filename}"
    if member.file_size > LARGE_BYTES and member.file_size > MOST_RATIO * max(1, member.compress_size):
        raise BadData(
            f"{member.compress_size} bytes would become {member.file_size}",
            at=at,
            fix="write it with numpy.savez, which does not compress",
        )
    with archive.open(member) as stream:
        shape, _, dtype = _read_header(stream)
        _check_claim(shape, dtype, member.file_size - stream.tell(), at)
