"""Start servers and workers as processes of their own, and watch over them.

a worker dies without a word, or hangs     the others train on; the servers forget it
a worker stops with an error               the run ends with that error
a server dies or hangs, or all workers     the run ends

The command that starts one under its keeper, here or on another machine:

    localhost     python -m partc.runtime.supervision.keeper JOB_FOLDER NAME MODULE JOB_FOLDER PART NUMBER
    elsewhere     ssh ADDRESS "cd FOLDER && exec env NAME=VALUE.. python -m .."      same Python, same paths

PARTC_SSH names another program that is called as ssh is. A remote process ends when its connection does.
"""

import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

from partc.runtime.asynchronous.endpoints import endpoints_of
from partc.runtime.asynchronous.job import SessionJob, write_session_job
from partc.runtime.asynchronous.mesh import Mesh, limit_of_messages
from partc.runtime.asynchronous.messages import Finish, Gone
from partc.runtime.asynchronous.session import describe_worker, server_name, servers_of, worker_name
from partc.runtime.engines.engine import passed_on, rank_environment
from partc.runtime.engines.machines import Machine, Machines, write_environments
from partc.runtime.engines.rank_command import KEEPER
from partc.runtime.errors import BadUsage, Cause, RankFailed
from partc.runtime.jobs.job_folder import held_folder
from partc.runtime.jobs.launcher import (
    Line,
    Log,
    OnProgress,
    StopRequest,
    error_of,
    progress_in,
    read_lines,
    taken,
)
from partc.runtime.plan.program import Plan
from partc.runtime.supervision.messages import Ended
from partc.runtime.supervision.roster import Trouble, how
from partc.runtime.supervision.stop_signals import stop_signals
from partc.runtime.supervision.supervisor import FOLDERS, Supervisor
from partc.runtime.transports.locked_sockets import LOCAL

MODULE = "partc.runtime.asynchronous.process"


def command_for(job_folder: Path, name: str, part: str, number: int, machine: Machine) -> list[str]:
    """Return the command for a server or worker on a host. Raises BadUsage."""
    folder, address = str(job_folder.absolute()), machine.address
    python = machine.python or sys.executable
    started = [python, "-m", KEEPER, folder, name, MODULE, folder, part, str(number)]
    if address == LOCAL:
        return started
    if address.startswith("-"):
        fix = "write a network name: what begins with a dash, ssh takes for an option"
        raise BadUsage(f"no address: {address!r}", at="cluster.json: hosts", fix=fix)
    variables = [f"{variable}={value}" for variable, value in passed_on().items()]
    remote = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, *started])}"
    return [*_find_ssh(), address, remote]


def _find_ssh() -> list[str]:
    chosen = shlex.split(os.environ.get("PARTC_SSH", "ssh"))
    if not chosen or shutil.which(chosen[0]) is None:
        raise BadUsage(
            "no ssh was found to start processes on other machines",
            at=f"PARTC_SSH={os.environ['PARTC_SSH']}" if "PARTC_SSH" in os.environ else "PATH",
            fix="install an ssh client, or set PARTC_SSH to a program that is called as ssh is",
        )
    return chosen


_GRACE_S = 5.0  # from a polite end to a kill
_LOOK_S = 0.1
_UNHEARD_S = 2.0  # between the end of a process and its keeper's word of it


def launch_sessions(
    plan: Plan,
    job_folder: Path,
    log: Path,
    machines: Machines,
    staleness: int | None,
    on_progress: OnProgress | None,
    timeout_s: float | None,
) -> tuple[str, ...]:
    """Run an asynchronous job to its end; return which workers were lost on the way.

    A job in which no process gets on for `timeout_s` is ended. Raises the error of who failed first, and
    Stopped where a signal asked for an end.
    """
    addresses = machines.addresses
    hosts = {server_name(rank.rank): rank.host for rank in servers_of(plan)}
    hosts |= {worker_name(number): place.host for number, place in enumerate(plan.asynchronous)}
    with (
        stop_signals() as signals,
        held_folder(Path(tempfile.gettempdir()), FOLDERS) as sockets,
        log.open("w") as stream,
        ExitStack() as at_the_end,
    ):
        endpoints = endpoints_of(plan, addresses, str(sockets))
        session_job = SessionJob(endpoints, limit_of_messages(plan), len(plan.asynchronous), staleness)
        write_session_job(job_folder, session_job)
        write_environments(job_folder, hosts, machines)
        supervisor = at_the_end.enter_context(
            Supervisor(hosts, addresses, job_folder, timeout_s, folders=(sockets,))
        )

        @cache
        def mesh() -> Mesh:
            """Connect when there is something to tell: a server that fails to start is to say so itself."""
            return at_the_end.enter_context(closing(Mesh("launcher", session_job, job_folder, _GRACE_S)))

        crew = at_the_end.enter_context(_crew(plan, job_folder, machines, supervisor))
        stop = StopRequest(supervisor, signals)
        return _Watch(plan, crew, supervisor, stop, mesh, Log(stream), on_progress).to_the_end()


