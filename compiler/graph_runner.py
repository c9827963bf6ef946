"""What get_runner returns: a running job, stepped by the user's script, or an asynchronous one."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from partc.runtime.check_arguments import public
from partc.runtime.data.batches import join_shares
from partc.runtime.data.sharded import Batch, ShardedData
from partc.runtime.errors import BadData, BadUsage
from partc.runtime.interactive.stepper import ReplicaFeeds, Stepper
from partc.runtime.jobs.results import TRAINED_FILE
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder

Array = np.ndarray[Any, np.dtype[Any]]
FetchedValues = list[Array] | list[list[Array]]


class Training(Protocol):
    """A job that trains."""

    def run(self, fetches: str | Sequence[str], feeds: ReplicaFeeds | None) -> FetchedValues:
        """Train one step, and return what is fetched."""

    def train(self, steps: int) -> None:
        """Train so many steps on the data that the job was given."""

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""

    def save(self) -> Path:
        """Write the variables to trained.safetensors in the plan's folder."""

    def close(self) -> None:
        """End the job."""


class GraphRunner(NamedTuple):
    """What trains a graph on a cluster, and the script's place in it.

    One process runs the script and feeds every replica: it is the one worker, in Parallax's sense of the
    word, and has all replicas.
    """

    training: Training
    num_workers: int
    worker_id: int
    num_replicas_per_worker: int

    @public
    def run(self, fetches: str | Sequence[str] = (), feeds: ReplicaFeeds | None = None) -> FetchedValues:
        """Train one step; return for every fetch a list of each replica's value.

        `feeds`: data input -> a list of one array for each replica; nothing where `data` was given.
        """
        return self.training.run(fetches, feeds)

    @public
    def train(self, steps: int) -> None:
        """Train so many steps on the data that was given to get_runner."""
        self.training.train(steps)

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""
        return self.training.variables()

    def save(self) -> Path:
        """Write the variables to trained.safetensors in the plan's folder."""
        return self.training.save()

    def close(self) -> None:
        """End the job. What was not saved is lost."""
        self.training.close()

    def __enter__(self) -> "GraphRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SteppedTraining:
    """Replicas that step together, when they are asked to."""

    def __init__(self, plan: PlanFolder, data: ShardedData | None, timeout_s: float) -> None:
        read_by_ranks = data.name if data is not None and data.name is not None else ""
        self._plan = plan.plan
        self._rows: Iterator[tuple[Batch, ...]] | None = None
        if data is not None and not read_by_ranks:
            self._rows = zip(*data.streams(plan.plan.replicas), strict=False)
        self._stepper = Stepper(plan, data=read_by_ranks, timeout_s=timeout_s)

    def run(self, fetches: str | Sequence[str], feeds: ReplicaFeeds | None) -> FetchedValues:
        """Train one step on the feeds, or on the next batches of the data."""
        if self._rows is None:
            return self._stepper.run(fetches, feeds)
        if feeds:
            raise BadUsage("feeds beside data", at="feeds", fix="leave feeds out, or give get_runner no data")
        return self._stepper.run(fetches, self._next_feeds(self._rows))

    def train(self, steps: int) -> None:
        """Train so many steps."""
        for _ in range(steps):
            self.run((), None)

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""
        return self._stepper.variables()

    def save(self) -> Path:
        """Write the variables."""
        return self._stepper.save()

    def close(self) -> None:
        """End the daemons."""
        self._stepper.close()

    def _next_feeds(self, rows: Iterator[tuple[Batch, ...]]) -> ReplicaFeeds:
        batches = next(rows, None)
        if batches is None:
            raise BadData(
                f"the data ends after {self._stepper.steps} steps of {self._plan.replicas} replicas",
                at="data",
                fix="let it go on, or train fewer steps",
            )
        return {name: [np.asarray(batch[name]) for batch in batches] for name in batches[0]}


class AsynchronousTraining:
    """Replicas that train without waiting for each other: a number of steps each, and none in common."""

    def __init__(self, plan: PlanFolder, data: ShardedData | None, timeout_s: float) -> None:
        self._plan = plan
        self._data = data
        self._timeout_s = timeout_s
        self._trained: dict[str, Array] | None = None

    def run(self, fetches: str | Sequence[str], feeds: ReplicaFeeds | None) -> FetchedValues:
        """Refuse: there is no step of all replicas. Raises BadUsage."""
        raise BadUsage(
            "a step of all replicas, which do not wait for each other",
            at="run, with sync=False",
            fix="give get_runner data and call train(steps), or leave sync as it is",
        )

    def train(self, steps: int) -> None:
        """Train so many steps on every replica."""
        if self._data is None:
            raise BadUsage("no data", at="get_runner", fix="give it data=partc.shard(...)")
        data = self._data.name or self._total_batches(self._data)
        runner = Runner(self._plan)
        self._trained = runner.train(data, steps, initial=self._trained, timeout_s=self._timeout_s).variables

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""
        if self._trained is None:
            raise BadUsage("nothing was trained yet", at="variables", fix="call train(steps) first")
        return self._trained

    def save(self) -> Path:
        """Return the file that the last training left."""
        self.variables()
        return self._plan.path / TRAINED_FILE

    def close(self) -> None:
        """Do nothing: servers and workers have ended with the training."""

    def _total_batches(self, data: ShardedData) -> Iterator[Mapping[str, Array]]:
        plan = self._plan.plan
        for batches in zip(*data.streams(len(plan.asynchronous)), strict=False):
            yield join_shares(plan, batches)
