import os
import signal
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.verification.verify import verify
from partc.runtime.asynchronous.processes.launcher import launch_sessions
from partc.runtime.asynchronous.processes.watch import Rules
from partc.runtime.asynchronous.sessions.session import with_one_worker
from partc.runtime.engines.machines import Machines
from partc.runtime.errors import BadData, BadUsage, Diverged, RankFailed
from partc.runtime.jobs.job import Progress
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder
from tests.builders.plans.session_plans import (
    additive_step,
    batches_of_workers,
    compile_sessions,
    train_in_turn,
    whole_batches,
)
from tests.checks.command_line import CLUSTER, done, make_mlp, refused
from tests.checks.job_processes import job_processes

# Worker 1 dies of itself when it is asked for the batch of a step.
DYING = """
import os, signal, sys, time
import numpy as np

def batches():
    step = 0
    with np.load("batches.npz") as arrays:
        arrays = dict(arrays)
    while True:
        step += 1
        if sys.argv[-2:] == ["worker", "1"] and step == 3:
            HOW
        yield arrays
"""


@pytest.fixture
def additive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanFolder:
    monkeypatch.chdir(tmp_path)
    folder = compile_sessions(additive_step(), tmp_path / "out", "1x2")
    np.savez(tmp_path / "batches.npz", **whole_batches(folder, steps=1)[0])
    return folder


def data_of_workers_that_end(how: str) -> str:
    Path("dying.py").write_text(DYING.replace("HOW", how))
    return "dying:batches"


def test_the_killing_of_a_worker_stops_no_other_and_is_reported(additive: PlanFolder) -> None:
    data = data_of_workers_that_end("time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)")
    seen: list[Progress] = []

    result = Runner(additive).train(data, 12, staleness=1, timeout_s=60, on_progress=seen.append)

    assert result.lost_workers == ("worker 1 (host0/cpu1) died: signal 9 (SIGKILL)",)
    assert (seen[-1].step, seen[-1].steps) == (12, 12)
    assert [output["loss"].shape for output in result.outputs] == [(1,)] * 12
    assert sum(result.missed_pushes.values()) == 12 + 2
    (batch,) = whole_batches(additive, steps=1)
    one = {name: np.split(array, 2)[0] for name, array in batch.items()}
    both = [batch] * 2
    rest = [{name: np.concatenate([array, array]) for name, array in one.items()}] * 5
    for name, expected in train_in_turn(additive, [*both, *rest]).items():
        np.testing.assert_array_equal(result.variables[name], expected)
    assert "worker 1 (host0/cpu1) died" in (additive.path / "run.log").read_text()
    assert list(additive.path.glob(".run-*")) == []


def test_a_worker_that_leaves_with_exit_code_0_is_lost_as_others_are(additive: PlanFolder) -> None:
    result = Runner(additive).train(data_of_workers_that_end("os._exit(0)"), 6, timeout_s=60)

    assert result.lost_workers == ("worker 1 (host0/cpu1) died: exit code 0, without a report",)
    assert len(result.outputs) == 6


def test_the_death_of_a_server_ends_the_run(additive: PlanFolder) -> None:
    def kill_server(progress: Progress) -> None:
        for found in job_processes(additive.path):
            if (found.role, found.name) == ("member", "server-1"):
                os.kill(found.process, signal.SIGKILL)

    batches = [*whole_batches(additive, steps=1)] * 3000

    with pytest.raises(
        RankFailed, match=r"server-1 died: signal 9 .*\n  at:  server-1 \(host0\).*\n.*run.log"
    ):
        Runner(additive).train(batches, 3000, timeout_s=60, on_progress=kill_server)

    assert job_processes(additive.path) == []


def test_the_step_of_a_server_that_died_is_that_of_its_workers(additive: PlanFolder) -> None:
    data = data_of_workers_that_end("time.sleep(60)")
    Path("dying.py").write_text(Path("dying.py").read_text().replace('["worker", "1"]', "sys.argv[-2:]"))

    def kill_server() -> None:
        for found in job_processes(additive.path):
            if (found.role, found.name) == ("member", "server-1"):
                os.kill(found.process, signal.SIGKILL)

    def kill_it_later(progress: Progress) -> None:
        threading.Timer(2.0, kill_server).start()  # when both workers wait for their third batch

    with pytest.raises(RankFailed, match=r"at:  server-1 \(host0\), step 2 in the mean of workers, waiting"):
        Runner(additive).train(data, 12, timeout_s=60, on_progress=kill_it_later)


@pytest.mark.long
def test_an_error_of_a_worker_ends_the_run_with_it(additive: PlanFolder) -> None:
    with pytest.raises(BadData, match="dying:batches ends after 2 batches"):
        Runner(additive).train(data_of_workers_that_end("return"), 12, timeout_s=60)


@pytest.mark.long
def test_all_workers_dead_end_the_run(additive: PlanFolder) -> None:
    data = data_of_workers_that_end("pass")
    Path("dying.py").write_text(Path("dying.py").read_text().replace('["worker", "1"]', "sys.argv[-2:]"))
    Path("dying.py").write_text(Path("dying.py").read_text().replace("pass", "os._exit(3)"))

    with pytest.raises(RankFailed, match=r"every worker died\n  at:  worker . .*exit code 3; worker"):
        Runner(additive).train(data, 12, timeout_s=60)


