"""The examples that come with the package."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from partc.compiler.machines.example_files import EXAMPLES, describe_example, names_of_examples
from tests.checks.command_line import EXAMPLES as SOURCES
from tests.checks.command_line import done, refused

ROOT = SOURCES.parent


def test_the_package_has_the_repositorys_own_copy() -> None:
    assert EXAMPLES.samefile(SOURCES)


def test_every_example_says_what_it_is() -> None:
    described = {name: describe_example(SOURCES / name) for name in names_of_examples(SOURCES)}

    assert all(len(text) > 20 for text in described.values()), described
    assert described["cluster-8x6-titanxp.json"] == "cluster: 8 hosts of 6 devices (titan-xp)"


def test_all_are_copied_and_none_over_another(tmp_path: Path) -> None:
    shown = done("examples", "copy", "all", tmp_path / "mine")

    names = names_of_examples(SOURCES)
    assert shown.splitlines() == [str(tmp_path / "mine" / name) for name in names]
    assert all((tmp_path / "mine" / n).read_bytes() == (SOURCES / n).read_bytes() for n in names)
    done("examples", "copy", "slurm", tmp_path / "other")
    assert (
        len(list((tmp_path / "other" / "slurm").iterdir())) == len(list((SOURCES / "slurm").iterdir())) == 2
    )
    refused("examples", "copy", names[0], tmp_path / "mine", what="there already", fix="another folder")
    refused("examples", "copy", "cluster-2x3.json", tmp_path, what="no example", fix="'cluster-2x2.json'")


@pytest.mark.long
def test_a_wheel_has_every_example(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-q", "-w", str(tmp_path)], check=True
    )

    (wheel,) = tmp_path.glob("partc-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert {f"partc/examples/{name}" for name in names_of_examples(SOURCES)} <= set(inside)
