"""A damaged checkpoint is seen to be, and an earlier one is used: never silently a wrong one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.checkpoints.manifest import (
    COMMIT_FILE,
    MANIFEST_FILE,
    folder_of,
    newest_checkpoint,
    read_manifest,
    refuse_others,
    steps_in,
    verify_checkpoint,
)
from partc.runtime.errors import BadCheckpoint, BadUsage
from partc.runtime.plan.boxes import rows_box
from tests.builders.checkpoints import stored_checkpoint

VARIABLES = {"w": np.arange(24.0).reshape(6, 4), "count": np.array(3)}
BOXES = {"w": [rows_box((6, 4), 0, 2), rows_box((6, 4), 2, 6)]}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints after steps 1 and 2."""
    for step in (1, 2):
        stored_checkpoint(tmp_path, step, VARIABLES, BOXES)
    return tmp_path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no commit": lambda f: (f / COMMIT_FILE).unlink(),
    "no manifest": lambda f: (f / MANIFEST_FILE).unlink(),
    "a file less": lambda f: (f / "rank-1.safetensors").unlink(),
    "a file cut": lambda f: truncate(f / "rank-0.safetensors"),
    "a bit of a file": lambda f: flip(f / "rank-1.safetensors"),
    "a bit of the manifest": lambda f: flip(f / MANIFEST_FILE),
    "a bit of the commit": lambda f: flip(f / COMMIT_FILE),
    "a manifest cut": lambda f: truncate(f / MANIFEST_FILE),
    "a folder for a file": lambda f: (
        (f / "rank-0.safetensors").unlink(),
        (f / "rank-0.safetensors").mkdir(),
    ),
    "another's file": lambda f: shutil.copy(f / "rank-0.safetensors", f / "rank-1.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_used_and_said_to_be(two: Path, damage: str) -> None:
    assert newest_checkpoint(two) == (two / folder_of(2), [])

    DAMAGES[damage](two / folder_of(2))

    with pytest.raises(BadCheckpoint, match="damaged checkpoint"):
        verify_checkpoint(two / folder_of(2))
    found, (fault,) = newest_checkpoint(two)
    assert found == two / folder_of(1)
    assert folder_of(2) in fault.at


def test_every_byte_of_a_checkpoint_counts(two: Path) -> None:
    """Whatever single byte changes, it is found."""
    rng = np.random.default_rng(0)
    whole = two / folder_of(2)
    for path in sorted(whole.iterdir()):
        content = path.read_bytes()
        for place in rng.choice(len(content), min(40, len(content)), replace=False):
            changed = bytearray(content)
            changed[place] ^= int(rng.integers(1, 256))
            path.write_bytes(changed)
            if changed.strip() != content.strip():
                with pytest.raises(BadCheckpoint):
                    verify_checkpoint(whole)
        path.write_bytes(content)
    verify_checkpoint(whole)


def test_pieces_that_do_not_make_the_whole_are_refused(tmp_path: Path) -> None:
    for number, boxes in enumerate(
        ([rows_box((6, 4), 0, 2)], [rows_box((6, 4), 0, 3), rows_box((6, 4), 2, 6)])
    ):
        folder = stored_checkpoint(tmp_path, number + 1, VARIABLES, {"w": boxes})
        with pytest.raises(BadCheckpoint, match="variable 'w'"):
            read_manifest(folder)


def test_another_trainings_checkpoints_are_not_mixed_with(two: Path, tmp_path: Path) -> None:
    assert steps_in(two) == [1, 2]
    assert steps_in(tmp_path / "nowhere") == []
    refuse_others(tmp_path / "nowhere")
    with pytest.raises(BadUsage, match=r"the last of step 2[^\n]*\n.*\n.*--resume"):
        refuse_others(two)
