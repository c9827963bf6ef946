"""Decides what becomes of a job whose workers do not need each other."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from partc.runtime.asynchronous.processes.job import SessionsEnd
from partc.runtime.asynchronous.processes.processes import Crew
from partc.runtime.asynchronous.processes.sockets import PeerSockets
from partc.runtime.asynchronous.sessions.messages import End, Lost
from partc.runtime.asynchronous.sessions.session import (
    describe_worker,
    server_name,
    servers_of,
    session_name,
    worker_name,
    worker_of,
)
from partc.runtime.errors import Cause, Diverged, PartcError, RankFailed
from partc.runtime.jobs.job import Checkpoints, Notice, Progress, Restarted, Saved
from partc.runtime.jobs.launcher import Log, OnProgress, StopRequest, error_of, progress_in, taken
from partc.runtime.plan.program import Plan
from partc.runtime.supervision.messages import Ended
from partc.runtime.supervision.roster import Trouble, how
from partc.runtime.supervision.supervisor import Supervisor

_LOOK_S = 0.1
_UNHEARD_S = 2.0  # between the end of a process and its keeper's word of it
_RESCUE_S = 120.0  # for servers to write what they have
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Rules:
    """How the sessions of a job go.

    `worker_steps`: how many each worker has trained before. `restarts`: how often a worker that died is
    started again. `checkpoints`: None where nothing is saved.
    """

    worker_steps: tuple[int, ...]
    staleness: int | None = None
    restarts: int = 0
    checkpoints: Checkpoints | None = None


class SessionsWatch:
    """Watches over the processes of one job."""

    def __init__(
        self,
        plan: Plan,
        crew: Crew,
        supervisor: Supervisor,
        stop: StopRequest,
        mesh: Callable[[], PeerSockets],
        log: Log,
        rules: Rules,
        on_progress: OnProgress | None,
    ) -> None:
        self._plan = plan
        self._workers = len(plan.asynchronous)
        self._crew = crew
        self._supervisor = supervisor
        self._stop = stop
        self._mesh = mesh
        self._log = log
        self._rules = rules
        self._on_progress = on_progress
        self._servers = [server_name(rank.rank) for rank in servers_of(plan)]
        self._chief = self._servers[0]
        self._training = {worker_name(number): number for number in range(self._workers)}  # name -> session
        self._returning: dict[int, float] = {}  # session -> when it is to begin
        self._trained: list[str] = []
        self._lost: list[str] = []
        self._told_to_stop: set[str] | None = None  # None: nobody is to stop
        self._saved_step: int | None = None  # of the last checkpoint
        self._over_s: dict[str, float] = {}  # process -> when it was first seen to have ended

    def to_the_end(self) -> SessionsEnd:
        """Watch until the last worker has ended, and let the servers write."""
        try:
            while self._training or self._returning:
                self._look()
            if not self._trained:
                if self._stop.number:
                    raise self._stop.error()
                raise RankFailed("every worker died", at="; ".join(self._lost), fix=f"read {self._log.path}")
        except PartcError as error:
            self._rescue(error)
            raise
        self._end_servers(self._saves_at_the_end())
        self._forward()
        return SessionsEnd(tuple(self._trained), tuple(self._lost), self._stop.number)

    def _saves_at_the_end(self) -> bool:
        options = self._rules.checkpoints
        if options is None:
            return False
        return bool(self._stop.number) or options.every_steps is not None or options.every_s is not None

    def _end_servers(self, saves: bool) -> None:
        self._mesh().post(self._chief, End(saves))
        while self._servers:
            if self._stop.is_hurried:
                raise self._stop.error()
            self._look()

    def _rescue(self, error: PartcError) -> None:
        """Let the servers save what they have, if all of them live, and it is worth it."""
        servers = set(self._servers)
        is_to_blame = error.cause is not None and error.cause.member in servers
        is_whole = not is_to_blame and servers <= set(self._supervisor.roster.living())
        if self._rules.checkpoints is None or not is_whole or isinstance(error, Diverged):
            return
        for name in [*self._training]:
            self._dismiss(name)
        self._returning.clear()
        self._mesh().post(self._chief, End(saves=True))
        ended: dict[str, Ended] = {}
        deadline_s = time.monotonic() + _RESCUE_S
        while time.monotonic() < deadline_s and not self._stop.is_hurried:
            self._forward()
            self._supervisor.watch(_LOOK_S)
            ended = self._supervisor.roster.ended()
            if servers <= ended.keys() or not all(ended[name].is_well for name in servers & ended.keys()):
                break
        if self._saved_step is not None and all(name in ended and ended[name].is_well for name in servers):
            self._tell(
                f"what was trained is saved, after step {self._saved_step}: --resume goes on from there"
            )

    def _look(self) -> None:
        self._forward()
        self._supervisor.watch(_LOOK_S)
        for text in self._supervisor.roster.silences():
            self._tell(text)
        if self._training:
            self._stop.look()
        roster = self._supervisor.roster
        for name, ended in roster.ended().items():
            if ended.is_well:
                self._ended_well(name)
            elif self._stop.number and name in self._training:  # before it could hear that it is to stop
                self._dismiss(name)
            elif self._stop.number and name in self._servers:
                raise self._stop.error()
        if self._stop.number:
            self._returning.clear()
            self._stop_the_late(roster.living())
        for trouble in [*roster.troubles(), *self._unheard()]:
            self._troubled(trouble)
        for session in [session for session, at_s in self._returning.items() if at_s <= time.monotonic()]:
            del self._returning[session]
            name = session_name(session, self._workers)
            self._training[name] = session
            roster.expect(name, self._plan.asynchronous[worker_of(session, self._workers)].host)
            self._crew.start_session(session)

    def _stop_the_late(self, living: list[str]) -> None:
        """Have those stop, too, who were not heard yet when the others were told; nobody twice."""
        if self._told_to_stop is None:
            self._told_to_stop = set(living)
        if late := set(living) - self._told_to_stop:
            self._told_to_stop |= late
            self._supervisor.order("stop", sorted(late))

    def _forward(self) -> None:
        """Hand on what a person should know, and log the rest."""
        for name, line in [*taken(self._crew.lines), *self._supervisor.take_lines()]:
            message = progress_in(line)
            if isinstance(message, Saved):
                self._saved_step = message.step
            if message is None:
                self._log.write(name, line)
            elif self._on_progress is not None and (
                name == self._first() or not isinstance(message, Progress)
            ):
                self._on_progress(message)

    def _first(self) -> str:
        """Return which process's progress is shown: the first worker's that trains."""
        return min(
            self._training, key=lambda name: worker_of(self._training[name], self._workers), default=""
        )

    def _ended_well(self, name: str) -> None:
        if name in self._training:
            self._training.pop(name)
            self._trained.append(name)
        elif name in self._servers:
            self._servers.remove(name)

    def _unheard(self) -> Iterator[Trouble]:
        """Yield whose processes have ended though no keeper said so: ssh found no host, say."""
        known = self._supervisor.roster.ended()
        for name in [name for name in (*self._training, *self._servers) if name not in known]:
            code = self._crew.processes[name].poll()
            now_s = time.monotonic()
            if code is not None and now_s - self._over_s.setdefault(name, now_s) > _UNHEARD_S:
                position = self._supervisor.roster.position(name)
                cause = Cause("killed", name, "", "", position.step, position.at, f"died: {how(code)}")
                yield Trouble(cause, False, now_s)

    def _troubled(self, trouble: Trouble) -> None:
        """Do without a worker, for a while at least; without anybody else nothing goes on."""
        cause = trouble.cause
        session = self._training.get(cause.member)
        if session is None or _says_why(trouble.ended) or (cause.kind == "stuck" and not self._trained):
            counted = " in the mean of workers" if cause.member in self._servers else ""
            raise error_of(trouble, self._log.path, counted)
        self._dismiss(cause.member)
        died = f"{describe_worker(self._plan, worker_of(session, self._workers))} {cause.reason}"
        lives = session // self._workers
        if lives >= self._rules.restarts or self._stop.number:
            self._lost.append(died)
            self._log.write("launcher", f"{died}; the others train on")
            return
        wait_s = min(_LONGEST_WAIT_S, 2.0**lives)
        self._returning[session + self._workers] = time.monotonic() + wait_s
        self._tell(f"{died}; it is started again in {wait_s:.0f} s ({lives + 1} of {self._rules.restarts})")
        if self._on_progress is not None:
            self._on_progress(Restarted(cause.member))

    def _dismiss(self, name: str) -> None:
        """Have a worker ended, and forgotten by the servers."""
        session = self._training.pop(name)
        self._supervisor.order("end", [name])  # the member; if it is dead, its keeper
        self._supervisor.roster.forget(name)
        self._crew.give_up(name)
        self._mesh().post(self._chief, Lost(session))

    def _tell(self, text: str) -> None:
        self._log.write("launcher", text)
        if self._on_progress is not None:
            self._on_progress(Notice(text))


def _says_why(ended: Ended | None) -> bool:
    return ended is not None and ended.failure is not None
