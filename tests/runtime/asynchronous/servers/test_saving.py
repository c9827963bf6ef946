"""What a server writes into a checkpoint of where the data are."""

from pathlib import Path

import pytest
from msgspec import structs

from partc.runtime.asynchronous.servers.saving import ServerSaving
from partc.runtime.asynchronous.sessions.session import servers_of
from partc.runtime.checkpoints.manifest import TrainingPosition
from partc.runtime.checkpoints.write_checkpoint import CheckpointWriter
from partc.runtime.jobs.job import Checkpoints, Job
from tests.builders.plans.session_plans import additive_step, compile_sessions

FUNCTIONS = "def batches(): ...\ndef shards(num_shards, shard_id): ...\n"


@pytest.mark.parametrize(
    ("data", "sizes", "samples", "shards"),
    [
        ("/data.npz", {}, 48, 0),  # a file: what a step takes of it is assumed
        ("/staged-batches.npz", {"n": 10}, 120, 0),  # handed over, of a size of their own
        ("streams_of_servers:batches", {}, None, 0),  # workers alone know
        ("streams_of_servers:shards", {}, None, 2),
        ("module_of_workers:shards", {}, None, None),  # which servers have not
    ],
)
def test_samples_are_those_that_workers_have_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: str,
    sizes: dict[str, int],
    samples: int | None,
    shards: int | None,
) -> None:
    """Two workers' batches of an open size, assumed to be 4: of the one that is furthest, six were used."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "streams_of_servers.py").write_text(FUNCTIONS)
    plan = compile_sessions(additive_step(), tmp_path / "out", "1x2").plan
    inputs = [structs.replace(entry, shape=("n", *entry.shape[1:])) for entry in plan.data_inputs]
    plan = structs.replace(plan, data_inputs=tuple(inputs), sizes={"n": 4})
    job = Job("", 9, data, sizes=sizes, worker_steps=(0, 0))
    written: list[TrainingPosition] = []
    monkeypatch.setattr(CheckpointWriter, "begin", lambda self, read, position: written.append(position))

    chief = servers_of(plan)[0].rank
    ServerSaving(Checkpoints(str(tmp_path)), plan, chief, job, tmp_path, pytest.fail).begin((4, 6), {}, {})

    (position,) = written
    assert (position.batches, position.samples, position.shards) == (6, samples, shards)


def test_batches_that_are_handed_over_may_be_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compile_sessions(additive_step(), tmp_path / "out", "1x2").plan
    job = Job("", 9, "/staged-batches.npz", worker_steps=(0, 0), shards=2)
    written: list[TrainingPosition] = []
    monkeypatch.setattr(CheckpointWriter, "begin", lambda self, read, position: written.append(position))

    chief = servers_of(plan)[0].rank
    ServerSaving(Checkpoints(str(tmp_path)), plan, chief, job, tmp_path, pytest.fail).begin((4, 6), {}, {})

    assert written[0].shards == 2
