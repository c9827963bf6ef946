"""What the first server decides for all: which pushes take effect, who may begin a step, when to save.

    a push        every server has all of it ─ Commit ─> every server applies it ─ Applied ─>
    a checkpoint  no Commit meanwhile; when all that was committed is applied: Save, and on
    a worker      that has died is Gone: what of it is not committed is applied nowhere
                  that comes back goes on behind its last committed step, when that is applied everywhere

So a push is applied by all servers or by none, and what a checkpoint holds are whole pushes. Decisions
alone: no sockets, no clocks, no files.

Staleness is bounded (`Clock`):

    step t of worker w may start  <=>  every live worker has finished step t - S - 1

A step is finished when every server has applied what it pushes. So whoever computes step t sees all
updates of all live workers up to step t - S - 1, and perhaps newer ones. S = 0: rounds. A worker that comes
back is behind the others, who wait for it from then on.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NIPS 2013, section 3. There a clock may also be older than what is read; here, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partc.runtime.asynchronous.sessions.messages import (
    Applied,
    Ask,
    Commit,
    End,
    Finish,
    Gone,
    Grant,
    Join,
    Kept,
    Lost,
    Open,
    Opened,
    ReadyToCommit,
    Save,
    SessionMessage,
    ShardWritten,
    ToChief,
    ToServers,
    Welcome,
)
from partc.runtime.asynchronous.sessions.session import session_name, worker_of
from partc.runtime.asynchronous.sessions.worker_variables import worker_arrays
from partc.runtime.plan.variables import PlanVariable

Grants = list[tuple[int, int]]  # (worker, step)


class Clock:
    """Answers questions for steps as the slowest live worker advances.

    `steps`: the step that each worker has finished before. `staleness` None: nobody waits.
    """

    def __init__(self, steps: Sequence[int], staleness: int | None) -> None:
        self._staleness = staleness
        self._finished = dict(enumerate(steps))
        self._asking: dict[int, int] = {}

    def ask(self, worker: int, step: int) -> Grants:
        """Note that a worker wants to start a step; return who may start what from now on."""
        if worker in self._finished:
            self._asking[worker] = step
        return self._grant()

    def finished(self, worker: int, step: int) -> Grants:
        """Note that every server has applied a worker's step."""
        if worker in self._finished:
            self._finished[worker] = step
        return self._grant()

    def lose(self, worker: int) -> Grants:
        """Wait for a worker no more."""
        self._finished.pop(worker, None)
        self._asking.pop(worker, None)
        return self._grant()

    def back(self, worker: int, step: int) -> None:
        """Wait for a worker again: it goes on behind a step."""
        self._finished[worker] = step

    def _grant(self) -> Grants:
        slowest = min(self._finished.values(), default=0)
        allowed = [
            (worker, step)
            for worker, step in self._asking.items()
            if self._staleness is None or step <= slowest + self._staleness + 1
        ]
        for worker, _ in allowed:
            del self._asking[worker]
        return allowed


Array = np.ndarray[Any, np.dtype[Any]]

Tell = Callable[[int, ToServers], None]  # a server, by its rank
SendAnswer = Callable[[int, SessionMessage, Sequence[Array]], None]  # the worker of a session


def never_due(step: int) -> bool:
    """Tell that no checkpoint is due."""
    return False


@dataclass(slots=True)
class SavePolicy:
    """When checkpoints are due, and who is told of written ones.

    `is_due`: asked with the mean step of all workers, after every push that is committed. `written`: told
    what was wrong on servers that could not write their part.
    """

    is_due: Callable[[int], bool] = never_due
    written: Callable[[Sequence[str]], None] = lambda faults: None


@dataclass(slots=True)
class _Life:
    """A session as the chief sees it: from the start of a worker's process to its end."""

    session: int
    opened: set[int] = field(default_factory=set)  # servers
    ready: dict[int, set[int]] = field(default_factory=dict)  # step -> servers
    local_values: dict[int, dict[str, Array]] = field(default_factory=dict)  # of steps that are not committed