@pytest.mark.long
def test_a_loss_that_is_not_a_number_names_the_worker(tmp_path: Path) -> None:
    folder = compile_sessions("mlp, sgd", tmp_path / "out", "1x2")
    batches = batches_of_workers(folder, steps=4)
    batches[2]["x"][-1] = np.nan

    with pytest.raises(Diverged, match=r"nan in step 3: .* nan\n  at:  worker 1 .*'x'"):
        Runner(folder).train(batches, 4, timeout_s=60)
    assert len(Runner(folder).train(batches, 4, timeout_s=60, stop_when_diverged=False).outputs) == 4


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["2x2", "2x1s"])
def test_processes_lose_no_push(tmp_path: Path, cluster: str) -> None:
    folder = compile_sessions(additive_step(), tmp_path / "out", cluster)
    batches = whole_batches(folder, steps=20)

    result = Runner(folder).train(batches, 20, timeout_s=60)

    for name, expected in train_in_turn(folder, batches).items():
        np.testing.assert_array_equal(result.variables[name], expected)


def test_the_command_line_compiles_runs_verifies_and_deploys(tmp_path: Path) -> None:
    make_mlp(tmp_path)
    out = tmp_path / "out"
    told = done("compile", tmp_path / "train.onnx", "-c", CLUSTER, "--asynchronous", "-o", out)
    assert "asynchronous: 4 workers, each in a session of its own with all servers" in told

    done("run", out, "--steps", 3, "--staleness", 0)
    verified = done("verify", out, "--steps", 2)

    onnx.checker.check_model(str(out / "trained.onnx"))
    assert "3 ranks (3 asynchronous workers left out) against one device, 2 steps" in verified
    assert done("simulate", out)


def test_what_asynchronous_training_cannot_do_is_refused(tmp_path: Path) -> None:
    make_mlp(tmp_path)
    common = ("compile", tmp_path / "train.onnx", "-c", CLUSTER, "-o", tmp_path / "out")
    refused(*common, "--asynchronous", "--strategy", "hybrid", fix="use ps")
    refused(*common, "--asynchronous", "--batch", "global", fix="leave --batch out")
    done(*common, "--asynchronous")
    run = ("run", tmp_path / "out", "--steps", 2)
    refused(*run, "--staleness", -1, what="a staleness of -1", fix="0 or more")
    refused(*run, "--trace", tmp_path / "t.json", at="--trace", fix="compile without --asynchronous")
    done(*common)
    refused(*run, "--staleness", 1, at="--staleness", fix="compile with --asynchronous")


# What starts a process "elsewhere": loopback has more than one address.
SSH = """#!/bin/sh
echo "$1" >> started.txt
shift
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "ssh"
    script.write_text(SSH)
    script.chmod(0o700)
    monkeypatch.setenv("PARTC_SSH", str(script))
    return tmp_path


def test_hosts_at_addresses_train_over_the_network(ssh: Path) -> None:
    folder = compile_sessions(additive_step(), ssh / "out", "2x2")
    batches = whole_batches(folder, steps=6)
    addresses = {"host0": "127.0.0.2", "host1": "127.0.0.3"}

    result = Runner(folder, addresses=addresses).train(batches, 6, timeout_s=60)

    for name, expected in train_in_turn(folder, batches).items():
        np.testing.assert_array_equal(result.variables[name], expected)
    started = (ssh / "started.txt").read_text().split()
    assert sorted(started) == ["127.0.0.2"] * 3 + ["127.0.0.3"] * 3  # a server and two workers each


def test_the_death_of_a_remote_worker_stops_no_other(ssh: Path) -> None:
    folder = compile_sessions(additive_step(), ssh / "out", "1x2")
    np.savez(ssh / "batches.npz", **whole_batches(folder, steps=1)[0])
    data = data_of_workers_that_end("os.kill(os.getpid(), signal.SIGKILL)")

    result = Runner(folder, addresses={"host0": "127.0.0.2"}).train(data, 8, timeout_s=60)

    assert [lost.split(" died")[0] for lost in result.lost_workers] == ["worker 1 (host0/cpu1)"]
    assert len(result.outputs) == 8


def test_a_server_that_others_would_not_find_is_refused(additive: PlanFolder, tmp_path: Path) -> None:
    folder = compile_sessions(additive_step(), tmp_path / "two", "2x1")
    machines = Machines.at({"host0": "localhost", "host1": "127.0.0.3"})

    with pytest.raises(BadUsage, match=r"host 'host0' has the address 'localhost'.*\n.*\n  fix: give every"):
        launch_sessions(folder.plan, tmp_path, tmp_path / "log", machines, Rules((0, 0)), None, 1.0)


def test_a_missing_ssh_is_named(additive: PlanFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTC_SSH", "no-such-program")

    with pytest.raises(BadUsage, match=r"no ssh was found.*\n  at:  PARTC_SSH=no-such-program"):
        Runner(additive, addresses={"host0": "127.0.0.2"}).train("synthetic", 2)


def test_every_step_of_the_only_worker_is_verified(additive: PlanFolder) -> None:
    report = verify(additive, steps=3, data="batches.npz")

    assert report.passed, report.variables
    assert (report.left_out, report.steps) == (1, 3)
    assert all(check.max_change > 0 for check in report.variables)


def test_variables_after_each_step_are_those_of_that_step(additive: PlanFolder) -> None:
    alone = with_one_worker(additive)
    whole = whole_batches(additive, steps=3)
    batches = [{name: np.split(array, 2)[0] for name, array in batch.items()} for batch in whole]

    result = Runner(alone).train(batches, 3, read_after=(1, 3))

    for step in (1, 3):
        for name, expected in train_in_turn(alone, batches[:step]).items():
            np.testing.assert_array_equal(result.variables_after[step][name], expected)
