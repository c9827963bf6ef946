"""Arrays of an .npz file. What its headers claim is held to what it stores before memory is taken."""

import zipfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.errors import BadData

Array = np.ndarray[Any, np.dtype[Any]]

# Data that deflates so far is none: a file that small would fill the memory of whoever reads it.
MOST_RATIO = 100
LARGE_BYTES = 1 << 28


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
        raise BadData(
            f"no arrays can be read: {error}", at=str(path), fix="write it with numpy.savez"
        ) from error


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    at = f"{path}: {member.filename}"
    if member.file_size > LARGE_BYTES and member.file_size > MOST_RATIO * max(1, member.compress_size):
        raise BadData(
            f"{member.compress_size} bytes would become {member.file_size}",
            at=at,
            fix="write it with numpy.savez, which does not compress",
        )
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(stream)
        held_bytes = member.file_size - stream.tell()
    if dtype.hasobject:
        raise BadData("Python objects, which are not read from files", at=at, fix="save an array of numbers")
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != held_bytes:
        raise BadData(
            f"{held_bytes} bytes, where {dtype}{list(shape)} takes {prod(shape) * dtype.itemsize}",
            at=at,
            fix="write it with numpy.savez again",
        )
