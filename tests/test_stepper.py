"""Daemons that are stepped from outside compute what one process computes, and end when they must."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.errors import BadData, BadUsage, Diverged, RankFailed
from partc.runtime.in_process import train_in_process
from partc.runtime.interactive.stepper import Stepper
from partc.runtime.results import workers_of
from partc.runtime.runner import TRAINED_FILE
from tests.linear_plans import linear_all_reduce, linear_batches, linear_servers
from tests.row_plans import table_batches, table_on_servers

Batch = dict[str, np.ndarray]
PLANS = {
    "all-reduce": (partial(linear_all_reduce, replicas=3), linear_batches(3, steps=3)),
    "servers apart": (partial(linear_servers, merged=False, scattered=True), linear_batches(2, steps=3)),
    "table": (partial(table_on_servers, merged=True), table_batches(steps=3)),
}


def per_replica(stepper: Stepper, batch: Batch) -> dict[str, list[np.ndarray]]:
    replicas = stepper.plan.replicas
    axes = {entry.name: entry.sample_axis for entry in stepper.plan.data_inputs}
    return {
        name: [array] * replicas if axes[name] is None else np.split(array, replicas, axis=axes[name])
        for name, array in batch.items()
    }


@pytest.mark.parametrize("name", PLANS)
def test_steps_compute_what_one_process_computes(tmp_path: Path, name: str) -> None:
    make, batches = PLANS[name]
    folder = make(tmp_path / "out")
    expected = train_in_process(folder, batches, read_after=(1, 2, 3))

    with Stepper(folder) as stepper:
        for step, batch in enumerate(batches, 1):
            fetched = stepper.run([o.name for o in stepper.plan.outputs], per_replica(stepper, batch))
            for output, values in zip(stepper.plan.outputs, fetched, strict=True):
                assert len(values) == len(workers_of(stepper.plan))
                if output.layout == "whole":
                    for value in values:
                        np.testing.assert_allclose(value, expected.outputs[step - 1][output.name], rtol=1e-12)
            for variable, value in stepper.variables().items():
                np.testing.assert_allclose(value, expected.variables_after[step][variable], rtol=1e-12)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_all_reduce(tmp_path_factory.mktemp("plans") / "out", replicas=2)


BATCH = linear_batches(2, steps=1)[0]


def test_what_is_saved_is_what_was_trained_and_nothing_else_is_left(shared: Path) -> None:
    with Stepper(shared) as stepper:
        stepper.run((), per_replica(stepper, BATCH))
        trained = stepper.variables()
        saved = stepper.save()

    assert saved == shared / TRAINED_FILE
    np.testing.assert_array_equal(read_arrays(saved)["W"], trained["W"])
    assert not list(shared.glob(".run-*"))


def test_bad_requests_are_refused_and_the_daemons_go_on(shared: Path) -> None:
    with Stepper(shared) as stepper:
        good = per_replica(stepper, BATCH)
        name = next(iter(good))
        with pytest.raises(BadData, match="one for each replica"):
            stepper.run("loss", good | {name: good[name][0]})
        with pytest.raises(BadData, match="a list of 1 for 2 replicas"):
            stepper.run("loss", good | {name: good[name][:1]})
        with pytest.raises(BadData, match="no data for input"):
            stepper.run("loss", {})
        with pytest.raises(BadData, match="which is no input"):
            stepper.run("loss", good | {"stray": [BATCH[name]] * 2})
        with pytest.raises(BadData, match="supply one replica's samples"):
            stepper.run("loss", good | {name: [BATCH[name].astype(np.int32)] * 2})
        with pytest.raises(BadUsage, match="fetch among"):
            stepper.run("lose", good)
        assert stepper.steps == 0
        stepper.run("loss", good)

    with pytest.raises(BadUsage, match="is closed"):
        stepper.run("loss", good)


def test_a_loss_that_is_no_number_ends_the_job_and_says_so(shared: Path) -> None:
    with Stepper(shared) as stepper, pytest.raises(Diverged, match="in step 1"):
        stepper.run("loss", per_replica(stepper, {k: np.full_like(v, np.nan) for k, v in BATCH.items()}))


def test_a_rank_that_is_killed_is_named(shared: Path) -> None:
    with Stepper(shared) as stepper:
        job = next(shared.glob(".run-*"))
        os.kill(int((job / "process.rank-1").read_text()), signal.SIGKILL)
        with pytest.raises(RankFailed):
            stepper.run("loss", per_replica(stepper, BATCH))


def test_strangers_are_not_heard(shared: Path) -> None:
    with Stepper(shared) as stepper:
        endpoint = next(iter(stepper._ranks.channel.endpoints.values()))
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.ROUTING_ID, b"0000/0")
            stranger.set(zmq.LINGER, 0)
            stranger.connect(endpoint)
            stranger.send_multipart([b"nonsense"])
            stepper.run("loss", per_replica(stepper, BATCH))


LEFT_OPEN = """
import sys, time
from partc.runtime.interactive.stepper import Stepper
stepper = Stepper(sys.argv[1])
print(*[path.read_text() for path in stepper._path.glob(".run-*/process.rank-*")], flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["sys.exit()", "time.sleep(600)"], ids=["ends", "is killed"])
def test_ranks_end_with_the_process_that_steps_them(shared: Path, then: str) -> None:
    command = [sys.executable, "-c", LEFT_OPEN.format(then=then), str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ranks = [int(number) for number in process.stdout.readline().split()]
        assert len(ranks) == 2
        if "sleep" in then:
            process.kill()
        process.wait()

    deadline_s = time.monotonic() + 20
    while any(map(is_alive, ranks)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_alive, ranks))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