class _Crew:
    """The processes and what they print."""

    def __init__(self, plan: Plan, job_folder: Path, machines: Machines) -> None:
        self.lines: queue.Queue[Line] = queue.Queue()
        servers = {server_name(rank.rank): ("server", rank.rank, rank.host) for rank in servers_of(plan)}
        workers = {
            worker_name(number): ("worker", number, place.host)
            for number, place in enumerate(plan.asynchronous)
        }
        commands = {
            name: command_for(job_folder, name, part, number, machines.of(host))
            for name, (part, number, host) in (servers | workers).items()
        }
        self.processes = {name: self._start(name, command) for name, command in commands.items()}

    def end(self) -> None:
        """End whoever still runs."""
        deadline_s = time.monotonic() + _GRACE_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=rank_environment(),
            start_new_session=True,  # a terminal's Ctrl-C is for the launcher
        )
        read_lines(name, process, self.lines)
        return process


@contextmanager
def _crew(plan: Plan, job_folder: Path, machines: Machines, supervisor: Supervisor) -> Iterator[_Crew]:
    crew = _Crew(plan, job_folder, machines)
    try:
        yield crew
    finally:
        supervisor.end()
        crew.end()


class _Watch:
    """Decides what becomes of a job whose workers do not need each other."""

    def __init__(
        self,
        plan: Plan,
        crew: _Crew,
        supervisor: Supervisor,
        stop: StopRequest,
        mesh: Callable[[], Mesh],
        log: Log,
        on_progress: OnProgress | None,
    ) -> None:
        self._plan = plan
        self._crew = crew
        self._supervisor = supervisor
        self._stop = stop
        self._mesh = mesh
        self._log = log
        self._on_progress = on_progress
        self._servers = [server_name(rank.rank) for rank in servers_of(plan)]
        self._training = {worker_name(number): number for number in range(len(plan.asynchronous))}
        self._trained: list[str] = []
        self._lost: list[str] = []
        self._over_s: dict[str, float] = {}  # process -> when it was first seen to have ended

    def to_the_end(self) -> tuple[str, ...]:
        """Watch until the last worker has ended, let the servers write, and return who was lost."""
        while self._training:
            self._look()
        if not self._trained:
            raise RankFailed("every worker died", at="; ".join(self._lost), fix=f"read {self._log.path}")
        for server in self._servers:
            self._mesh().post(server, Finish())
        while self._servers:
            self._look()
        self._forward()
        return tuple(self._lost)

    def _look(self) -> None:
        self._forward()
        self._supervisor.watch(_LOOK_S)
        self._stop.look()
        roster = self._supervisor.roster
        if self._stop.number and not roster.living():
            raise self._stop.error()
        for name, ended in roster.ended().items():
            if ended.code == 0:
                self._ended_well(name)
        for trouble in [*roster.troubles(), *self._unheard()]:
            self._troubled(trouble)

    def _forward(self) -> None:
        """Hand progress on, and log the rest."""
        for name, line in [*taken(self._crew.lines), *self._supervisor.take_lines()]:
            progress = progress_in(line)
            first = min(self._training, key=self._training.__getitem__, default="")
            if progress is None:
                self._log.write(name, line)
            elif self._on_progress is not None and name == first:
                self._on_progress(progress)

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
        """Do without a worker; without anybody else nothing goes on."""
        cause = trouble.cause
        number = self._training.get(cause.member)
        if number is None or _says_why(trouble.ended) or (cause.kind == "stuck" and not self._trained):
            raise error_of(trouble, self._log.path)
        self._training.pop(cause.member)
        lost = f"{describe_worker(self._plan, number)} {cause.reason}"
        self._lost.append(lost)
        self._log.write("launcher", f"{lost}; the others train on")
        self._supervisor.order("end", [cause.member])  # the member; if it is dead, its keeper
        self._supervisor.roster.forget(cause.member)
        for server in self._servers:
            self._mesh().post(server, Gone(number))


def _says_why(ended: Ended | None) -> bool:
    return ended is not None and ended.failure is not None
