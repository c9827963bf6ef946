"""ParallaxConfig: every field reaches an option, or is refused where it can mean nothing."""

from pathlib import Path

import pytest

import partc
from partc.compiler import parallax_api
from partc.compiler.graph_runner import TrainingOptions
from partc.compiler.options import Partitioner
from partc.cost.cluster.cluster import read_any_cluster
from partc.cost.strategy import read_strategy
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job import Checkpoints
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Run
from tests.checks.command_line import CLUSTER


def test_switches_of_servers_are_the_mechanisms_that_compiling_leaves_out() -> None:
    ps = partc.PSConfig(local_aggregation=False, boundary_between_workers_and_servers=False)

    assert ps.without() == ("local-aggregation", "boundary-ops")
    assert partc.PSConfig(boundary_among_servers=False).without() == ("post-aggregation",)
    assert partc.PSConfig().without() == ()


def test_what_is_configured_reaches_the_plan_and_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[PlanFolder, TrainingOptions]] = []
    monkeypatch.setattr(
        parallax_api, "SteppedTraining", lambda plan, data, options: started.append((plan, options))
    )
    sizes = {"vocab": 50, "embedding": 4, "cells": 4, "projection": 4, "steps": 2, "samples": 3}
    model = partc.build_training_graph(
        partc.build_model("lm", batch=2, **sizes), loss="loss", optimizer=partc.SGD(0.1)
    )
    config = partc.ParallaxConfig(
        strategy="ps",
        out=tmp_path / "out",
        communication=partc.CommunicationConfig(partc.PSConfig(local_aggregation=False)),
        checkpoints=partc.CheckpointConfig(tmp_path / "saved", save_ckpt_secs=60.0),
        profile=partc.ProfileConfig(tmp_path / "profile", [2], profile_worker=1),
        session=partc.SessionConfig(intra_op_threads=2, seed=7, stop_when_diverged=False),
        redirect_path=tmp_path / "logs",
        timeout_s=9.0,
    )

    partc.get_runner(model, CLUSTER, config)

    ((plan, job),) = started
    assert not read_strategy(tmp_path / "out/strategy.json").parameters["embedding"].local_aggregation
    assert {rank.threads for rank in plan.plan.ranks} == {2}
    assert job == TrainingOptions(
        timeout_s=9.0,
        seed=7,
        stop_when_diverged=False,
        checkpoints=Checkpoints(str(tmp_path / "saved"), None, 60.0, 3),
        traced_steps=((2, 2),),
        trace=tmp_path / "profile/trace.json",
        traced_replica=1,
        redirect=tmp_path / "logs",
    )


def test_what_mpirun_is_told_and_threads_are_the_clusters() -> None:
    mpi = partc.MPIConfig("-genv NAME 'two words'")
    config = partc.ParallaxConfig(
        communication=partc.CommunicationConfig(mpi=mpi), session=partc.SessionConfig(intra_op_threads=2)
    )

    machines = config.machines(read_any_cluster(Path(CLUSTER)))

    assert machines.mpiexec == ("-genv", "NAME", "two words")
    assert {device.threads for host in machines.hosts for device in host.devices} == {2}
    assert config.machines(read_any_cluster(Path(CLUSTER))).hosts != read_any_cluster(Path(CLUSTER)).hosts


def test_checkpoints_and_profiles(tmp_path: Path) -> None:
    saved = partc.CheckpointConfig(tmp_path, save_ckpt_steps=5, save_ckpt_secs=60, keep=2)
    assert saved.checkpoints() == Checkpoints(str(tmp_path), 5, 60, 2)
    assert partc.CheckpointConfig().checkpoints() is None
    assert partc.ProfileConfig(tmp_path, [7, 3]).traced_steps() == ((3, 3), (7, 7))
    assert partc.ProfileConfig(tmp_path, profile_range=(3, 7)).traced_steps() == ((3, 7),)
    assert partc.ProfileConfig().traced_steps() == 0


