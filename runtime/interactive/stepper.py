"""Train a plan step by step: feed, run, fetch, as a TensorFlow session does.

A feed is a list of arrays per data input, one for every replica.
"""

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from partc.runtime.data.batches import check_share, inputs_of
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.engines.machines import Machines, machines_of
from partc.runtime.errors import BadData, BadUsage, PartcError, RankFailed
from partc.runtime.interactive.channel import CHANNEL_FILE, StepperEnd
from partc.runtime.interactive.messages import (
    Close,
    Done,
    Found,
    Hash,
    Read,
    Ready,
    Step,
    StepperMessage,
    Write,
    Written,
    describe,
)
from partc.runtime.jobs.job import Job, write_job, write_record
from partc.runtime.jobs.job_folder import job_folder
from partc.runtime.jobs.launcher import launch
from partc.runtime.jobs.results import TRAINED_FILE, Owner
from partc.runtime.jobs.runner import LOG_FILE
from partc.runtime.plan.members import leaders_of
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]
ReplicaFeeds = Mapping[str, Sequence[Array]]

AT = "feeds"


def share_feeds(plan: Plan, feeds: ReplicaFeeds) -> dict[int, dict[str, Array]]:
    """Return what every rank is fed: rank -> data input -> array. Raises BadData."""
    known = {entry.name: entry for entry in plan.data_inputs}
    if stray := sorted(feeds.keys() - known.keys()):
        raise BadData(
            f"data for {stray[0]!r}, which is no input", at=AT, fix=f"supply {sorted(known)} and nothing else"
        )
    lists = {name: _list_of(plan, known[name], values) for name, values in feeds.items()}
    replicas = [{name: arrays[r] for name, arrays in lists.items()} for r in range(plan.replicas)]
    for replica, share in enumerate(replicas):
        check_share(plan, share, replica, at=f"{AT}, replica {replica}")
    return {
        rank.rank: {entry.name: replicas[rank.replica or 0][entry.name] for entry in inputs_of(plan, rank)}
        for rank in plan.ranks
    }


def _list_of(plan: Plan, entry: DataInput, values: Sequence[Array]) -> list[Array]:
    at = f"{AT}, data input {entry.name!r}"
    if not isinstance(values, list | tuple) or len(values) != plan.replicas:
        given = f"a list of {len(values)}" if isinstance(values, list | tuple) else type(values).__name__
        raise BadData(
            f"{given} for {plan.replicas} replicas",
            at=at,
            fix=f"give a list of {plan.replicas} arrays, one for each replica: numpy.split makes one",
        )
    arrays = [np.asarray(value, order="C") for value in values]
    if entry.sample_axis is None and any(not np.array_equal(array, arrays[0]) for array in arrays):
        raise BadData(
            "arrays that differ, for an input that all replicas share",
            at=at,
            fix="give every replica the same array, or compile with a sample axis for this input",
        )
    return arrays


DAEMON = "partc.runtime.interactive.daemon"
_POLL_S = 0.1


