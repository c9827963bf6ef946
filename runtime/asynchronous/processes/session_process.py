"""What a server's process and a worker's have in common: the job, the plan, sockets, data."""

from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.asynchronous.processes.job import read_session_job
from partc.runtime.asynchronous.processes.sockets import PeerSockets
from partc.runtime.asynchronous.sessions.session import plan_of_data, with_workers
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.data.checkpoint import map_arrays
from partc.runtime.data.feeds import Shares, Source, open_source
from partc.runtime.data.initial import FirstValues, InitialValues
from partc.runtime.data.step_draws import draw_share
from partc.runtime.jobs.job import INITIAL_FILE, read_job
from partc.runtime.plan.plan_folder import PlanFolder, open_plan_folder
from partc.runtime.plan.program import Rank

Array = np.ndarray[Any, np.dtype[Any]]

POLL_S = 0.2


class SessionProcess:
    """A process of a job. Steps are counted from the training's beginning, whoever resumed it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder
        self.job = read_job(folder)
        self.sessions = read_session_job(folder)
        folder_read = open_plan_folder(self.job.plan_folder)  # start_check.py has seen its files
        self.plan = with_workers(folder_read.plan, len(self.sessions.steps))
        self.plan_folder = PlanFolder(self.plan, folder_read.path)
        self.plan_of_data = plan_of_data(self.plan, self.job.sizes)
        self.mesh = PeerSockets(name, self.sessions, folder, self.job.deadline_s)

    def close(self) -> None:
        """Close the sockets."""
        self.mesh.close()

    def first_values(self) -> FirstValues:
        """Return what variables begin with."""
        if self.job.resumed_from:
            return StoredValues(Path(self.job.resumed_from))
        initial = map_arrays(self.folder / INITIAL_FILE) if self.job.has_initial else None
        return InitialValues(self.plan_folder, initial)

    def open_source(self) -> Source:
        """Open the data, as all workers together see it."""
        job, first = self.job, max(self.batch_of(min(self.sessions.steps) + 1), 0)
        return open_source(job.data, self.plan_of_data, job.seed, job.is_shuffled, first, job.steps_ahead)

    def batch_of(self, step: int) -> int:
        """Return which batch of the data a worker's step takes."""
        return step - 1 - max(self.sessions.steps) + self.job.first_batch - self.job.data_from

    def share_and_draws(self, source: Shares, rank: Rank, step: int) -> dict[str, Array]:
        """Return what a rank is fed in a step (from 1), and what it draws."""
        share = source.share(rank, self.batch_of(step))
        return share | draw_share(self.plan_of_data, rank, share, step - 1, self.job.seed)
