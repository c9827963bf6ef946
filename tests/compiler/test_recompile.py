"""Hosts are lost, and a training goes on with those that are left: compiled for them, from its checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.namespaces import Network, namespace_hosts
from partc.compiler import recompile
from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.options import Options
from partc.compiler.recompile import HostsLeft, recompile_without, without_hosts
from partc.cost.strategy import Strategy, Synchronisation, read_strategy
from partc.models.catalogue import build_model
from partc.runtime.checkpoints.manifest import steps_in
from partc.runtime.errors import RankFailed
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.jobs.job import Checkpoints
from partc.runtime.jobs.restarts import train_with_restarts
from partc.runtime.jobs.results import TrainingResult
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from tests.builders.plans.compiled_steps import cluster_of, random_batches


def compiled(folder: Path, cluster: object, strategy: str | Strategy = "ps") -> PlanFolder:
    forward = build_model("mlp", dtype="float64", sizes=[6, 12, 12, 5], batch=12)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))
    compile_step(step, cluster, folder, Options(batch="global", strategy=strategy))  # type: ignore[arg-type]
    return read_plan_folder(folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    return compiled(tmp_path_factory.mktemp("three") / "out", cluster_of("3x1"))


def test_a_plan_for_fewer_hosts_trains_what_the_first_one_does(three: PlanFolder, tmp_path: Path) -> None:
    batches = random_batches(three.plan, 2)
    lost = [three.plan.ranks[1].host]

    two, how = recompile_without(three, lost, tmp_path / "two")

    assert how == "--strategy ps" and {variable.method for variable in two.plan.variables} >= {"servers"}
    assert len(two.plan.ranks) == 2 and lost[0] not in {rank.host for rank in two.plan.ranks}
    expected = train_in_process(three.path, batches).variables
    for name, value in train_in_process(two.path, batches).variables.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("asked", "says", "sharded"),
    [
        ("fsdp", "--strategy fsdp", True),
        ("tensor=3", "--strategy auto, since --strategy tensor=3 is no more possible", False),
        ("auto", "--strategy auto", False),
    ],
)
def test_the_strategy_stays_the_one_that_was_asked_for(
    tmp_path: Path, asked: str, says: str, sharded: bool
) -> None:
    first = compiled(tmp_path / "three", cluster_of("3x1"), asked)

    two, how = recompile_without(first, [first.plan.ranks[1].host], tmp_path / "two")

    assert how.startswith(says)
    assert any(piece.box is not None for rank in two.plan.ranks for piece in rank.pieces) == sharded
    batches = random_batches(first.plan, 2)
    expected = train_in_process(first.path, batches).variables
    for name, value in train_in_process(two.path, batches).variables.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_strategy_of_the_users_own_keeps_what_it_says_of_hosts_that_are_left(
    three: PlanFolder, tmp_path: Path
) -> None:
    """The file says which variables have servers and which are all-reduced; one of the servers is gone."""
    own = read_strategy(three.path / "strategy.json")
    first, *others = own.parameters
    mixed = own.parameters | {first: Synchronisation("all_reduce")}
    folder = compiled(tmp_path / "mixed", cluster_of("3x1"), msgspec.structs.replace(own, parameters=mixed))

    two, how = recompile_without(folder, [folder.plan.ranks[1].host], tmp_path / "two")

    methods = {variable.name: variable.method for variable in two.plan.variables}
    assert how == "the same strategy file"
    assert methods[first] == "all_reduce" and {methods[name] for name in others} == {"servers"}


def test_links_of_a_lost_host_go_with_it() -> None:
    cluster = cluster_of("3x1")
    first, lost, last = (host.name for host in cluster.hosts)

    left = without_hosts(cluster, [lost])

    assert [host.name for host in left.hosts] == [first, last]
    assert left.links and not any(lost in end for link in left.links for end in link.ends)


def test_a_training_goes_on_with_the_hosts_that_are_left(
    three: PlanFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second host is lost in the third step, and never comes back."""
    batches = random_batches(three.plan, 5)
    asked, told = Checkpoints(str(tmp_path / "kept"), every_steps=1), list[str]()
    left = HostsLeft(three, 2, told.append)
    monkeypatch.setattr(recompile, "lost_hosts", lambda hosts, machines: [hosts[1]])

    def train(resume: bool) -> TrainingResult:
        steps = 5 if resume else 3
        result = Runner(left.folder).train(batches, steps, checkpoints=asked, resume=resume)
        if not resume:
            raise RankFailed("rank 1 was lost", at="a test", fix="none")
        return result

    result = train_with_restarts(train, 1, False, told.append, lambda _: None, left.look)

    assert (result.first_step, result.last_step, len(left.folder.plan.ranks)) == (3, 2, 2)
    assert "cannot be reached: compiled for the other 2 hosts, --strategy ps" in told[-1]
    for name, value in train_in_process(three.path, batches).variables.items():
        np.testing.assert_allclose(result.variables[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_too_few_hosts_end_a_training_and_others_come_back(
    three: PlanFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    left = HostsLeft(three, 2, told.append)
    monkeypatch.setattr(recompile, "lost_hosts", lambda hosts, machines: hosts[1:])
    with pytest.raises(
        RankFailed, match=r"1 of 3 hosts are left, 2 are asked for at least\n.*on host1, host2"
    ):
        left.look()

    monkeypatch.setattr(recompile, "lost_hosts", lambda hosts, machines: hosts[2:])
    left.look()
    assert len(left.folder.plan.ranks) == 2
    monkeypatch.setattr(recompile, "lost_hosts", lambda hosts, machines: [])
    left.look()
    assert left.folder is three
    assert told[-1] == "all 3 hosts can be reached again"


LAUNCH = ("-m", "partc.compiler.commands.cli", "run")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="hosts as network namespaces need root")
def test_a_host_that_is_gone_costs_a_restart_and_no_step(tmp_path: Path) -> None:
    """Three namespaces are hosts; all processes of the second are killed, and nothing starts there again."""
    network = Network("pmh", "10.213.21")
    with namespace_hosts(3, 1, 1e9, network) as cluster:
        folder = compiled(tmp_path / "out", cluster)
        options = ("--steps", "2000", "--save-every", "20", "--restarts", "2", "--min-hosts", "2")
        process = subprocess.Popen(
            [sys.executable, *LAUNCH, str(folder.path), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline_s = time.monotonic() + 60
        while not steps_in(tmp_path / "out" / "checkpoints") and time.monotonic() < deadline_s:
            time.sleep(0.05)
        _lose(network.host(2))
        said, _ = process.communicate(timeout=120)

    assert process.returncode == 0, said
    assert "h2 cannot be reached: compiled for the other 2 hosts" in said
    assert "2000 steps" in said and steps_in(tmp_path / "out" / "checkpoints")[-1] == 2000


def _lose(namespace: str) -> None:
    """Kill all that runs in a namespace, and take its name away: nobody enters it again."""
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    subprocess.run(["ip", "netns", "delete", namespace], check=True)
    for process in map(int, inside.stdout.split()):
        os.kill(process, signal.SIGKILL)
