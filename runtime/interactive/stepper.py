"""Train a plan step by step: feed, run, fetch, as a TensorFlow session does."""

import atexit
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from partc.runtime.checkpoints.resume import DataAsked, StartPoint, data_asked, resume_from
from partc.runtime.checkpoints.training_folders import training_folders
from partc.runtime.checkpoints.write_checkpoint import remove_parts
from partc.runtime.data.checkpoint import read_arrays
from partc.runtime.data.sample_files import is_of_samples
from partc.runtime.engines.allotted_nodes import on_allotted_nodes
from partc.runtime.engines.machines import machines_at
from partc.runtime.errors import BadUsage, NotSaved, PartcError, RankFailed, some_of
from partc.runtime.execution.recorder import RankTimes, TracedSteps
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
from partc.runtime.interactive.share_feeds import ReplicaFeeds, share_feeds
from partc.runtime.jobs.job import Checkpoints, Job, read_times, write_job, write_record
from partc.runtime.jobs.job_folder import job_folder
from partc.runtime.jobs.launcher import launch
from partc.runtime.jobs.results import LOG_FILE, TRAINED_FILE, Owner
from partc.runtime.log import log
from partc.runtime.plan.members import leaders_of
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Plan
from partc.runtime.supervision.stop_signals import StopSignals

Array = np.ndarray[Any, np.dtype[Any]]

