"""What ranks agree on after a step, and who keeps the others waiting."""

from pathlib import Path

import pytest

from partc.runtime.jobs.barriers import _straggler
from partc.runtime.jobs.job import Notice, Progress, Straggler
from partc.runtime.jobs.runner import Runner
from tests.builders.plans.linear_plans import linear_all_reduce


@pytest.mark.parametrize(
    ("most", "least", "found"),
    [(900, 20, Straggler(3, 0.02, 0.9)), (900, 750, None), (0, 0, None)],
    ids=["one does not wait", "all wait about alike", "nobody waits"],
)
def test_who_waits_least_keeps_others_waiting(most: int, least: int, found: Straggler | None) -> None:
    assert _straggler(most, least, 3) == found


def test_a_straggler_is_named_within_twenty_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes 20 ms more for each step from the sixth on; the last step is always told."""
    (tmp_path / "slow.py").write_text(
        "import os, time, numpy as np\n"
        "def batches():\n"
        "    for step in range(1, 100):\n"
        "        if step > 5 and os.environ['PMI_RANK'] == '1':\n"
        "            time.sleep(0.02)\n"
        "        yield {'x': np.ones((12, 3)), 'y': np.ones((12, 2))}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told: list[Progress | Notice] = []

    Runner(linear_all_reduce(tmp_path / "out", 3)).train("slow:batches", 25, on_progress=told.append)

    last = told[-1]
    assert isinstance(last, Progress)
    assert last.straggler is not None
    assert last.straggler.rank == 1
    assert last.straggler.others_waited > 0.5
