"""A job of one machine listens to nobody beside it."""

import os
from pathlib import Path

import pytest

from partc.runtime.jobs.runner import Runner
from tests.builders.plans.linear_plans import linear_all_reduce

LISTENING = """
import os
from pathlib import Path

def parents():
    process = os.getpid()
    while process not in (1, LAUNCHER):
        yield process
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])

def ports():
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
    listening = {fields[9] for fields in lines if fields[3] == "0A"}
    for process in parents():
        for path in Path(f"/proc/{process}/fd").iterdir():
            if path.is_symlink() and path.readlink().name.removeprefix("socket:[").rstrip("]") in listening:
                yield f"{process} {Path(f'/proc/{process}/cmdline').read_bytes()[:80]}"
"""
FEED = """
import numpy as np
def batches():
    Path(f"FOLDER/rank-{os.environ['PMI_RANK']}").write_text("\\n".join(ports()))
    for _ in range(3):
        yield {'x': np.ones((8, 3)), 'y': np.ones((8, 2))}
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="asks Linux")
def test_a_job_of_one_machine_opens_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its ranks nor keepers, nor what started them."""
    monkeypatch.delenv("PARTC_MPIEXEC", raising=False)
    text = (LISTENING + FEED).replace("LAUNCHER", str(os.getpid())).replace("FOLDER", str(tmp_path))
    (tmp_path / "listening.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    Runner(linear_all_reduce(tmp_path / "out", 2)).train("listening:batches", 2)

    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == {"rank-0": "", "rank-1": ""}
