"""What hosts of asynchronous training lack is found before anything begins, all of it at once."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

from partc.runtime.asynchronous.processes import start_check
from partc.runtime.asynchronous.processes.job import ProcessPlace, SessionJob, write_session_job
from partc.runtime.asynchronous.processes.start_check import await_start, give_up
from partc.runtime.engines.host_check import HostFindings, found_by
from partc.runtime.errors import HostLacks, RankFailed
from partc.runtime.jobs.job import Job, write_job
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder, seal_plan_folder
from tests.builders.plans.session_plans import additive_step, compile_sessions

PROCESSES = (("server", 1), ("server", 2), ("worker", 0), ("worker", 1))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    return compile_sessions(additive_step(), tmp_path_factory.mktemp("plan") / "out", "2x1")


def job_of(plan: PlanFolder, folder: Path, deadline_s: float = 20.0) -> Path:
    """Write a job: each host has a server and a worker."""
    folder.mkdir()
    first, second = ProcessPlace("host0", "a"), ProcessPlace("host1", "b")
    places = {"server-1": first, "server-2": second, "worker-0": first, "worker-1": second}
    write_session_job(folder, SessionJob({}, 1000, steps=(0, 0), places=places))
    write_job(folder, Job(str(plan.path), 1, "synthetic", deadline_s=deadline_s), None)
    return folder


def faults_of(folder: Path) -> list[BaseException | None]:
    with ThreadPoolExecutor(len(PROCESSES)) as pool:
        asked = [pool.submit(await_start, folder, *process) for process in PROCESSES]
        return [one.exception() for one in asked]


def test_all_begin_where_nothing_is_lacking(plan: PlanFolder, tmp_path: Path) -> None:
    assert [rank.rank for rank in plan.plan.ranks] == [0, 1, 2], "ranks 1 and 2 are servers"

    assert faults_of(job_of(plan, tmp_path / "job")) == [None] * 4


def test_the_first_server_tells_all_that_is_lacking(
    plan: PlanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second host has another onnxruntime, a file of the plan is gone, and a checkpoint has no room."""

    def other(name: str) -> HostFindings:
        found = found_by(name)
        mine = found.versions | ({"onnxruntime": "9.9"} if name == "worker-1" else {})
        return structs.replace(found, versions=mine)

    folder = job_of(plan, tmp_path / "job")
    monkeypatch.setattr(start_check, "found_by", other)
    monkeypatch.setattr(start_check, "_AFTER_WORD_S", 0.0)
    segment = next((plan.path / "segments").iterdir())
    kept = segment.read_bytes()
    segment.unlink()
    try:
        chief, *others = faults_of(folder)
    finally:
        segment.write_bytes(kept)

    assert isinstance(chief, HostLacks)
    assert chief.what == "3 things are lacking on 2 hosts"
    assert "onnxruntime is 9.9" in chief.at
    assert chief.at.count(f"a file of the plan is missing: {segment}") == 2, "each machine looks for itself"
    assert all(isinstance(fault, HostLacks) and "says what" in fault.at for fault in others)


def test_who_says_nothing_is_named(plan: PlanFolder, tmp_path: Path) -> None:
    folder = job_of(plan, tmp_path / "job", deadline_s=0.1)

    with pytest.raises(RankFailed, match=r"server-2 did not say what it finds on its host"):
        await_start(folder, *PROCESSES[0])


def test_a_worker_that_died_before_is_not_waited_for(plan: PlanFolder, tmp_path: Path) -> None:
    folder = job_of(plan, tmp_path / "job")
    with ThreadPoolExecutor(len(PROCESSES)) as pool:
        others = [pool.submit(await_start, folder, *process) for process in PROCESSES[:-1]]
        again = pool.submit(await_start, folder, "worker", 3)  # its second life, which waits as well
        assert not any(one.done() for one in (*others, again))
        give_up(folder, "worker-1")

        assert [one.exception() for one in (*others, again)] == [None] * len(PROCESSES)


def test_a_worker_that_comes_back_compares_itself_with_the_chief(
    plan: PlanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job_of(plan, tmp_path / "job")
    assert faults_of(folder) == [None] * 4
    await_start(folder, "worker", 3)  # the second life of worker 1

    none = structs.replace(found_by("worker-1"), versions={"numpy": "9.9"})
    monkeypatch.setattr(start_check, "found_by", lambda name: none)
    with pytest.raises(HostLacks, match=r"numpy is 9\.9, host 'host0' .* has"):
        await_start(folder, "worker", 3)


def test_a_run_that_lacks_something_ends_before_its_first_step(tmp_path: Path) -> None:
    """The second host's PYTHONPATH has another version of numpy, as far as its metadata say."""
    folder = compile_sessions(additive_step(), tmp_path / "out", "2x1")
    (tmp_path / "numpy-9.9.dist-info").mkdir()
    (tmp_path / "numpy-9.9.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 9.9\n")
    own = {"PYTHONPATH": str(tmp_path)}
    hosts = [{"name": "host0"}, {"name": "host1", "environment": own}]
    (folder.path / "cluster.json").write_text(json.dumps({"hosts": hosts}))
    seal_plan_folder(folder.path)
    seen: list[object] = []

    with pytest.raises(HostLacks, match=r"numpy is 9\.9, host 'host0' .* has .*\n  at:  host 'host1'"):
        Runner(folder).train("synthetic", 50, on_progress=seen.append)

    assert not seen
