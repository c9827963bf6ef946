"""That `make chaos` can begin: what it does takes hours and is run by hand."""

import subprocess
import sys


def test_its_scenarios_are_listed() -> None:
    listed = subprocess.run([sys.executable, "-m", "tests.chaos", "--list"], capture_output=True, text=True)

    assert listed.returncode == 0, listed.stderr
    names = {line.split(maxsplit=1)[1] for line in listed.stdout.splitlines()}
    assert {"rank killed", "launcher killed", "a bit flipped"} <= names