DAEMON = "partc.runtime.interactive.daemon"
_POLL_S = 0.1
_VERDICT_S = 15.0  # from a rank's end until it is known why it ended


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
        seed: int | None = None,
        sizes: Mapping[str, int] | None = None,
        checkpoints: Checkpoints | None = None,
        traced_steps: TracedSteps = 0,
        redirect: Path | None = None,
    ) -> None:
        """Start the daemons and wait until they have loaded. Raises the error of the rank that failed.

        `data`: what ranks read by themselves (MODULE:FUNC, FILE.npz, synthetic); without, `run` feeds them.
        `seed`: of synthetic data and of what a step draws; None: 0, or the resumed training's. `sizes`:
        symbolic sizes, if not the plan's. `checkpoints`: where and when the training is saved, at its end as
        well; where there is one, the training goes on from it. `traced_steps`: of which `times` tells, once
        this is closed. `redirect`: a folder that takes what each rank prints.
        """
        folder = plan if isinstance(plan, PlanFolder) else read_plan_folder(plan)
        _check_synchronous(folder.plan)
        self.plan = folder.plan
        with ExitStack() as held:
            if checkpoints is not None:
                held.enter_context(training_folders(folder.path, checkpoints))
            sized = msgspec.structs.replace(self.plan, sizes=self.plan.sizes | dict(sizes or {}))
            asked = data_asked(sized, data, None)
            self.begun = _begin(sized, checkpoints, seed, asked)
            self._at_the_end = held.pop_all()
        self.steps = self.begun.step  # trained so far
        self.times: dict[int, RankTimes] = {}  # rank -> the traced steps
        self._path = folder.path.absolute()
        self._timeout_s = timeout_s
        self._reads_itself = bool(data)
        self._redirect = redirect
        self._is_traced = bool(traced_steps)
        self._saves = _SaveClock(checkpoints, self.steps)
        self._error: PartcError | None = None
        self._stop = StopSignals()
        self._is_closed = False
        self._daemons = threading.Thread(target=self._watch, daemon=True)
        job = Job(
            plan_folder=str(folder.path.resolve()),
            steps=0,
            data=data,
            is_shuffled=self.begun.is_shuffled and is_of_samples(data),
            sizes=dict(sizes or {}),
            stop_when_diverged=stop_when_diverged,
            has_initial=initial is not None,
            deadline_s=timeout_s,
            traced_steps=traced_steps,
            data_name=data,
            file_samples=asked.file_samples,
            shards=0 if data else self.plan.replicas,
            checkpoints=checkpoints,
        )
        try:
            self._begin_daemons(job.behind(self.begun), initial, addresses)
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
        names = [fetches] if isinstance(fetches, str) else list(_names_in(fetches, self.plan))
        self._check_open()
        self.check_fetches(names)
        shares = self._shares(feeds)
        self.steps += 1
        step, saves = self.steps - self.begun.step, self._saves.is_due(self.steps)
        leaders = leaders_of(self.plan)
        for rank in self.plan.ranks:
            asked_names = tuple(names) if rank in leaders else ()
            fed = shares[rank.rank]
            self._send(rank.rank, Step(step, asked_names, describe(fed), saves), fed)
        fetched = self._await_all(Done)
        lists = [[fetched[leader.rank][name] for leader in leaders] for name in names]
        return lists[0] if isinstance(fetches, str) else lists

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole, as it is now."""
        return read_arrays(self._write("variables.safetensors"))

    def read(self, owner: Owner, rows: Array | None = None) -> Array:
        """Return what a rank holds of a variable now: all of it, or the rows int64[k] of its piece."""
        places = {} if rows is None else {"rows": np.asarray(rows, np.int64)}
        return self._ask(owner.rank, Read(owner.piece.value, describe(places)), places)

    def row_hashes(self, owner: Owner) -> Array:
        """Return uint64[rows] of what a rank holds of a variable's rows (execution/row_hashes.py)."""
        return self._ask(owner.rank, Hash(owner.piece.value), {})

    def save(self) -> Path:
        """Write trained.safetensors into the plan's folder, as Runner.train does; return its path."""
        return self._write(TRAINED_FILE).replace(self._path / TRAINED_FILE)

    def close(self) -> None:
        """End the daemons. What was not saved is lost. Raises NotSaved where the last checkpoint failed."""
        self._is_closed = True
        atexit.unregister(self.close)
        self._at_the_end.close()
        if isinstance(self._error, NotSaved):
            raise self._error

    def _begin_daemons(
        self, job: Job, initial: Mapping[str, Array] | None, addresses: Mapping[str, str] | None
    ) -> None:
        self._job_folder = self._at_the_end.enter_context(job_folder(self._path))
        machines = machines_at(PlanFolder(self.plan, self._path), addresses)
        self._machines = on_allotted_nodes(machines, [rank.host for rank in self.plan.ranks])
        places = {rank.host: self._machines.of(rank.host).address for rank in self.plan.ranks}
        self._ranks = StepperEnd(places, self._job_folder)
        self._at_the_end.callback(self._end_daemons)
        write_job(self._job_folder, job, initial)
        write_record(self._job_folder / CHANNEL_FILE, self._ranks.channel)
        self._daemons.start()
        atexit.register(self.close)
        self._await_all(Ready)

    def _end_daemons(self) -> None:
        if self._daemons.is_alive():
            for rank in self.plan.ranks:
                try:
                    self._ranks.send(rank.rank, Close(self._saves.is_due_at_end(self.steps)), {})
                except PartcError:  # it has not come yet, or has gone: the others would wait for it
                    self._end_at_once()
                    break
        self._ranks.close()
        if self._daemons.ident is not None:  # a thread that has not begun finds that this is closed
            self._daemons.join()
        has_trained = self.steps > self.begun.step
        if self._is_traced and has_trained and self._error is None and not self.times:
            self.times = {rank.rank: read_times(self._job_folder, rank.rank) for rank in self.plan.ranks}

    def __enter__(self) -> "Stepper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        """Have the daemons started, and wait for their end: what a thread of its own does."""
        if self._is_closed:
            return
        try:
            launch(
                [rank.host for rank in self.plan.ranks],
                self._job_folder,
                self._path / LOG_FILE,
                self._machines,
                None,
                None,
                DAEMON,
                [self._ranks.sockets],
                redirect=self._redirect,
                requests=self._stop,
            )
        except PartcError as error:
            self._error = error

    def _end_at_once(self) -> None:
        self._stop.hurry(signal.SIGTERM)

    def _send(self, rank: int, message: StepperMessage, arrays: Mapping[str, Array]) -> None:
        """Send to a rank. Raises the error of the rank that failed, where this one is gone."""
        try:
            self._ranks.send(rank, message, arrays)
        except RankFailed as unreachable:
            self._daemons.join(_VERDICT_S)  # who watches the ranks will know why
            raise self._error or unreachable from None

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
            return share_feeds(self.plan, {} if feeds is None else feeds)
        if feeds:
            raise BadUsage(
                "feeds for ranks that read data of their own", at="feeds", fix="leave feeds out, or data"
            )
        return {rank.rank: {} for rank in self.plan.ranks}

    def _ask(self, rank: int, message: StepperMessage, arrays: Mapping[str, Array]) -> Array:
        self._check_open()
        self._send(rank, message, arrays)
        (array,) = self._await(Found, [rank])[rank].values()
        return array

    def _write(self, name: str) -> Path:
        self._check_open()
        path = self._job_folder.resolve() / name
        for rank in self.plan.ranks:
            self._send(rank.rank, Write(str(path)), {})
        self._await_all(Written)
        return path

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._daemons.is_alive():
            raise BadUsage("the runner is closed", at="runner", fix="make another one")

    def check_fetches(self, names: Sequence[str]) -> None:
        """Refuse what is no output. Raises BadUsage."""
        known = [output.name for output in self.plan.outputs]
        if unknown := [name for name in names if name not in known]:
            raise BadUsage(f"no output {unknown[0]!r}", at="fetches", fix=f"fetch among {known}")


def _names_in(fetches: object, plan: Plan) -> Sequence[str]:
    """Return fetches, which may be anything, as names. Raises BadUsage."""
    if isinstance(fetches, Sequence) and all(isinstance(name, str) for name in fetches):
        return fetches
    raise BadUsage(
        f"{fetches!r:.60} is no name of an output, nor a list of names",
        at="fetches",
        fix=f"name outputs among {some_of(output.name for output in plan.outputs)}, "
        "or call run() to fetch nothing",
    )


def _begin(plan: Plan, checkpoints: Checkpoints | None, seed: int | None, data: DataAsked) -> StartPoint:
    """Return where training begins, and make way for its checkpoints."""
    if checkpoints is None:
        return StartPoint(seed=seed or 0)
    remove_parts(Path(checkpoints.folder))
    return resume_from(plan, Path(checkpoints.folder), seed, data, log.info)


class _SaveClock:
    """Tells after which steps a training is saved."""

    def __init__(self, options: Checkpoints | None, done: int) -> None:
        self._asked = options
        self._saved = done
        self._saved_s = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Tell whether a step is one to save after; then it is taken for saved."""
        if self._asked is None:
            return False
        every_steps, every_s = self._asked.every_steps, self._asked.every_s
        is_due = every_steps is not None and step % every_steps == 0
        if is_due or (every_s is not None and time.monotonic() - self._saved_s >= every_s):
            self._saved, self._saved_s = step, time.monotonic()
            return True
        return False

    def is_due_at_end(self, step: int) -> bool:
        """Tell whether something was trained since the last save."""
        return self._asked is not None and step > self._saved


def _check_synchronous(plan: Plan) -> None:
    if plan.asynchronous:
        raise BadUsage(
            "asynchronous workers have no steps in common that one could run one by one",
            at="the plan",
            fix="train it with Runner(plan).train(data, steps), or compile it without asynchronous",
        )
