"""The process of one server."""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.asynchronous.processes.job import ServerReport, kept_file, pieces_file, report_file
from partc.runtime.asynchronous.processes.session_process import POLL_S, SessionProcess
from partc.runtime.asynchronous.servers.coordinator import SavePolicy
from partc.runtime.asynchronous.servers.saving import ServerSaving
from partc.runtime.asynchronous.servers.server import Server, SharedValues, Surroundings
from partc.runtime.asynchronous.sessions.session import server_name, servers_of
from partc.runtime.asynchronous.sessions.worker_variables import mean_over_workers, worker_variables
from partc.runtime.data.batches import inputs_of
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.data.feeds import Source
from partc.runtime.data.step_draws import draws_of
from partc.runtime.execution.device import Sessions
from partc.runtime.jobs.job import write_record
from partc.runtime.supervision.messages import Position
from partc.runtime.supervision.stop_signals import STOPPING
from partc.runtime.supervision.track import Track

Array = np.ndarray[Any, np.dtype[Any]]


class ServerProcess(SessionProcess):
    """One server."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, server_name(rank))
        for number in STOPPING:  # it is the workers that stop; what they have trained is here
            signal.signal(number, signal.SIG_IGN)
        self._rank = next(server for server in servers_of(self.plan) if server.rank == rank)
        self._sources: dict[int, Source] = {}
        self._track = Track()
        self._first_values = self.first_values()
        options = self.job.checkpoints
        self._saving = (
            None
            if options is None
            else ServerSaving(options, self.plan, rank, self.job, folder, self._tell_written)
        )
        saves = SavePolicy() if self._saving is None else SavePolicy(self._saving.is_due, self._complete)
        around = Surroundings(self._feeds, self.mesh.post, self._save, self._keep, saves, self._track.through)
        self._server = Server(
            self.plan,
            self._rank,
            Sessions(self.plan_folder),
            SharedValues(self._first_values),
            self.sessions.steps,
            self.sessions.staleness,
            around,
        )

    def describe(self) -> str:
        """Say where this process is, for messages."""
        return f"{self.name} ({self._rank.host})"

    def position(self) -> Position:
        """Return how far this server is, in steps of workers: asked by another thread."""
        return self._track.position(device="")

    def run(self) -> None:
        """Serve until no worker is left, then write what this server owns."""
        waiting, serving = self._track.place("waiting", awaits=True), self._track.place("serving")
        while not self._server.is_finished:
            self._track.begin(self._mean_step, waiting)
            for message, frames in self.mesh.receive(POLL_S):
                self._track.begin(self._mean_step, serving)
                self._server.receive(message, frames)
                self._server.advance()
            if self._saving is not None:
                self._saving.look()
        write_arrays(pieces_file(self.folder, self.name), self._server.variables())
        if self._server.coordinator is not None:
            write_arrays(kept_file(self.folder), self._kept())
        self._write_report()

    @property
    def _mean_step(self) -> int:
        """How many steps this server has applied of a worker, in the mean: comparable with theirs."""
        steps = self.sessions.steps
        return (sum(steps) + self._server.staleness.pushes) // len(steps)

    def _write_report(self) -> None:
        staleness, chief = self._server.staleness, self._server.coordinator
        report = ServerReport(
            steps=() if chief is None else tuple(chief.steps),
            saving_s=0.0 if self._saving is None else self._saving.waited_s,
            payload_bytes=self._server.payload_bytes(),
            pushes=staleness.pushes,
            missed=dict(staleness.missed),
            widest_lag=staleness.widest_lag,
            unsaved=None if self._saving is None else self._saving.unsaved,
        )
        write_record(report_file(self.folder, self.name), report)

    def _kept(self) -> dict[str, Array]:
        """Return what workers keep, put together; as it was in the beginning, where no step is committed."""
        chief = self._server.coordinator
        if chief is None:
            return {}
        means = mean_over_workers([chief.local_values[worker] for worker in sorted(chief.local_values)])
        return means or {v.name: self._first_values.part(v.name) for v in worker_variables(self.plan)}

    def _save(self, steps: tuple[int, ...]) -> None:
        if self._saving is not None:
            self._saving.begin(steps, self._server.variables(), self._kept())
        else:
            self._server.written("")

    def _tell_written(self, fault: str) -> None:
        self._server.written(fault)

    def _complete(self, faults: Sequence[str]) -> None:
        chief = self._server.coordinator
        assert self._saving is not None and chief is not None
        self._saving.complete(faults, is_last=chief.is_ending)

    def _keep(self, step: int) -> None:
        if step in self.job.read_after:
            write_arrays(pieces_file(self.folder, self.name, step), self._server.variables())

    def _feeds(self, session: int, step: int) -> Mapping[str, Array]:
        if not (inputs_of(self.plan, self._rank) or draws_of(self.plan, self._rank)):
            return {}
        if session not in self._sources:  # one each: a function gives its batches in order, and once
            self._sources[session] = self.open_source()
        return self.share_and_draws(self._sources[session], self._rank, step)