class Stepper:
    """A running job: a daemon per rank, which trains a step whenever it is asked to.

    Close it, or use it in a `with`; a process that ends closes what it has left open.
    """

    def __init__(
        self,
        plan: PlanFolder | Path | str,
        addresses: Mapping[str, str] | None = None,
        *,
        data: str = "",
        initial: Mapping[str, Array] | None = None,
        stop_when_diverged: bool = True,
        timeout_s: float = 600.0,
        seed: int = 0,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """Start the daemons and wait until they have loaded. Raises the error of the rank that failed.

        `data`: what ranks read by themselves (MODULE:FUNC, FILE.npz, synthetic); without, `run` feeds them.
        `seed`: of synthetic data and of what a step draws. `sizes`: symbolic sizes, if not the plan's.
        """
        folder = plan if isinstance(plan, PlanFolder) else read_plan_folder(plan)
        _check_synchronous(folder.plan)
        self.plan = folder.plan
        self.steps = 0  # trained so far
        self._path = folder.path
        self._timeout_s = timeout_s
        self._reads_itself = bool(data)
        self._at_the_end = ExitStack()
        self._job_folder = self._at_the_end.enter_context(job_folder(folder.path))
        self._error: PartcError | None = None
        machines = machines_of(folder.path) if addresses is None else Machines.at(addresses)
        places = {rank.host: machines.of(rank.host).address for rank in self.plan.ranks}
        self._ranks = StepperEnd(places, self._job_folder)
        job = Job(
            plan_folder=str(folder.path.resolve()),
            steps=0,
            data=data,
            seed=seed,
            sizes=dict(sizes or {}),
            stop_when_diverged=stop_when_diverged,
            has_initial=initial is not None,
            deadline_s=timeout_s,
        )
        self._daemons = self._launch(job, initial, machines)
        atexit.register(self.close)
        try:
            self._await_all(Ready)
        except BaseException:
            self.close()
            raise

    def run(
        self, fetches: str | Sequence[str], feeds: ReplicaFeeds | None = None
    ) -> list[Array] | list[list[Array]]:
        """Train one step; return a list per fetch (one list for a single name) with every replica's value.

        `fetches`: outputs of the plan. `feeds`: data input -> a list of one array per replica, nothing where
        ranks read data of their own. Raises BadData, BadUsage, and the error of the rank that failed.
        """
        names = [fetches] if isinstance(fetches, str) else list(fetches)
        self._check_open()
        self._check_fetches(names)
        shares = self._shares(feeds)
        self.steps += 1
        leaders = leaders_of(self.plan)
        for rank in self.plan.ranks:
            wanted = tuple(names) if rank in leaders else ()
            fed = shares[rank.rank]
            self._ranks.send(rank.rank, Step(self.steps, wanted, describe(fed)), fed)
        fetched = self._await_all(Done)
        lists = [[fetched[leader.rank][name] for leader in leaders] for name in names]
        return lists[0] if isinstance(fetches, str) else lists

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole, as it is now."""
        return read_arrays(self._write("variables.safetensors"))

    def read(self, owner: Owner, rows: Array | None = None) -> Array:
        """Return what a rank holds of a variable now: all of it, or the rows int64[k] of its piece."""
        places = {} if rows is None else {"rows": np.asarray(rows, np.int64)}
        return self._ask(owner.rank, Read(owner.held.value, describe(places)), places)

    def row_hashes(self, owner: Owner) -> Array:
        """Return uint64[rows] of what a rank holds of a variable's rows (execution/row_hashes.py)."""
        return self._ask(owner.rank, Hash(owner.held.value), {})

    def save(self) -> Path:
        """Write trained.safetensors into the plan's folder, as Runner.train does; return its path."""
        return self._write(TRAINED_FILE).replace(self._path / TRAINED_FILE)

    def close(self) -> None:
        """End the daemons. What was not saved is lost."""
        atexit.unregister(self.close)
        if self._daemons.is_alive():
            for rank in self.plan.ranks:
                try:
                    self._ranks.send(rank.rank, Close(), {})
                except PartcError:  # it has not come, or has gone: then all others end too
                    break
        self._ranks.close()
        self._daemons.join()
        self._at_the_end.close()

    def __enter__(self) -> "Stepper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self, job: Job, initial: Mapping[str, Array] | None, machines: Machines) -> threading.Thread:
        folder = self._job_folder
        write_job(folder, job, initial)
        write_record(folder / CHANNEL_FILE, self._ranks.channel)

        def watch() -> None:
            try:
                launch(
                    [rank.host for rank in self.plan.ranks],
                    folder,
                    self._path / LOG_FILE,
                    machines,
                    None,
                    None,
                    DAEMON,
                    [self._ranks.sockets],
                )
            except PartcError as error:
                self._error = error

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread

    def _await_all(self, kind: type[StepperMessage]) -> dict[int, dict[str, Array]]:
        return self._await(kind, [rank.rank for rank in self.plan.ranks])

    def _await(self, kind: type[StepperMessage], ranks: Sequence[int]) -> dict[int, dict[str, Array]]:
        """Return what came with the ranks' answers."""
        answers: dict[int, dict[str, Array]] = {}
        deadline_s = time.monotonic() + self._timeout_s
        while len(answers) < len(ranks):
            received = self._ranks.receive(_POLL_S)
            if received is not None:
                rank, (message, arrays) = received
                assert isinstance(message, kind), f"rank {rank} answers {message}, not {kind.__name__}"
                answers[rank] = arrays
            elif not self._daemons.is_alive():
                raise self._error or RankFailed(
                    "the daemons have ended", at="the executors", fix=f"read {self._path / LOG_FILE}"
                )
            elif time.monotonic() > deadline_s:
                silent = sorted(set(ranks) - answers.keys())
                raise RankFailed(
                    f"no answer for {self._timeout_s:.0f} s",
                    at=f"ranks {silent}",
                    fix=f"read {self._path / LOG_FILE}; raise the timeout if steps are this long",
                )
        return answers

    def _shares(self, feeds: ReplicaFeeds | None) -> dict[int, dict[str, Array]]:
        if not self._reads_itself:
            return share_feeds(self.plan, feeds or {})
        if feeds:
            raise BadUsage(
                "feeds for ranks that read data of their own", at="feeds", fix="leave feeds out, or data"
            )
        return {rank.rank: {} for rank in self.plan.ranks}

    def _ask(self, rank: int, message: StepperMessage, arrays: Mapping[str, Array]) -> Array:
        self._check_open()
        self._ranks.send(rank, message, arrays)
        (found,) = self._await(Found, [rank])[rank].values()
        return found

    def _write(self, name: str) -> Path:
        self._check_open()
        path = self._job_folder.resolve() / name
        for rank in self.plan.ranks:
            self._ranks.send(rank.rank, Write(str(path)), {})
        self._await_all(Written)
        return path

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._daemons.is_alive():
            raise BadUsage("the runner is closed", at="runner", fix="make another one")

    def _check_fetches(self, names: Sequence[str]) -> None:
        known = [output.name for output in self.plan.outputs]
        if unknown := [name for name in names if name not in known]:
            raise BadUsage(f"no output {unknown[0]!r}", at="fetches", fix=f"fetch among {known}")


def _check_synchronous(plan: Plan) -> None:
    if plan.asynchronous:
        raise BadUsage(
            "asynchronous workers have no steps in common that one could run one by one",
            at="the plan",
            fix="train it with Runner(plan).train(data, steps), or compile it without asynchronous",
        )