@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda: partc.PSConfig(replicate_variables=False), "communication.ps.replicate_variables"),
        (lambda: partc.PSConfig(protocol="grpc+verbs"), "communication.ps.protocol"),
        (lambda: partc.MPIConfig(3), "MPIConfig.mpirun_options"),
        (lambda: partc.CommunicationConfig(ps={"local_aggregation": False}), "CommunicationConfig.ps"),
        (lambda: partc.CheckpointConfig(save_ckpt_steps=2), "checkpoints.ckpt_dir"),
        (lambda: partc.CheckpointConfig("x", save_ckpt_steps=0), "checkpoints.save_ckpt_steps"),
        (lambda: partc.CheckpointConfig("x", save_ckpt_secs="1"), "CheckpointConfig.save_ckpt_secs"),
        (lambda: partc.CheckpointConfig("x", save_ckpt_steps=True), "CheckpointConfig.save_ckpt_steps"),
        (lambda: partc.ProfileConfig("x"), "profile.profile_steps"),
        (lambda: partc.ProfileConfig(profile_steps=[1]), "profile.profile_dir"),
        (lambda: partc.ProfileConfig("x", [0]), "profile.profile_steps"),
        (lambda: partc.ProfileConfig("x", [1], (1, 2)), "profile.profile_range"),
        (lambda: partc.ProfileConfig("x", profile_range=(5, 2)), "profile.profile_steps"),
        (lambda: partc.SessionConfig(inter_op_threads=4), "session.inter_op_threads"),
        (lambda: partc.SessionConfig(intra_op_threads=0), "session.intra_op_threads"),
        (lambda: partc.ParallaxConfig(average_dense="yes"), "ParallaxConfig.average_dense"),
        (lambda: partc.ParallaxConfig(strategy=None), "ParallaxConfig.strategy"),
        (lambda: partc.ParallaxConfig(fetch_gradients="W"), "ParallaxConfig.fetch_gradients"),
        (lambda: partc.ParallaxConfig(sizes={"batch": "8"}), "ParallaxConfig.sizes"),
        (lambda: partc.ParallaxConfig(partitioner=4), "ParallaxConfig.partitioner"),
        (
            lambda: partc.ParallaxConfig(
                strategy="allreduce",
                communication=partc.CommunicationConfig(partc.PSConfig(local_aggregation=False)),
            ),
            "config.communication.ps, with strategy='allreduce'",
        ),
        (
            lambda: partc.ParallaxConfig(
                sync=False, communication=partc.CommunicationConfig(mpi=partc.MPIConfig("-v"))
            ),
            "config.communication.mpi, with sync=False",
        ),
        (
            lambda: partc.ParallaxConfig(sync=False, profile=partc.ProfileConfig("x", [1])),
            "config.profile, with sync=False",
        ),
    ],
)
def test_what_can_mean_nothing_is_refused_by_its_name(make, at: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadUsage) as refusal:
        make()

    assert f"at:  {at}" in str(refusal.value) or f"at:  config.{at}" in str(refusal.value)
    assert "fix: " in str(refusal.value)


def test_a_worker_that_is_none_and_a_folder_that_cannot_be_are_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    forward = partc.build_model("mlp", sizes=(6, 3), batch=4)
    train = partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.SGD(0.5))
    (tmp_path / "file").write_text("")
    for config, at in (
        ({"profile": partc.ProfileConfig(tmp_path, [1], profile_worker=4)}, "profile.profile_worker"),
        ({"redirect_path": tmp_path / "file/logs"}, "redirect_path"),
    ):
        with pytest.raises(BadUsage, match=f"config.{at}"):
            partc.get_runner(train, CLUSTER, partc.ParallaxConfig(out=tmp_path / "out", force=True, **config))


def test_a_partitioner_tells_how_it_searches() -> None:
    assert partc.get_partitioner(2, "fitted") == Partitioner(2, "fitted")
    assert partc.get_partitioner(2) == Partitioner(2, "model")
    with pytest.raises(BadUsage, match=r"'best' is not (.|\n)*fitted"):
        partc.get_partitioner(2, "best")  # type: ignore[arg-type]


def test_replicas_own_outputs_cost_no_communication(tmp_path: Path) -> None:
    forward = partc.build_model("mlp", sizes=(6, 3), batch=4)
    train = partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.SGD(0.5))
    own = partc.compile(train, CLUSTER, tmp_path / "own", replica_outputs=True)
    mean = partc.compile(train, CLUSTER, tmp_path / "mean")

    kinds = [[type(i).__name__ for i in folder.plan.instructions] for folder in (own, mean)]
    assert kinds[0] == kinds[1]
    assert {o.name for o in own.plan.outputs} - {o.name for o in mean.plan.outputs} == {"loss.replica"}
    assert read_plan_folder(tmp_path / "own").plan.aggregation.replica_outputs
    assert sum(isinstance(i, Run) for i in own.plan.instructions) > 0