class Coordinator:
    """The chief's decisions.

    `steps`: how many each worker has trained before. `local_values`: variables of workers alone.
    """

    def __init__(
        self,
        steps: Sequence[int],
        servers: Sequence[int],
        staleness: int | None,
        local_variables: Sequence[PlanVariable],
        tell: Tell,
        answer: SendAnswer,
        saves: SavePolicy,
    ) -> None:
        self.steps = list(steps)  # worker -> its last step that is committed
        self.local_values: dict[int, dict[str, Array]] = {}  # worker -> what it kept after that step
        self._servers = set(servers)
        self._applied = {worker: dict.fromkeys(servers, step) for worker, step in enumerate(steps)}
        self._worker_variables = local_variables
        self._tell = tell
        self._answer = answer
        self._clock = Clock(steps, staleness)
        self._lives: dict[int, _Life] = {}  # by worker
        self._joining: dict[int, int] = {}  # worker -> session
        self._lost: dict[int, int] = {}  # worker -> its last session that was lost
        self._policy = saves
        self._saves = False
        self._saved = list(steps)  # the steps that the last checkpoint holds
        self._writing: set[int] = set()  # servers
        self._faults: list[str] = []
        self._ends = False
        self._is_over = False

    @property
    def mean_step(self) -> int:
        """How many steps workers have trained, in the mean: the step of a checkpoint."""
        return sum(self.steps) // len(self.steps)

    @property
    def is_ending(self) -> bool:
        """Whether no worker is left to train."""
        return self._ends

    def receive(self, message: ToChief, frames: Sequence[memoryview] = ()) -> None:
        """Take in a message and decide what follows from it."""
        match message:
            case Join(session=session):
                self._join(session)
            case Opened(session=session, server=server):
                self._opened(session, server)
            case Ask(session=session, step=step) if self._life(session) is not None:
                self._grant(self._clock.ask(self._worker(session), step))
            case Kept(session=session, step=step) if (life := self._life(session)) is not None:
                life.local_values[step] = worker_arrays(
                    self._worker_variables, frames, session_name(session, self._workers)
                )
            case ReadyToCommit(session=session, step=step, server=server) if (
                life := self._life(session)
            ) is not None:
                life.ready.setdefault(step, set()).add(server)
            case Applied(session=session, step=step, server=server):
                self._note_applied(self._worker(session), step, server)
            case Lost(session=session):
                self._lose(session)
            case ShardWritten(server=server, fault=fault):
                self._note_written(server, fault)
            case End(saves=saves):
                self._ends, self._saves = True, saves
        self._go_on()

    @property
    def _workers(self) -> int:
        return len(self.steps)

    def _worker(self, session: int) -> int:
        return worker_of(session, self._workers)

    def _life(self, session: int) -> _Life | None:
        """Return a session that goes on; None of one that has ended."""
        life = self._lives.get(self._worker(session))
        return life if life is not None and life.session == session else None

    def _go_on(self) -> None:
        """Do what has become possible."""
        for worker in tuple(self._lives):
            while self._commit(worker):
                pass
        for worker in tuple(self._joining):
            self._open(worker)
        if (self._saves or self._ends) and not self._writing and all(map(self._is_applied, self._applied)):
            self._save_or_end()

    def _commit(self, worker: int) -> bool:
        """Let a worker's next step take effect, if it may."""
        life, step = self._lives.get(worker), self.steps[worker] + 1
        if life is None or self._saves or self._ends or life.ready.get(step) != self._servers:
            return False
        if self._worker_variables:
            if step not in life.local_values:
                return False
            self.local_values[worker] = life.local_values.pop(step)
        del life.ready[step]
        self.steps[worker] = step
        self._saves = not self._writing and self._policy.is_due(self.mean_step)
        self._tell_all(Commit(life.session, step))
        return True

    def _is_applied(self, worker: int) -> bool:
        """Tell whether all that is committed of a worker is applied everywhere."""
        return min(self._applied[worker].values()) == self.steps[worker]

    def _save_or_end(self) -> None:
        if self._saves and self.steps != self._saved:
            self._saves, self._saved, self._writing = False, list(self.steps), set(self._servers)
            self._tell_all(Save(tuple(self.steps)))
            self._go_on()
            return
        self._saves = False
        if self._ends and not self._is_over:
            self._is_over = True
            self._tell_all(Finish())

    def _note_written(self, server: int, fault: str) -> None:
        if server not in self._writing:
            return
        self._writing.remove(server)
        self._faults += [fault] if fault else []
        if not self._writing:
            faults, self._faults = self._faults, []
            if faults:
                self._saved = []
            self._policy.written(faults)

    def _note_applied(self, worker: int, step: int, server: int) -> None:
        applied = self._applied[worker]
        if server in applied:
            applied[server] = max(applied[server], step)
            self._grant(self._clock.finished(worker, min(applied.values())))

    def _join(self, session: int) -> None:
        worker = self._worker(session)
        life = self._lives.get(worker)
        if session <= self._lost.get(worker, -1) or (life is not None and session <= life.session):
            return  # a late word of somebody who has died since
        if life is not None:
            self._lose(life.session)  # the launcher's word of its end is still on its way
        self._joining[worker] = session

    def _open(self, worker: int) -> None:
        if self._ends or not self._is_applied(worker):
            return
        session = self._joining.pop(worker)
        self._lives[worker] = _Life(session)
        self._clock.back(worker, self.steps[worker])
        self._tell_all(Open(session, self.steps[worker]))

    def _opened(self, session: int, server: int) -> None:
        if (life := self._life(session)) is None:
            return
        life.opened.add(server)
        if life.opened == self._servers:
            worker = self._worker(session)
            local_values = self.local_values.get(worker, {})
            arrays = [local_values[variable.name] for variable in self._worker_variables if local_values]
            self._answer(session, Welcome(self.steps[worker]), arrays)

    def _lose(self, session: int) -> None:
        worker = self._worker(session)
        life = self._lives.get(worker)
        self._lost[worker] = max(session, self._lost.get(worker, -1))
        if life is not None and life.session > session:
            return
        if self._joining.get(worker, session) == session:
            self._joining.pop(worker, None)
            self._grant(self._clock.lose(worker))
        if life is not None:
            del self._lives[worker]
            self._tell_all(Gone(session))

    def _grant(self, grants: Grants) -> None:
        for worker, step in grants:
            self._answer(self._lives[worker].session, Grant(step), ())

    def _tell_all(self, message: ToServers) -> None:
        for server in sorted(self._servers):
            self._tell(server, message)
