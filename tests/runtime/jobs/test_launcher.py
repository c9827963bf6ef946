from pathlib import Path

import pytest

from partc.runtime.errors import BadUsage
from partc.runtime.jobs.launcher import KEEPER, find_mpiexec, mpiexec_command
from tests.builders.plans.hand_made_plans import plan_of, rank

PLAN = plan_of([rank(r, ("worker",), r, {}) for r in range(3)], [])


def test_one_machine_needs_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTC_MPIEXEC", "/bin/true")

    command = mpiexec_command([rank.host for rank in PLAN.ranks], Path("job"), {"alpha": "localhost"})

    assert command[:3] == ["/bin/true", "-n", "3"]
    folder = str(Path("job").absolute())
    assert command[-5:] == [KEEPER, folder, "rank", "partc.runtime.jobs.daemon", folder]


def test_ranks_start_on_their_hosts_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTC_MPIEXEC", "/bin/true")

    command = mpiexec_command([rank.host for rank in PLAN.ranks], Path("job"), {"alpha": "10.0.0.1"})

    assert command[:5] == ["/bin/true", "-host", "10.0.0.1:3", "-n", "3"]


def test_an_mpiexec_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTC_MPIEXEC", "/nowhere/mpiexec")

    with pytest.raises(BadUsage, match="PARTC_MPIEXEC=/nowhere/mpiexec"):
        find_mpiexec()
